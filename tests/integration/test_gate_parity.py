"""An engine's answers behind the gate are those of the engine alone, byte for byte and in time.

The engine is made up: it writes the raw bytes of each case, and a next piece only when its client
has the one before it. So a gate that holds anything back never gets the rest.
"""

from __future__ import annotations

import asyncio
import gzip
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field

import pytest
import pytest_asyncio
from integration.gate_process import Call, Seen, ask, chunk, made_up_engine, watched_gate

CHANGED: Mapping[str, str] = {
    "connection": "each connection has its own (RFC 9110, 7.6.1)",
    "keep-alive": "as connection",
    "transfer-encoding": "as connection; a body without a length goes on in chunks",
    "trailer": "trailers may be dropped (RFC 9110, 6.5.1), and uvicorn cannot send any",
    "x-of-this-connection": "the engine's Connection names it",
    "date": "each server writes its own; they differ by the way through the gate",
    "x-request-id": "the gate names each request that the engine does not",
    "x-sluice-pod": "the gate says which pod answered",
}
"""Headers that the gate changes, and why: the table of docs/engines.md."""

OK = b"HTTP/1.1 200 OK\r\n"
CHUNKED = b"transfer-encoding: chunked\r\n"
JSON = b"content-type: application/json\r\n"
SSE = b"content-type: text/event-stream; charset=utf-8\r\n"
END = b"0\r\n\r\n"
USAGE = b'"usage": {"prompt_tokens": 3, "completion_tokens": 2}'
PACKED = gzip.compress(b'{"choices": [], %s}' % USAGE)
EVENT = b'data: {"choices": [{"index": 0, "text": "a"}]}\n\n'
DONE = b"data: [DONE]\n\n"
ERROR = b'{"error": {"message": "no", "type": "BadRequestError", "code": 400}}'
TELLING = (
    b"Server: engine/1.2 (made up)\r\nVia: 1.1 other\r\nSet-Cookie: a=1; Path=/\r\n"
    b'Set-Cookie: b=2; HttpOnly\r\nETag: W/"1"\r\nCache-Control: no-store, private\r\n'
    b"X-Latin: caf\xe9\r\nX-Empty:\r\nX-Twice: 1\r\nx-twice: 2\r\nVary: Accept-Encoding\r\n"
    b"X-Accel-Buffering: no\r\nX-Long: " + b"y" * 20_000 + b"\r\n"
)


@dataclass(frozen=True)
class Case:
    """What an engine writes: `start` with the headers, then pieces of a body. `method`: of a
    request that has no place, which a GET has not. `is_cut`: it dies behind the last piece."""

    start: bytes
    pieces: tuple[bytes, ...] = ()
    chunked: bool = False
    method: str = "GET"
    is_cut: bool = False
    end: bytes = b""
    added: bytes = b""  # by the gate, at the end of an answer that the engine cut


def whole(body: bytes, start: bytes = OK, kind: bytes = JSON, more: bytes = b"") -> Case:
    return Case(start + kind + more + b"content-length: %d\r\n\r\n" % len(body), (body,))


def chunked(*pieces: bytes, start: bytes = OK, kind: bytes = JSON, more: bytes = b"") -> Case:
    return Case(start + kind + more + CHUNKED + b"\r\n", pieces, chunked=True, end=END)


def cut(case: Case, added: bytes = b"") -> Case:
    return Case(case.start, case.pieces, case.chunked, case.method, is_cut=True, added=added)


def status(line: bytes, body: bytes = ERROR, more: bytes = b"") -> Case:
    return whole(body, b"HTTP/1.1 " + line + b"\r\n", more=more)


