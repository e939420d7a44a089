"""One HTTP request's texts, from its body to the numbers of each and the answer."""

import asyncio
import time
from array import array
from collections.abc import Callable
from functools import partial
from typing import TypeVar

from sluice_core.errors import RequestError, SluiceError
from sluice_core.wire import Encode, packed
from sluice_core.work import Work, is_background
from sluice_frontend.api.operations import JSON
from sluice_frontend.api.pooling.texts import TextsRequest
from sluice_frontend.evidence.ledger import Ledger
from sluice_frontend.evidence.requests import RequestGroup, RequestTimer
from sluice_frontend.http.bodies import Answers
from sluice_frontend.http.clients import CLIENT
from sluice_frontend.http.guards import ReadReply
from sluice_frontend.http.offload import LARGE
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from ..text.texts import TextReader, Write
from .service import Service
from .stream import watched

AskedT = TypeVar("AskedT", bound=TextsRequest)
FLOAT_BYTES = array("f").itemsize


class Encoding:
    """All texts of one request. `abort` tells the engine that nobody waits for a text; one that has
    ended is ignored there."""

    def __init__(self, ledger: Ledger, abort: Callable[[str], None]) -> None:
        self._ledger, self._abort = ledger, abort
        self._group = RequestGroup()
        self._timers: list[RequestTimer] = []
        self._values: list[bytes | None] = []
        self._open = set[int]()
        self._error: SluiceError | None = None
        self._news = asyncio.Event()
        self.has_left = False

    @property
    def num_tokens(self) -> int:
        """Tokens of all texts."""
        return sum(timer.num_prompt_tokens for timer in self._timers)

    def add(self, timer: RequestTimer) -> "TextSink":
        """Take in a text that is about to be submitted."""
        timer.group = self._group
        self._ledger.recorder.without_first(timer)
        self._open.add(len(self._timers))
        self._timers.append(timer)
        self._values.append(None)
        return TextSink(self, len(self._timers) - 1)

    async def vectors(self) -> list[bytes]:
        """Packed float32 of each text, in order; raises what failed the request."""
        while self._open and self._error is None and not self.has_left:
            self._news.clear()
            await self._news.wait()
        if self._error is not None:
            raise self._error
        return [values for values in self._values if values is not None]

    def came(self, number: int, values: bytes, now_s: float) -> None:
        """Take in a vector."""
        if number in self._open:
            self._open.remove(number)
            self._values[number] = values
            timer = self._timers[number]
            self._ledger.finish(timer, "stop", 0, computed_s=now_s, now_s=now_s)
        if not self._open:
            self._news.set()

    def failed(self, number: int, error: SluiceError) -> None:
        """Fail the request with one of its texts."""
        if self._error is None:
            self._error = error
        if number in self._open:
            self._open.remove(number)
            self._ledger.fail(self._timers[number], error, time.monotonic())
        self._news.set()

    def leave(self) -> None:
        """Give up the texts that are still open, as nobody reads any more. If one failed, the
        request has failed: the others do not count as aborted."""
        self.has_left = True
        now_s, left = time.monotonic(), sorted(self._open)
        self._open.clear()
        for number in left:
            timer = self._timers[number]
            if self._error is not None:
                self._ledger.fail(timer, self._error, now_s)
            else:
                self._ledger.leave(timer, now_s)
            self._abort(timer.request_id)
        self._news.set()


class TextSink:
    """The engine client's view of one text (`client.VectorSink`)."""

    def __init__(self, encoding: Encoding, number: int) -> None:
        self._encoding, self._number = encoding, number

    def vector(self, values: bytes, now_s: float) -> None:
        """Pass the vector on."""
        self._encoding.came(self._number, values, now_s)

    def ended(self, error: SluiceError) -> None:
        """Note that the text has no vector."""
        self._encoding.failed(self._number, error)


def reader_of(service: Service, write: Write | None = None) -> TextReader:
    """Reads what the model makes vectors or classes of. `write`: as for `TextReader`."""
    facts = service.vectors
    assert facts is not None  # it writes no text
    pad_id = service.tokenizer.pad_id
    return TextReader(service.prompts, facts.sentence, facts.images, pad_id=pad_id, write=write)


async def read_texts(
    service: Service,
    reader: TextReader,
    parse: Callable[[bytes], AskedT],
    request: Request,
    refuse: Callable[[AskedT], None] = lambda asked: None,
) -> tuple[AskedT, Encoding]:
    """Let the texts of a body in and submit them; raises why not, as `refuse` does."""
    async with service.bodies.read(request, service.admission.refusal_of(request.headers)) as body:
        arrival_s = time.monotonic()
        async with service.turn(len(body)):
            asked = await service.read(body, parse)
            refuse(asked)
            return asked, await _open(service, reader, asked, request, arrival_s, len(body))


async def _open(
    service: Service,
    reader: TextReader,
    asked: TextsRequest,
    request: Request,
    arrival_s: float,
    num_bytes: int,
) -> Encoding:
    client, is_behind = request.scope["state"][CLIENT], is_background(request.headers)
    facts = service.admission.check_open(is_background=is_behind)
    service.admission.check_model(asked.model)
    window = facts.max_model_len
    read = partial(reader.read, asked, window, cut=_cut(asked.most_tokens, window))
    size = LARGE + 1 if reader.has_images(asked) else num_bytes  # a few bytes may be many pixels
    texts = await service.texts.result(size, read)
    if any(len(text.token_ids) == 0 for text in texts):
        raise RequestError("input has a text without tokens", param="input")
    prompts = tuple(len(text.token_ids) for text in texts)
    work = Work(prompts, client=client, is_background=is_behind)
    service.admission.admit(work, arrival_s)
    runtime, encoding = service.runtime, Encoding(service.runtime.ledger, service.client.abort)
    for text in texts:
        name, num = service.next_id(), len(text.token_ids)
        timer = runtime.recorder.arrive(
            name, arrival_s, time.monotonic(), num, client=client, is_background=is_behind
        )
        prompt = b"" if text.pixels else packed(text.token_ids)
        counts = text.num_skipped, text.num_second
        message = Encode(name, prompt, *counts, text.pixels, is_behind)
        service.client.submit(message, encoding.add(timer))
    return encoding


def _cut(most: int | None, window: int) -> int | None:
    """Tokens to which longer texts are cut; None: they are refused."""
    if most is not None and most > window:
        raise RequestError(
            f"truncate_prompt_tokens {most} is over the {window} tokens that the model reads",
            param="truncate_prompt_tokens",
        )
    return window if most is not None and most < 0 else most


class TextsReply(Response):
    """An answer in one piece. A client that leaves frees the places of its texts.

    `bytes_per_number`: of the body, for each number of a text; `body`: packed float32 of each text
    -> the body.
    """

    def __init__(
        self,
        encoding: Encoding,
        answers: Answers,
        bytes_per_number: int,
        body: Callable[[list[bytes]], bytes],
    ) -> None:
        super().__init__()
        self._encoding, self._answers = encoding, answers
        self._bytes_per_number, self._body = bytes_per_number, body

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Collect all vectors, then answer; nothing is sent to a client that has left."""
        encoding = self._encoding
        async with watched(encoding, receive):
            vectors = await encoding.vectors()
            if encoding.has_left:
                return
            size = sum(map(len, vectors)) // FLOAT_BYTES * self._bytes_per_number
            async with self._answers.written(size, partial(self._body, vectors)) as body:
                await ReadReply(body, media_type=JSON)(scope, receive, send)
