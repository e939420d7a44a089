"""A model's download from the hub, and the answers of the ports meanwhile."""

import asyncio
import threading
from functools import partial
from pathlib import Path

from sluice_core.errors import NotReady
from sluice_core.model.files import Directory
from sluice_core.model.stored import read_config
from sluice_frontend.evidence.health import Verdict
from sluice_frontend.process.app import application, health_routes
from starlette.types import ASGIApp, Receive, Scope, Send

from ..base.config import HubConfig, WorkerConfig
from ..execution.models.config import check_built
from ..hub.cache import Stopped
from ..hub.download import download
from ..hub.progress import DownloadProgress

RETRY_AFTER_S = 30


class Arrival:
    """One model's download. The worker is live all the time: a failing download gives up itself."""

    def __init__(self, config: WorkerConfig, hub: HubConfig) -> None:
        self._hub, self._told = hub, DownloadProgress(str(hub.model))
        self._weights = config.engine.load_format != "dummy"
        self._stop = threading.Event()

    async def fetch(self) -> Path | None:
        """The checkpoint's directory; None after `stop`. Raises StartupError."""
        try:
            directory = await asyncio.to_thread(self._download)
        except Stopped:
            return None
        # If nothing had to be fetched, nobody has looked at `stop` yet.
        return None if self._stop.is_set() else directory

    def stop(self) -> None:
        """End the download soon; the received part is kept."""
        self._stop.set()

    def _download(self) -> Path:
        model, access = self._hub
        return download(
            model,
            access,
            weights=self._weights,
            check=_refuse_unbuilt,
            progress=self._told,
            stop=self._stop,
        )

    @property
    def _reason(self) -> str:
        return f"downloading {self._told.percent} %"

    def _verdict(self, ok: bool) -> Verdict:
        """Alive, however long it takes; ready not yet."""
        return Verdict(ok, self._reason, "download", self._told.percent)

    def app(self) -> ASGIApp:
        """The answers of a port: health, and 503 to everything else."""
        not_yet = partial(self._verdict, False)

        async def refuse(scope: Scope, receive: Receive, send: Send) -> None:
            raise NotReady(f"the model is on its way: {self._reason}", retry_after_s=RETRY_AFTER_S)

        app = application(health_routes(partial(self._verdict, True), not_yet, not_yet))
        app.router.redirect_slashes, app.router.default = False, refuse
        return app


def _refuse_unbuilt(directory: Path) -> None:
    """Refuse a model that this engine cannot run, before its weights are fetched."""
    source = Directory(directory)
    check_built(source, read_config(source))
