"""A hung engine is named at any age, and nothing else is: not a prefill, not a slow client."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from integration.moody_engine import running_engine
from integration.worker_process import Worker, listening, running_worker
from sluice.processes import free_ports

LIVENESS_S = 4.0
"""Half of it takes the readiness; a gate looks at an idle engine once a second."""
LONG = "word " * 6400
"""8,000 tokens, as the gate estimates them."""
FOUND_S = 20.0
"""Most seconds in which a hang is found here; the machine may be busy."""
DRAIN_S = 100
"""A drain's limit, far longer than a test may take."""


@contextmanager
def running_gate(directory: Path, port: int, *flags: str) -> Iterator[Worker]:
    """`sluice-gate` before the engine at `port`, killed on leaving."""
    log = directory / f"gate-{time.monotonic_ns()}.log"
    command = [
        *(sys.executable, "-m", "sluice_gate", "--upstream", f"http://127.0.0.1:{port}"),
        *("--host", "127.0.0.1", "--port", "0", "--admin-port", "0"),
        *("--liveness-timeout", str(LIVENESS_S), "--shutdown-timeout", str(DRAIN_S), *flags),
    ]
    with log.open("wb") as output:
        process = subprocess.Popen(command, stderr=output)
    try:
        yield listening(process, log)
    finally:
        process.kill()
        process.wait()


def asked(silent_s: float | None, *, prompt: str = "a", **more: object) -> dict[str, object]:
    return {"prompt": prompt, "stream": True, "num": 4, "silent_s": silent_s, **more}


class Asking:
    """A request under way. `answer`: its text, once it has ended."""

    def __init__(self, gate: Worker, body: dict[str, object]) -> None:
        self.task = asyncio.create_task(self._ask(gate.url, body))

    async def _ask(self, url: str, body: dict[str, object]) -> str:
        async with httpx.AsyncClient(timeout=300) as client:
            return (await client.post(url + "/v1/completions", json=body)).text


async def seen_until_ended(gate: Worker, asking: Asking) -> set[int]:
    """The statuses of both probes until the request has ended."""
    seen: set[int] = set()
    async with httpx.AsyncClient(timeout=30) as client:
        while not asking.task.done():
            for path in ("/healthz", "/readyz"):
                seen.add((await client.get(gate.url + path)).status_code)
            await asyncio.wait({asking.task}, timeout=0.1)
    return seen


async def until(gate: Worker, path: str, status: int) -> httpx.Response:
    return await asyncio.to_thread(gate.until, path, status, FOUND_S)


@pytest.mark.parametrize(
    ("engine", "flags"),
    [("custom", ("--single",)), ("llamacpp", ()), ("ollama", ()), ("vllm", ())],
)
async def test_a_long_prefill_is_no_hang_and_a_short_prompts_silence_is_one(
    tmp_path: Path, engine: str, flags: tuple[str, ...]
) -> None:
    [port] = free_ports(1)
    with (
        running_engine(port, *flags),
        running_gate(tmp_path, port, "--engine", engine, "--max-num-seqs", "4") as gate,
    ):
        await until(gate, "/readyz", 200)
        long = Asking(gate, asked(2.5 * LIVENESS_S, prompt=LONG))
        assert await seen_until_ended(gate, long) == {200}
        assert long.task.result().endswith("[DONE]\n\n")
        hung = Asking(gate, asked(None))
        assert "is hung" in (await until(gate, "/healthz", 503)).json()["reason"]
        hung.task.cancel()


@pytest.mark.parametrize("engine", ["custom", "llamacpp"])
async def test_a_long_answer_in_one_piece_is_no_hang(tmp_path: Path, engine: str) -> None:
    """llama.cpp's counter of tokens moves when an answer ends."""
    [port] = free_ports(1)
    with running_engine(port), running_gate(tmp_path, port, "--engine", engine) as gate:
        await until(gate, "/readyz", 200)
        whole = Asking(gate, asked(2 * LIVENESS_S, stream=False))
        assert await seen_until_ended(gate, whole) == {200}


async def test_an_engine_that_only_pings_is_hung(tmp_path: Path) -> None:
    [port] = free_ports(1)
    with running_engine(port), running_gate(tmp_path, port) as gate:
        await until(gate, "/readyz", 200)
        pinged = Asking(gate, asked(None, pings=True))
        assert "is hung" in (await until(gate, "/healthz", 503)).json()["reason"]
        pinged.task.cancel()


async def test_clients_that_do_not_read_are_not_the_engines_fault(tmp_path: Path) -> None:
    [port] = free_ports(1)
    endless = asked(0, num=10**6, bytes=60_000)
    with (
        running_engine(port),
        running_gate(tmp_path, port, "--max-num-seqs", "3", "--write-timeout", "100") as gate,
    ):
        await until(gate, "/readyz", 200)
        stalled = [_stalled_reader(gate.url, endless) for _ in range(2)]
        try:
            seen = set()
            end_s = time.monotonic() + 2 * LIVENESS_S
            async with httpx.AsyncClient(timeout=30) as client:
                while time.monotonic() < end_s:
                    for path in ("/healthz", "/readyz"):
                        seen.add((await client.get(gate.url + path)).status_code)
                    await asyncio.sleep(0.1)
            assert seen == {200}
            other = Asking(gate, asked(None))
            assert "is hung" in (await until(gate, "/healthz", 503)).json()["reason"]
            other.task.cancel()
        finally:
            for each in stalled:
                each.close()


