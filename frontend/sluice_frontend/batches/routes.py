"""*rim*: /v1/files and /v1/batches of one server."""

import asyncio
from collections.abc import Awaitable, Callable, Collection

from sluice_core.bounded import count
from sluice_core.errors import NotKept, NotStored, RequestError
from starlette.requests import Request
from starlette.responses import FileResponse, Response
from starlette.types import ASGIApp

from ..api import batches
from ..api.batches import Batch, BatchRequest, FileObject
from ..api.json_body import convert, parse_object
from ..api.operations import BoundOperation, Operation
from ..http.clients import CLIENT, SALT
from ..http.guards import Inflight, answer, read_body
from ..serving.runtime import Runtime
from .files import BATCH, DAY_S, FILE, Files, new_id, now_s
from .records import Record, Records
from .runner import Runner
from .upload import receive

Handle = Callable[[Request], Awaitable[Response]]
MAX_UPLOADS = 8
"""Files that a lone client sends at once."""
MAX_BODY_BYTES = 64 << 10
MAX_FILES, MAX_BATCHES, BATCHES_PAGE = 10_000, 100, 20
"""Most of a page, and a page of batches if nothing is asked for."""
NOT_KEPT = "this server keeps no files and no batches: its flag --batch-dir names a directory"


class Batches:
    """The routes, and what works on the batches. Without --batch-dir all routes say so.

    `app`: what lines go through. It stands behind the guards, and is set before `run`.
    """

    app: ASGIApp

    def __init__(self, runtime: Runtime) -> None:
        self._timeout_s = runtime.config.receive_timeout
        self._uploads = Inflight()
        self._served: Collection[str] = ()
        self._runner: Runner | None = None
        if (root := runtime.config.batch_dir) is not None:
            self._files, self._records = Files(root), Records(root)
            self._runner = Runner(self._files, self._records, runtime)

    def routes(self, served: Collection[str]) -> list[BoundOperation]:
        """Bind the operations. `served`: routes that a batch may have as its endpoint."""
        self._served = served
        handles: tuple[tuple[Operation, Handle], ...] = (
            (batches.UPLOAD, self._upload),
            (batches.FILES, self._list_files),
            (batches.FILE, self._file),
            (batches.CONTENT, self._content),
            (batches.DELETE, self._delete),
            (batches.CREATE, self._create),
            (batches.BATCHES, self._list_batches),
            (batches.BATCH, self._batch),
            (batches.CANCEL, self._cancel),
        )
        return [self._bound(operation, handle) for operation, handle in handles]

    async def run(self) -> None:
        """Send the lines of batches until cancelled."""
        if self._runner is not None:
            await self._runner.run(self.app)

    def _bound(self, operation: Operation, handle: Handle) -> BoundOperation:
        async def handler(request: Request) -> Response:
            request.scope["route"] = operation  # under whose path it is counted
            if self._runner is None:
                raise NotKept(NOT_KEPT)
            try:
                return await handle(request)
            except OSError as e:
                raise NotStored(f"the directory of --batch-dir: {e.strerror or e}") from e

        return BoundOperation(operation, handler)

    # -- files

    async def _upload(self, request: Request) -> Response:
        path = self._files.beside()
        try:
            with self._uploads.open(request.scope["state"][CLIENT], MAX_UPLOADS):
                asked = await receive(request, path, self._timeout_s)

            def keep() -> FileObject:
                file_id = new_id(FILE)
                path.replace(self._files.path(file_id))
                return self._files.publish(
                    file_id, asked.file, asked.purpose, _salt(request), asked.seconds
                )

            return answer(await asyncio.to_thread(keep))
        finally:
            path.unlink(missing_ok=True)

    async def _list_files(self, request: Request) -> Response:
        query = request.query_params
        order = query.get("order", "desc")
        if order not in ("asc", "desc"):
            raise RequestError("order must be asc or desc", param="order")
        limit, after = _limit(request, MAX_FILES, MAX_FILES), query.get("after")
        found = await asyncio.to_thread(
            self._files.list,
            _salt(request),
            after,
            limit,
            query.get("purpose"),
            is_desc=order == "desc",
        )
        return answer(found)

    async def _file(self, request: Request) -> Response:
        file_id = request.path_params["file_id"]
        return answer(await asyncio.to_thread(self._files.get, file_id, _salt(request)))

    async def _content(self, request: Request) -> Response:
        file_id = request.path_params["file_id"]
        await asyncio.to_thread(self._files.get, file_id, _salt(request))
        return FileResponse(self._files.path(file_id), media_type=batches.BINARY)

    async def _delete(self, request: Request) -> Response:
        file_id = request.path_params["file_id"]
        return answer(await asyncio.to_thread(self._files.delete, file_id, _salt(request)))

    # -- batches

    async def _create(self, request: Request) -> Response:
        body = await read_body(request, MAX_BODY_BYTES, self._timeout_s)
        asked = convert(parse_object(body), BatchRequest)
        if asked.endpoint not in self._served:
            known = ", ".join(sorted(self._served))
            raise RequestError(
                f"the endpoint {asked.endpoint[:64]!r} is none of this server; it has {known}",
                param="endpoint",
            )
        state = request.scope["state"]
        batch = await asyncio.to_thread(self._created, asked, state[SALT], state[CLIENT])
        self._wake()
        return answer(batch)

    def _created(self, asked: BatchRequest, salt: str, client: str) -> Batch:
        file = self._files.get(asked.input_file_id, salt, "input_file_id")
        if file.purpose != "batch":
            raise RequestError(
                f"the file's purpose is {file.purpose!r}, not 'batch'", param="input_file_id"
            )
        made_s, kept = now_s(), asked.output_expires_after
        batch = Batch(
            id=new_id(BATCH),
            endpoint=asked.endpoint,
            input_file_id=asked.input_file_id,
            created_at=made_s,
            expires_at=made_s + DAY_S,
            metadata=asked.metadata,
        )
        self._records.create(Record(batch, salt, client, kept.seconds if kept else None))
        return batch

    async def _list_batches(self, request: Request) -> Response:
        limit = _limit(request, MAX_BATCHES, BATCHES_PAGE)
        after = request.query_params.get("after")
        found = await asyncio.to_thread(self._records.list, _salt(request), after, limit)
        return answer(found)

    async def _batch(self, request: Request) -> Response:
        batch_id = request.path_params["batch_id"]
        return answer(await asyncio.to_thread(self._records.get, batch_id, _salt(request)))

    async def _cancel(self, request: Request) -> Response:
        batch_id = request.path_params["batch_id"]
        batch = await asyncio.to_thread(self._records.cancel, batch_id, _salt(request))
        self._wake()
        return answer(batch)

    def _wake(self) -> None:
        assert self._runner is not None
        self._runner.wake()


def _salt(request: Request) -> str:
    """The salt of the key that this request brought; "" without keys."""
    salt: str = request.scope["state"][SALT]
    return salt


def _limit(request: Request, most: int, default: int) -> int:
    """The size of a page that is asked for; raises RequestError."""
    text = request.query_params.get("limit")
    if text is None:
        return default
    if not (limit := count(text, most)):
        raise RequestError(f"limit must be a whole number from 1 to {most:,}", param="limit")
    return limit
