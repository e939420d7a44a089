"""Reading one object's model, which goes on beside the passes if a hub takes its time."""

import asyncio
import math
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor

from sluice_core.errors import StartupError
from sluice_core.model.files import cause
from sluice_core.model.sizing import SizingError

from ..children.admin_token import may_be_sent, token_of
from ..children.manifests import model_of
from ..cluster.client import Cluster, Ref
from ..settings import Settings
from ..spec.service import InferenceService, Model
from . import hub
from .checkpoint import ModelFacts, Refused, Unread, read

Found = ModelFacts | Unread | Refused

_LLAMA_CPP = "LlamaCpp"
"""Its GGUF file is read. Ollama's is not: Ollama sizes itself."""
_REREAD_S = 60.0
_MOST_REREAD_S = 600.0
"""Most seconds until a hub's model is read again after a failure: the wait starts at _REREAD_S and
doubles each time."""
_SERVING_REREAD_S = 600.0
"""Seconds until a served model is read again: pods sized themselves, but edits are judged by it."""
_MEANWHILE_S = 5.0
"""Seconds a pass waits for a reading; a longer one goes on while pods are looked after."""
_FIRST_S = 15.0
"""Seconds for a first read while nothing serves. After that, the status says what goes on, before
any pod is made. All readers may be busy with others' slow hubs."""
_DEADLINE_S = 60.0
"""Seconds until a reading is given up; a thread that hangs in it goes on."""
_HUB_READERS, _LOCAL_READERS = ThreadPoolExecutor(4, "hub"), ThreadPoolExecutor(4, "model")
"""Separate threads, also from the API server's calls. So a slow hub or a hanging file system holds
up only readings of its own kind. Four hubs' readings may take 470 MiB."""


class ModelReader:
    """Reads and remembers the model of one object."""

    def __init__(self, cluster: Cluster, settings: Settings) -> None:
        self._cluster, self._settings = cluster, settings
        self._found: Found | None = None
        self._found_key, self._found_s, self._reread_s = "", -math.inf, _REREAD_S
        self._under_way: tuple[str, asyncio.Future[Found], float] | None = None

    async def look(
        self,
        service: InferenceService,
        is_served: Callable[[], Awaitable[bool]] | None,
        now_s: float,
    ) -> Found:
        """Read once; after a failure, try again at intervals. `now_s`: any clock's.

        A long reading, or one while pods serve, goes on beside the passes: they must not wait for a
        hub that is away. `is_served`: tells if the pods serve this model.
        """
        spec = service.spec
        key = f"{model_of(service)}/{spec.hardware.accelerator}/{spec.engine.name == _LLAMA_CPP}"
        known = self._found if self._found_key == key else None
        sizes_itself = is_served and isinstance(known, Unread) and not known.is_pending
        reread_s = _SERVING_REREAD_S if sizes_itself else self._reread_s
        if known and (isinstance(known, ModelFacts) or now_s - self._found_s < reread_s):
            return known
        wait_s = 0.0 if sizes_itself else _MEANWHILE_S if is_served or known else _FIRST_S
        began_s = time.monotonic()
        found = await self._reading(service, key, wait_s)
        if found is None:
            return known or Unread("the model is being read", is_pending=True)
        if isinstance(found, Refused) and is_served and await is_served():
            # It could be read once: the serving pods are kept, and nothing is rolled out.
            found = Unread(found.message, is_pending=True)
        self._found, self._found_key, self._found_s = found, key, now_s + time.monotonic() - began_s
        return found

    def stop(self) -> None:
        """Stop waiting for the reading: it is not begun, unless it is under way."""
        if self._under_way:
            self._under_way[1].cancel()

    async def _reading(self, service: InferenceService, key: str, wait_s: float) -> Found | None:
        """The result of reading the model, None if it takes longer than `wait_s`. Then it goes on
        and is not begun again, also past its deadline."""
        settings, model = self._settings, service.spec.model
        if self._under_way is None or self._under_way[0] != key:
            token, loop = await self._token(service), asyncio.get_running_loop()
            if isinstance(token, Refused):
                return token
            on_cpu = service.spec.hardware.accelerator == "cpu"
            self.stop()
            readers = _HUB_READERS if model.repo else _LOCAL_READERS
            gguf = service.spec.engine.name == _LLAMA_CPP
            started = loop.run_in_executor(readers, _read, model, settings, token, on_cpu, gguf)
            self._under_way = key, started, time.monotonic() + _DEADLINE_S
        _, future, ends_s = self._under_way
        await asyncio.wait({future}, timeout=min(wait_s, ends_s - time.monotonic()))
        if future.cancelled():  # its object is gone; another one may have its name
            self._under_way = None
            return None
        if future.done():
            self._under_way = None
            again = bool(model.repo) and key == self._found_key
            self._reread_s = min(2 * self._reread_s, _MOST_REREAD_S) if again else _REREAD_S
            return future.result()
        if time.monotonic() < ends_s:
            return None
        return Unread(f"{model.uri[:128]} is not read after {_DEADLINE_S:g} s")

    async def _token(self, service: InferenceService) -> str | Refused | None:
        """The token in the object's Secret; None without a Secret.

        A Secret that is not there yet could become anybody's, after the model was read and when
        pods get its token.
        """
        ref = service.spec.model.secret_ref
        if ref is None:
            return None
        secret = await self._cluster.get(Ref("Secret", service.namespace, ref.name))
        if secret is None:
            return Refused(f"spec.model.secretRef: there is no Secret {ref.name}.", is_final=True)
        if not may_be_sent(secret):
            return Refused(
                f"spec.model.secretRef: {ref.name} must be a Secret of type Opaque that "
                "the operator did not create.",
                is_final=True,
            )
        token = token_of(secret, ref.token_key)
        if token is None:
            absent = (
                f"spec.model.secretRef: {ref.name} has no token under the key `{ref.token_key}`."
            )
            return Refused(absent, is_final=True)
        return token


def _read(model: Model, settings: Settings, token: str | None, on_cpu: bool, gguf: bool) -> Found:
    try:
        if model.repo is not None:
            revision = model.revision or "main"
            where = settings.hub_endpoint, model.repo, revision
            wanted = hub.HubSource(*where, token, settings.hub_proxy)
            return hub.read(wanted, model.dtype, on_cpu=on_cpu, gguf=gguf)
        return read(model.uri, model.dtype, settings.models_dir, on_cpu=on_cpu, gguf=gguf)
    except (StartupError, SizingError) as e:
        return Refused(str(e))
    except OSError as e:
        return Refused(f"{model.uri[:128]} cannot be read: {cause(e)}.")