def _until_running(gate: Worker, num: int) -> None:
    end_s = time.monotonic() + FOUND_S
    while httpx.get(gate.admin_url + "/v1/runtime_config").json()["running"] != num:
        assert time.monotonic() < end_s
        time.sleep(0.05)


def _stalled_reader(url: str, body: dict[str, object]) -> socket.socket:
    """A client that has asked, and reads nothing."""
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    sock.connect(("127.0.0.1", int(url.rpartition(":")[2])))
    request = httpx.Request("POST", url + "/v1/completions", json=body)
    head = "".join(f"{name}: {value}\r\n" for name, value in request.headers.items())
    sock.sendall(f"POST /v1/completions HTTP/1.1\r\n{head}\r\n".encode() + request.content)
    return sock


def test_a_stopped_engine_is_hung_also_for_a_gate_that_starts_beside_it(tmp_path: Path) -> None:
    [port] = free_ports(1)
    served = ("--served-file", str(tmp_path / "served"))
    with running_engine(port) as engine:
        with running_gate(tmp_path, port, *served) as gate:
            gate.until("/readyz", 200, FOUND_S)
            engine.send_signal(signal.SIGSTOP)
            gate.until("/healthz", 503, FOUND_S)
            alive = httpx.get(gate.admin_url + "/version")  # what the kubelet asks of the gate
            assert alive.status_code == 200
        with running_gate(tmp_path, port, *served) as gate:
            for path in ("/healthz", "/readyz"):
                assert "is hung" in gate.until(path, 503, FOUND_S).json()["reason"]
            engine.kill()  # as the kubelet does
            gate.until("/healthz", 200, FOUND_S)


def test_an_engine_that_takes_connections_and_was_never_heard_may_be_loading(
    tmp_path: Path,
) -> None:
    """So does gunicorn's master while its workers load a model."""
    [port] = free_ports(1)
    flags = ("--served-file", str(tmp_path / "served"))
    with socket.create_server(("127.0.0.1", port)), running_gate(tmp_path, port, *flags) as gate:
        end_s = time.monotonic() + 2 * LIVENESS_S
        while time.monotonic() < end_s:
            assert "starting" in httpx.get(gate.url + "/healthz").raise_for_status().text
            time.sleep(0.1)


@pytest.mark.parametrize("is_first", [True, False], ids=["before", "during"])
async def test_a_drain_does_not_wait_for_an_engine_that_hangs(
    tmp_path: Path, is_first: bool
) -> None:
    """It hangs before the drain, or in it."""
    [port] = free_ports(1)
    with running_engine(port) as engine, running_gate(tmp_path, port) as gate:
        await until(gate, "/readyz", 200)
        whole, streamed = (Asking(gate, asked(60.0, stream=each)) for each in (False, True))
        await asyncio.to_thread(_until_running, gate, 2)
        if is_first:
            engine.send_signal(signal.SIGSTOP)
            await until(gate, "/healthz", 503)
            gate.terminate()
        else:
            gate.terminate()
            await until(gate, "/readyz", 503)
            engine.send_signal(signal.SIGSTOP)
        began_s = time.monotonic()
        assert "is hung" in await whole.task
        assert "is hung" in await streamed.task
        assert await asyncio.to_thread(gate.process.wait, FOUND_S) == 0
        assert time.monotonic() - began_s < DRAIN_S / 4


async def test_a_workers_drain_does_not_wait_for_an_engine_that_hangs(tmp_path: Path) -> None:
    flags = ("--liveness-timeout", "2", "--shutdown-timeout", str(DRAIN_S))
    with running_worker(tmp_path, *flags) as worker:
        pid = worker.engine_pid()
        async with httpx.AsyncClient(timeout=300) as client:
            body = {"prompt": "a", "max_tokens": 2000, "ignore_eos": True}
            asking = asyncio.create_task(client.post(worker.url + "/v1/completions", json=body))
            await asyncio.to_thread(worker.until_metric, "vllm:num_requests_running", 1)
            os.kill(pid, signal.SIGSTOP)
            await until(worker, "/healthz", 503)
            worker.terminate()
            began_s = time.monotonic()
            assert "is hung" in (await asking).text
        await asyncio.to_thread(worker.process.wait, FOUND_S + 10)
        assert time.monotonic() - began_s < DRAIN_S / 4


def test_a_model_of_ollama_that_is_gone_takes_the_pod_out_and_is_named(tmp_path: Path) -> None:
    [port] = free_ports(1)
    flags = ("--engine", "ollama", "--served-model-name", "m")
    with running_engine(port), running_gate(tmp_path, port, *flags) as gate:
        gate.until("/readyz", 200, FOUND_S)
        change = f"http://127.0.0.1:{port}/made-up/model"
        httpx.post(change, json={"is_there": False})
        assert "model m" in gate.until("/readyz", 503, FOUND_S).json()["reason"]
        assert httpx.get(gate.url + "/healthz").status_code == 200, "it is no hang"
        httpx.post(change, json={"is_there": True})
        gate.until("/readyz", 200, FOUND_S)
