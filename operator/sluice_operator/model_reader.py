"""Reading one object's model, which goes on beside the passes where a hub takes its time."""

import asyncio
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor

from sluice_worker.sizing import SizingError

from . import hub
from .admin_token import may_be_sent, token_of
from .checkpoint import Checkpoint, CheckpointError, Unread, read
from .children import model_of
from .cluster import Cluster, Ref
from .fit import Refused
from .settings import Settings
from .spec import InferenceService, Model

Found = Checkpoint | Unread | Refused

_REREAD_S = 60.0
_SERVING_WAIT_S = 5.0
"""Pods that serve are looked after meanwhile."""
_HUB_READERS = ThreadPoolExecutor(4, "hub")
"""Not those of the API server's calls and of local models, which a hub that drips would hold up."""


class ModelReader:
    """What is known of the model of one object."""

    def __init__(self, cluster: Cluster, settings: Settings) -> None:
        self._cluster, self._settings = cluster, settings
        self._found: Found | None = None
        self._found_key, self._found_s = "", 0.0
        self._under_way: tuple[str, asyncio.Future[Found]] | None = None

    async def look(
        self, service: InferenceService, is_served: Callable[[], Awaitable[bool]] | None, now: float
    ) -> Found:
        """Read once; what could not be read is tried again now and then.

        Not while pods serve (`is_served`: whether it is this model): they have sized themselves,
        and waiting for a hub that is away would hold up what they need.
        """
        key = model_of(service)
        known = self._found if self._found_key == key else None
        is_new = isinstance(known, Checkpoint) or now - self._found_s < _REREAD_S
        if isinstance(known, Unread) and not known.is_pending:
            is_new = is_new or is_served is not None
        if known is not None and is_new:
            return known
        found = await self._reading(service, key, _SERVING_WAIT_S if is_served else None)
        if found is None:
            return known or Unread("the model is being read", is_pending=True)
        if isinstance(found, Refused) and is_served and await is_served():
            # It could be read once: what serves is looked after, and nothing is rolled out.
            found = Unread(found.message, is_pending=True)
        self._found, self._found_key, self._found_s = found, key, now
        return found

    async def _reading(
        self, service: InferenceService, key: str, wait_s: float | None
    ) -> Found | None:
        """What comes of reading the model, None if that takes longer than `wait_s`: it goes on."""
        settings, model = self._settings, service.spec.model
        if self._under_way is None or self._under_way[0] != key:
            token, loop = await self._token(service), asyncio.get_running_loop()
            if isinstance(token, Refused):
                return token
            readers = _HUB_READERS if model.repo else None
            started = loop.run_in_executor(readers, _read, model, settings, token)
            self._under_way = key, started
        future = self._under_way[1]
        await asyncio.wait({future}, timeout=wait_s)
        if not future.done():
            return None
        self._under_way = None
        return future.result()

    async def _token(self, service: InferenceService) -> str | Refused | None:
        """What the Secret that the object names holds; None without one, or without its key."""
        ref = service.spec.model.secret_ref
        if ref is None:
            return None
        secret = await self._cluster.get(Ref("Secret", service.namespace, ref.name))
        if secret and not may_be_sent(secret):
            return Refused(
                f"spec.model.secretRef: {ref.name} must be a Secret of type Opaque that "
                "the operator did not create."
            )
        return token_of(secret) if secret else None


def _read(model: Model, settings: Settings, token: str | None) -> Found:
    try:
        if model.repo is not None:
            revision = model.revision or "main"
            wanted = hub.HubModel(settings.hub_endpoint, model.repo, revision, token)
            return hub.read(wanted, model.dtype)
        return read(model.uri, model.dtype, settings.models_dir)
    except (CheckpointError, SizingError) as e:
        return Refused(str(e))
    except OSError as e:
        return Refused(f"{model.uri[:128]} cannot be read: {e.strerror or type(e).__name__}.")
