"""One request: what is tried again, and what its line says then."""

import asyncio
import json
import socket
import time
from collections.abc import Iterator
from typing import Any

import aiohttp
import msgspec
import pytest
from sluice.batch.send import EndpointGone, Sender
from sluice_frontend.batches.item import Result
from unit.cli.batch.tiny_api import Asked, Reply, TinyApi, tiny_api

CLOSED = Reply(0)


class Script:
    """Answers in order; the last one again and again."""

    def __init__(self) -> None:
        self.replies = [Reply()]

    def __call__(self, asked: Asked) -> Reply:
        return self.replies.pop(0) if len(self.replies) > 1 else self.replies[0]


@pytest.fixture
def script() -> Script:
    return Script()


@pytest.fixture
def api(script: Script) -> Iterator[TinyApi]:
    with tiny_api(script) as api:
        yield api


async def sent(url: str, slowed: list[float] | None = None, timeout_s: float = 30.0) -> Result:
    times = [] if slowed is None else slowed
    timeout = aiohttp.ClientTimeout(timeout_s)
    async with aiohttp.ClientSession(timeout=timeout) as session:
        sender = Sender(session, url, times.append, max_retries=2, backoff_s=0.01)
        return await sender.send("a", "/v1/embeddings", b'{"input": 1.50}')


def shown(result: Result) -> Any:
    return json.loads(msgspec.json.encode(result))


async def test_the_body_arrives_as_it_is_and_the_answer_is_written_as_it_is(
    api: TinyApi, script: Script
) -> None:
    script.replies = [Reply(200, b'{"a": 1.50,\n "b": "\\n"}', {"x-request-id": "r-1"})]
    result = await sent(api.url)
    assert [(asked.path, asked.data) for asked in api.asked] == [
        ("/v1/embeddings", b'{"input": 1.50}')
    ]
    assert api.asked[0].headers["Content-Type"] == "application/json"
    assert result.is_ok
    assert result.response is not None
    assert (result.response.request_id, bytes(result.response.body)) == (
        "r-1", b'{"a":1.50,"b":"\\n"}',
    )  # fmt: skip


@pytest.mark.parametrize("first", [Reply(429), Reply(500), Reply(502), Reply(503), CLOSED])
async def test_429_5xx_and_closed_connections_are_tried_again(
    api: TinyApi, script: Script, first: Reply
) -> None:
    script.replies = [first, first, Reply()]
    slowed: list[float] = []
    assert (await sent(api.url, slowed)).is_ok
    assert len(api.asked) == 3
    assert len(slowed) == (2 if first.status == 429 else 0)


@pytest.mark.parametrize("status", [400, 401, 404, 408, 413, 422])
async def test_nothing_else_is_tried_again_and_the_error_stands_in_the_body(
    api: TinyApi, script: Script, status: int
) -> None:
    script.replies = [Reply(status, b'{"error": {"message": "over the window"}}')]
    result = await sent(api.url)
    assert len(api.asked) == 1
    assert not result.is_ok
    assert shown(result)["error"] is None
    assert shown(result)["response"]["status_code"] == status
    assert shown(result)["response"]["body"] == {"error": {"message": "over the window"}}


async def test_after_its_retries_an_error_is_the_result(api: TinyApi, script: Script) -> None:
    script.replies = [Reply(503, b"<html>busy</html>", content_type="text/html")]
    result = shown(await sent(api.url))
    assert len(api.asked) == 3
    assert result["response"]["status_code"] == 503
    assert result["response"]["body"] == "<html>busy</html>"
    assert result["error"] is None


async def test_without_an_answer_there_is_a_code_and_no_response(
    api: TinyApi, script: Script
) -> None:
    script.replies = [CLOSED]
    result = shown(await sent(api.url))
    assert len(api.asked) == 3
    assert result["response"] is None
    assert result["error"]["code"] == "connection_error"
    assert "disconnected" in result["error"]["message"].lower()


WELL = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"


@pytest.mark.parametrize(
    "answer",
    [
        b"what?\r\n\r\n",
        b"HTTP/1.1 2000 OK\r\n\r\n",
        WELL + b"Content-Length: 99\r\n\r\n{}",
        WELL + b"Content-Length: x\r\n\r\n{}",
        WELL + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n{}\r\n0\r\n\r\n",
        WELL + b"Content-Encoding: gzip\r\nContent-Length: 2\r\n\r\n{}",
        WELL + b"X: " + b"x" * 99_999 + b"\r\n\r\n",
    ],
)
async def test_an_answer_that_is_no_http_is_an_error_line(answer: bytes) -> None:
    num_asked = 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal num_asked
        head = await reader.readuntil(b"\r\n\r\n")
        num_asked += head.startswith(b"POST")
        is_probe = head.startswith(b"GET")
        writer.write(WELL + b"Content-Length: 2\r\n\r\n{}" if is_probe else answer)
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        result = shown(await sent(f"http://127.0.0.1:{port}"))
    assert num_asked == 3
    assert (result["response"], result["error"]["code"]) == (None, "connection_error")
    assert len(result["error"]["message"]) <= 300


async def test_a_late_answer_is_not_asked_for_again(api: TinyApi) -> None:
    api.hold()
    result = shown(await sent(api.url, timeout_s=0.5))
    assert len(api.asked) == 1
    assert (result["response"], result["error"]["code"]) == (None, "timeout")


@pytest.mark.parametrize("data", [b"<html>", b'{"a": NaN}', b'"\xff"', b""])
async def test_a_good_answer_that_is_no_json_is_an_error(
    api: TinyApi, script: Script, data: bytes
) -> None:
    script.replies = [Reply(200, data)]
    result = await sent(api.url)
    assert not result.is_ok
    assert shown(result)["error"]["code"] == "invalid_answer"


async def test_a_retry_comes_no_sooner_than_the_server_asks(api: TinyApi, script: Script) -> None:
    script.replies = [Reply(429, headers={"Retry-After": "1"}), Reply()]
    start_s = time.monotonic()
    assert (await sent(api.url)).is_ok
    assert time.monotonic() - start_s >= 1.0


async def test_an_endpoint_that_is_gone_makes_no_error_line() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    with pytest.raises(EndpointGone, match="does not answer any more"):
        await sent(f"http://127.0.0.1:{port}")