GONE = b'data: {"error":{"message":"the engine closed the connection at '
CASES: dict[str, Case] = {
    "json": whole(b'{"choices": [], %s}' % USAGE),
    "json in pieces": chunked(b'{"choices": [', b"], ", USAGE, b"}"),
    "json of a known length in pieces": Case(
        OK + JSON + b"content-length: 8\r\n\r\n", (b"[1, ", b"2, 3")
    ),
    "speech in pieces": chunked(
        b"\xff\xf3a", b"\x00" * 40_000, b"z", kind=b"content-type: audio/mpeg\r\n"
    ),
    "a picture": whole(bytes(range(256)) * 99, kind=b"content-type: image/png\r\n"),
    "no type": chunked(b"abc", b"def", kind=b""),
    "multipart": chunked(
        b"--x\r\n\r\n1\r\n", b"--x--", kind=b"content-type: multipart/mixed; boundary=x\r\n"
    ),
    "until the end": Case(OK + b"content-type: application/octet-stream\r\n\r\n", (b"1\r\n", b"2")),
    "http/1.0": Case(b"HTTP/1.0 200 OK\r\n" + JSON + b"\r\n", (b"{", b"}")),
    "empty": whole(b""),
    "events": chunked(EVENT, b": ping\n\n", EVENT, DONE, kind=SSE),
    "events with other ends of lines": chunked(EVENT.replace(b"\n", b"\r\n"), DONE, kind=SSE),
    "events in parts": chunked(EVENT[:9], EVENT[9:-1], EVENT[-1:], DONE, kind=SSE),
    "events of a known length": whole(EVENT + DONE, kind=SSE),
    "events until the end": Case(OK + SSE + b"\r\n", (EVENT, DONE)),
    "lines": chunked(
        b'{"response": "a"}\n', b'{"done": true}\n', kind=b"content-type: application/x-ndjson\r\n"
    ),
    "an error among events": chunked(EVENT, b"data: " + ERROR + b"\n\n", DONE, kind=SSE),
    "packed, though it was not asked for": chunked(
        PACKED[:9], PACKED[9:], more=b"content-encoding: gzip\r\n"
    ),
    "packed events": chunked(
        gzip.compress(EVENT), gzip.compress(DONE), kind=SSE, more=b"content-encoding: gzip\r\n"
    ),
    "many headers": whole(b"{}", more=TELLING),
    "a header of this connection": whole(
        b"{}", more=b"Connection: keep-alive, X-Of-This-Connection\r\nX-Of-This-Connection: 1\r\n"
    ),
    "its own request id": whole(b"{}", more=b"X-Request-Id: 7\r\n"),
    "its own date": whole(b"{}", more=b"Date: Sat, 01 Jan 2000 00:00:00 GMT\r\n"),
    "part of a file": status(b"206 Partial Content", b"bc", b"content-range: bytes 1-2/9\r\n"),
    "created": status(b"201 Created", b"{}", b"location: /v1/files/1\r\n"),
    "nothing": Case(b"HTTP/1.1 204 No Content\r\n\r\n"),
    "not modified": Case(b'HTTP/1.1 304 Not Modified\r\netag: "1"\r\ncontent-length: 9\r\n\r\n'),
    "moved": status(b"301 Moved Permanently", b"there", b"location: /v1/elsewhere\r\n"),
    "elsewhere": status(
        b"307 Temporary Redirect", b"", b"location: http://other.example/x?y=%20\r\n"
    ),
    "bad request": status(b"400 Bad Request"),
    "who": status(b"401 Unauthorized", more=b'www-authenticate: Basic realm="x"\r\n'),
    "not found": status(b"404 Not Found"),
    "teapot": status(b"418 I'm a Teapot"),
    "too many": status(b"429 Too Many Requests", more=b"retry-after: 7\r\n"),
    "its fault": status(b"500 Internal Server Error", b"Internal Server Error"),
    "its fault in pieces": chunked(b'{"error"', b": 1}", start=b"HTTP/1.1 502 Bad Gateway\r\n"),
    "not now": status(b"503 Service Unavailable", more=b"retry-after: 1\r\n"),
    "a status without a name": status(b"299 Whatever", b"{}"),
    "early hints": Case(
        b"HTTP/1.1 103 Early Hints\r\nlink: </a>\r\n\r\n" + whole(b"{}").start, (b"{}",)
    ),
    "trailers": Case(
        OK + JSON + CHUNKED + b"trailer: x-sum\r\n\r\n",
        (b"{}",),
        True,
        end=b"0\r\nx-sum: 1\r\n\r\n",
    ),
    "head": Case(OK + JSON + b"content-length: 1234\r\n\r\n", method="HEAD"),
    "options": Case(
        b"HTTP/1.1 200 OK\r\nallow: GET, POST\r\ncontent-length: 0\r\n\r\n", method="OPTIONS"
    ),
    "cut json": cut(chunked(b'{"choices": [', b'{"text"')),
    "cut before its length": cut(Case(OK + JSON + b"content-length: 99\r\n\r\n", (b'{"a"', b": "))),
    "cut speech": cut(chunked(b"\xff\xf3a", b"\x00" * 400, kind=b"content-type: audio/mpeg\r\n")),
    "cut between events": cut(chunked(EVENT, EVENT, kind=SSE), added=GONE),
    "cut in an event": cut(chunked(EVENT, EVENT[:-9], kind=SSE)),
    "cut packed events": cut(
        chunked(gzip.compress(EVENT), kind=SSE, more=b"content-encoding: gzip\r\n")
    ),
}


