"""A real gate in front of a made-up engine that fails: evidence and metrics tell how."""

import asyncio
import json
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
from integration.worker_process import Worker, listening
from sluice_core.contract import Evidence, decode

Respond = Callable[[asyncio.StreamWriter], Awaitable[None]]
"""Answers one POST; the connection is closed after it."""
MODELS = json.dumps({"data": [{"id": "m", "max_model_len": 2048}]}).encode()
CHUNKED = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
)
LAST = b"0\r\n\r\n"


def plain(status: int, body: bytes, length: int | None = None) -> bytes:
    head = f"HTTP/1.1 {status} X\r\ncontent-type: application/json\r\ncontent-length: "
    return (
        head.encode() + str(len(body) if length is None else length).encode() + b"\r\n\r\n" + body
    )


def chunk(event: object) -> bytes:
    data = b"data: %s\n\n" % (event if isinstance(event, bytes) else json.dumps(event).encode())
    return b"%x\r\n%s\r\n" % (len(data), data)


def token(finish_reason: str | None = None) -> dict[str, Any]:
    return {"choices": [{"index": 0, "text": "a", "finish_reason": finish_reason}]}


def answers(*parts: bytes) -> Respond:
    """Writes `parts` a moment apart, so that tokens do not come at once."""

    async def respond(writer: asyncio.StreamWriter) -> None:
        for part in parts:
            writer.write(part)
            await writer.drain()
            await asyncio.sleep(0.002)

    return respond


TOKENS = [chunk(token())] * 5
WHOLE = answers(CHUNKED, *TOKENS, chunk(token("stop")), chunk(b"[DONE]"), LAST)


@asynccontextmanager
async def engine(respond: Respond) -> AsyncIterator[str]:
    """Its address; GET is answered as a sound engine would."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError, asyncio.IncompleteReadError):
            head = await reader.readuntil(b"\r\n\r\n")
            if head.startswith(b"GET"):
                writer.write(plain(200, MODELS))
                await writer.drain()
            else:
                length = head.lower().partition(b"content-length:")[2].split()[0]
                await reader.readexactly(int(length))
                await respond(writer)
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


@asynccontextmanager
async def gate(upstream: str, folder: Path) -> AsyncIterator[Worker]:
    """A ready `sluice-gate` with a first-token target of 500 ms."""
    log = folder / "gate.log"
    process = _started(upstream, log)
    try:
        running = await asyncio.to_thread(listening, process, log)
        await asyncio.to_thread(running.until, "/readyz", 200)
        yield running
    finally:
        process.kill()
        process.wait()


def _started(upstream: str, log: Path) -> subprocess.Popen[bytes]:
    command = [
        *(sys.executable, "-m", "sluice_gate", "--upstream", upstream, "--engine", "custom"),
        *("--max-num-seqs", "4", "--host", "127.0.0.1", "--port", "0", "--admin-port", "0"),
        *("--slo-ttft-ms", "500"),
    ]
    with log.open("wb") as output:
        return subprocess.Popen(command, stderr=output)


async def asked(running: Worker, num: int, *, stream: bool = True) -> list[int]:
    """Statuses of `num` requests, each read to its end."""
    body = {"model": "m", "prompt": "Once", "max_tokens": 16, "stream": stream}
    statuses = []
    async with httpx.AsyncClient(timeout=60, trust_env=False) as client:
        for _ in range(num):
            async with client.stream("POST", running.url + "/v1/completions", json=body) as answer:
                statuses.append(answer.status_code)
                with suppress(httpx.RemoteProtocolError):
                    await answer.aread()
    return statuses


async def evidence_of(running: Worker, num: int) -> dict[str, Any]:
    """Sums over the ticks, once `num` requests have ended in them."""
    async with httpx.AsyncClient(timeout=60, trust_env=False) as client, asyncio.timeout(60):
        while True:
            told = decode((await client.get(running.admin_url + "/v1/evidence")).content, Evidence)
            failed, finished = Counter[str](), sum(tick.finished for tick in told.ticks)
            for tick in told.ticks:
                failed.update(tick.failed)
            if failed.total() + finished >= num:
                break
            await asyncio.sleep(0.1)
    firsts = [tick.ttft for tick in told.ticks]
    over, prefill = sum(one.over for one in firsts), sum(one.by.prefill for one in firsts)
    judged = sum(one.n for one in firsts)
    return {
        "failed": dict(failed), "finished": finished, "judged": judged, "over": over,
        "prefill": prefill, "good": sum(tick.good for tick in told.ticks),
    }  # fmt: skip


async def metrics_of(running: Worker) -> str:
    async with httpx.AsyncClient(timeout=60, trust_env=False) as client:
        return (await client.get(running.admin_url + "/metrics")).text


NUM = 12
CASES: dict[str, tuple[Respond, int, str | None, bool, bool]] = {
    "500 to all": (answers(plain(500, b"{}")), 500, "500", True, False),
    "503 of its own": (answers(plain(503, b"{}")), 503, "503", True, False),
    "429 of its own": (answers(plain(429, b"{}")), 429, "429", True, False),
    "400 to all": (answers(plain(400, b"{}")), 400, None, True, False),
    "cut after 5 tokens": (answers(CHUNKED, *TOKENS), 200, "cut", True, True),
    "ended after 5 tokens": (answers(CHUNKED, *TOKENS, LAST), 200, "cut", True, True),
    "empty stream": (answers(CHUNKED, LAST), 200, "cut", True, False),
    "error in the stream": (
        answers(CHUNKED, chunk({"error": {"message": "m", "code": 500}}), chunk(b"[DONE]"), LAST),
        200, "500", True, False,
    ),
    "error after tokens": (
        answers(CHUNKED, *TOKENS, chunk({"error": {"message": "m"}}), chunk(b"[DONE]"), LAST),
        200, "cut", True, True,
    ),
    "no answer": (answers(), 503, "died", True, False),
    "half a body": (answers(plain(200, b'{"usage":', 900)), 503, "cut", False, False),
}  # fmt: skip
"""Answers, what the client gets, how it is counted, whether it asks for a stream, and whether first
tokens came."""


@pytest.mark.parametrize("name", CASES)
async def test_an_engine_that_fails_is_told_so_and_not_as_slow(name: str, tmp_path: Path) -> None:
    respond, status, kind, is_stream, has_tokens = CASES[name]
    async with engine(respond) as upstream, gate(upstream, tmp_path) as running:
        statuses = await asked(running, NUM, stream=is_stream)
        if kind is None:
            assert statuses == [status] * NUM
            assert "sluice_requests_failed_total" in (text := await metrics_of(running))
            assert 'kind="400"' not in text
            return
        told = await evidence_of(running, NUM)
        assert told == {
            "failed": {kind: NUM}, "finished": 0, "judged": NUM if has_tokens else 0, "over": 0,
            "prefill": 0, "good": 0,
        }  # fmt: skip
        assert await asyncio.to_thread(running.metric, "sluice_requests_failed_total") == NUM
        assert f'kind="{kind}"' in await metrics_of(running)
        assert statuses == [status] * NUM


async def test_an_engine_that_ends_its_answers_fails_none(tmp_path: Path) -> None:
    async with engine(WHOLE) as upstream, gate(upstream, tmp_path) as running:
        assert await asked(running, NUM) == [200] * NUM
        told = await evidence_of(running, NUM)
        assert (told["failed"], told["finished"], told["judged"]) == ({}, NUM, NUM)
        assert await asyncio.to_thread(running.metric, "sluice_requests_failed_total") == 0


async def test_an_engine_killed_in_the_middle_of_answers_has_cut_them(tmp_path: Path) -> None:
    begun, released = asyncio.Semaphore(0), asyncio.Event()

    async def hang(writer: asyncio.StreamWriter) -> None:
        writer.write(CHUNKED + b"".join(TOKENS))
        await writer.drain()
        begun.release()
        await released.wait()
        writer.transport.abort()

    async with engine(hang) as upstream, gate(upstream, tmp_path) as running:
        asks = asyncio.gather(*(asked(running, 1) for _ in range(4)))
        async with asyncio.timeout(60):
            for _ in range(4):
                await begun.acquire()
        released.set()
        assert await asks == [[200]] * 4
        told = await evidence_of(running, 4)
        assert (told["failed"], told["finished"], told["over"]) == ({"cut": 4}, 0, 0)


@pytest.mark.parametrize(
    ("name", "result"),
    [("cut after 5 tokens", "failed"), ("ended after 5 tokens", "cut"), ("500 to all", "failed")],
)
async def test_sluice_load_tells_answers_without_an_end(
    name: str, result: str, tmp_path: Path
) -> None:
    """Behind a gate a broken connection is an error event: a typed error, not a cut."""
    async with engine(CASES[name][0]) as upstream, gate(upstream, tmp_path) as running:
        line = ("-m", "sluice", "load", "--url", running.url, "--model", "m", "--words")
        phases = ("--phases", "one:closed:1:0.5")
        process = await asyncio.create_subprocess_exec(
            sys.executable, *line, *phases, stdout=subprocess.PIPE
        )
        told, _ = await process.communicate()
        lines = [json.loads(each) for each in told.splitlines()]
        (phase,) = [each for each in lines if "phase" in each]
        assert phase["results"] == {result: phase["sent"]}
        assert phase["sent"] > 0
        assert (phase["requests_per_s"], phase["p99_ttft_ms"]) == (0.0, None)
        assert process.returncode == 1