@dataclass
class Engine:
    """Writes the case that is on. `get`: its client's bytes so far, which it waits for."""

    case: Case = field(default_factory=lambda: whole(b"{}"))
    got: int = 0
    more: asyncio.Condition = field(default_factory=asyncio.Condition)

    async def answer(self, call: Call) -> None:
        case, sent = self.case, 0
        await call.write(case.start)
        for piece in case.pieces:
            await self._until(sent)
            await call.write(chunk(piece) if case.chunked and piece else piece)
            sent += len(piece)
        await self._until(sent)
        await call.write(case.end)

    async def _until(self, num_bytes: int) -> None:
        async with self.more:
            await self.more.wait_for(lambda: self.got >= num_bytes)

    def seen(self, num_bytes: int) -> None:
        """Its client has so many bytes of the body."""

        async def tell() -> None:
            async with self.more:
                self.got = num_bytes
                self.more.notify_all()

        self._telling = asyncio.create_task(tell())


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def rig(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[tuple[Engine, str, str]]:
    """The engine, its URL, and the gate's."""
    engine = Engine()
    async with (
        made_up_engine(engine.answer) as url,
        watched_gate(url, tmp_path_factory.mktemp("gate")) as watched,
    ):
        yield engine, url, watched.gate.url


def compared(seen: Seen) -> tuple[int, list[tuple[str, bytes]], bool]:
    """An answer without what the gate changes; its body is compared apart."""
    headers = sorted(each for each in seen.headers if each[0] not in CHANGED)
    return seen.status, headers, seen.is_whole


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("way", ["with a place", "without"])
@pytest.mark.parametrize("name", CASES)
async def test_an_answer_behind_the_gate_is_the_engines(
    rig: tuple[Engine, str, str], name: str, way: str
) -> None:
    engine, alone_url, gate_url = rig
    case = engine.case = CASES[name]
    method = "POST" if way == "with a place" and case.method == "GET" else case.method
    answers = []
    for url in (alone_url, gate_url):
        engine.got = 0
        answers.append(await ask(url, method, "/v1/completions", on_bytes=engine.seen))
    alone, behind = answers
    if case.added:
        assert not alone.is_whole
        assert behind.body.startswith(alone.body + case.added)
        assert behind.body.endswith(b"}\n\n")
        alone.is_whole = True
    else:
        assert behind.body == alone.body
    assert compared(behind) == compared(alone)
    assert alone.is_whole is (not case.is_cut or bool(case.added))
