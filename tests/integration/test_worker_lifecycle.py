"""How a real worker starts, drains and dies: every request gets exactly one outcome."""

import asyncio
import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
from integration.worker_process import Worker, command, running_worker, stream_events
from sluice_core.contract import RuntimeConfig, decode
from unit.worker.api.tiny import write_checkpoint

LONG: dict[str, Any] = {"prompt": "def", "max_tokens": 3600, "ignore_eos": True}
FLAGS = ("--max-num-seqs", "4", "--num-gpu-blocks-override", "1024", "--shutdown-timeout", "60")
MOMENT = r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ"
RUNNING = "vllm:num_requests_running"


async def post(client: httpx.AsyncClient, **fields: Any) -> httpx.Response:
    return await client.post("/v1/completions", json={**LONG, **fields})


def outcome(answer: httpx.Response | BaseException, *, stream: bool) -> str:
    """ok, fail (a typed error) or cut; anything else is no outcome at all."""
    if isinstance(answer, httpx.RemoteProtocolError | httpx.ReadError):
        return "cut"
    assert isinstance(answer, httpx.Response), answer
    if answer.status_code != 200:
        assert answer.json()["error"]["message"]
        return "fail"
    if not stream:
        return "ok"
    last = stream_events(answer.text)[-1]
    return "ok" if last == "[DONE]" else "fail" if "error" in json.loads(last) else "cut"


def retry_headers(answers: list[httpx.Response]) -> list[tuple[int, str]]:
    """Status and Retry-After of those that are no streams."""
    return [(a.status_code, a.headers.get("retry-after", "")) for a in answers[1::2]]


async def open_requests(client: httpx.AsyncClient, worker: Worker) -> list[asyncio.Task[Any]]:
    """Four that run (two streams, two not) and two that wait."""
    tasks = [asyncio.create_task(post(client, stream=i % 2 == 0)) for i in range(6)]
    await asyncio.to_thread(worker.until_metric, RUNNING, 4)
    await asyncio.to_thread(worker.until_metric, "vllm:num_requests_waiting", 2)
    return tasks


async def test_sigterm_under_load_loses_nothing_and_exits_0(tmp_path: Path) -> None:
    with running_worker(tmp_path, *FLAGS) as worker:
        async with httpx.AsyncClient(base_url=worker.url, timeout=120) as client:
            tasks = await open_requests(client, worker)
            worker.terminate()
            await asyncio.to_thread(worker.until, "/readyz", 503)
            late = await post(client, max_tokens=4)
            assert (late.status_code, late.headers["connection"]) == (200, "close")
            answers = await asyncio.gather(*tasks)
        assert [outcome(a, stream=i % 2 == 0) for i, a in enumerate(answers)] == ["ok"] * 6
        assert await asyncio.to_thread(worker.process.wait, 20) == 0
        assert "Traceback" not in worker.log.read_text()


async def test_what_outlives_the_shutdown_timeout_is_told_so(tmp_path: Path) -> None:
    with running_worker(tmp_path, *FLAGS, "--shutdown-timeout", "0.2") as worker:
        async with httpx.AsyncClient(base_url=worker.url, timeout=120) as client:
            tasks = await open_requests(client, worker)
            worker.terminate()
            answers = await asyncio.gather(*tasks)
        assert [outcome(a, stream=i % 2 == 0) for i, a in enumerate(answers)] == ["fail"] * 6
        assert retry_headers(answers) == [(503, "1")] * 3
        assert answers[1].json()["error"]["reason"] == "draining"
        assert await asyncio.to_thread(worker.process.wait, 20) == 0


async def test_a_killed_engine_answers_everybody_and_ends_the_worker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    word = tmp_path / "termination-log"
    monkeypatch.setenv("SLUICE_TERMINATION_LOG", str(word))
    with running_worker(tmp_path, *FLAGS) as worker:
        async with httpx.AsyncClient(base_url=worker.url, timeout=120) as client:
            tasks = await open_requests(client, worker)
            os.kill(worker.engine_pid(), signal.SIGKILL)
            answers = await asyncio.gather(*tasks)
        seen = [outcome(a, stream=i % 2 == 0) for i, a in enumerate(answers)]
        assert seen == ["fail"] * 6
        assert retry_headers(answers) == [(503, "1")] * 3
        assert await asyncio.to_thread(worker.process.wait, 20) == 1
        died = [event["reason"] for event in worker.events() if event["event"] == "engine died"]
    told = word.read_text()
    assert re.fullmatch(rf"the engine process ended at {MOMENT} by signal 9 \(SIGKILL\)", told)
    assert {answer.json()["error"]["message"] for answer in answers[1::2]} == {told}
    assert died == [told]
    assert worker.log.read_text().splitlines()[-1] == f"sluice-worker: {told}"


async def test_an_engine_killed_while_it_starts_is_told_with_its_signal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    word = tmp_path / "termination-log"
    monkeypatch.setenv("SLUICE_TERMINATION_LOG", str(word))
    with running_worker(tmp_path, *FLAGS, ready=False) as worker:
        os.kill(worker.engine_pid(), signal.SIGKILL)
        assert await asyncio.to_thread(worker.process.wait, 60) == 2
    sentence = (
        rf"the engine process ended at {MOMENT} by signal 9 \(SIGKILL\) before it could serve"
    )
    assert re.fullmatch(sentence, word.read_text())
    assert "Traceback" not in worker.log.read_text()


async def test_a_hung_engine_is_told_on_the_admin_port_and_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    word = tmp_path / "termination-log"
    monkeypatch.setenv("SLUICE_TERMINATION_LOG", str(word))
    flags = (*FLAGS, "--liveness-timeout", "6", "--shutdown-timeout", "0.2")
    with running_worker(tmp_path, *flags) as worker:
        async with httpx.AsyncClient(base_url=worker.admin_url, timeout=10) as client:
            before = decode((await client.get("/v1/runtime_config")).content, RuntimeConfig)
            os.kill(worker.engine_pid(), signal.SIGSTOP)
            began_s = time.time()
            await asyncio.to_thread(worker.until, "/readyz", 503, 40)
            seen = decode((await client.get("/v1/runtime_config")).content, RuntimeConfig)
            await asyncio.to_thread(worker.until, "/healthz", 503, 40)
            later = decode((await client.get("/v1/runtime_config")).content, RuntimeConfig)
            assert (await client.get("/v1/evidence")).status_code == 200
        worker.terminate()
        assert await asyncio.to_thread(worker.process.wait, 20) == 1
    assert before.hung is None
    assert seen.hung is not None
    assert seen.hung == later.hung
    assert abs(seen.hung.since_s - began_s) < 2
    sentence = f"the engine process is hung: no sign of life since {MOMENT}"
    assert re.fullmatch(sentence, seen.hung.reason)
    assert re.fullmatch(rf"{sentence} \(\d+ s\)", word.read_text())


async def test_a_hung_engine_loses_readiness_first_and_then_liveness(tmp_path: Path) -> None:
    with running_worker(tmp_path, *FLAGS, "--liveness-timeout", "12") as worker:
        engine = worker.engine_pid()
        async with httpx.AsyncClient(base_url=worker.url, timeout=120) as client:
            tasks = await open_requests(client, worker)
            os.kill(engine, signal.SIGSTOP)
            await asyncio.to_thread(worker.until, "/readyz", 503, 40)
            assert (await client.get("/healthz")).status_code == 200
            failed = await asyncio.to_thread(worker.until, "/healthz", 503, 40)
            assert "is hung: no step" in failed.json()["reason"]
            os.kill(engine, signal.SIGCONT)
            await asyncio.to_thread(worker.until, "/readyz", 200, 40)
            answers = await asyncio.gather(*tasks)
        assert [outcome(a, stream=i % 2 == 0) for i, a in enumerate(answers)] == ["ok"] * 6


async def test_while_it_starts_a_worker_says_how_far_it_is(tmp_path: Path) -> None:
    with running_worker(tmp_path, *FLAGS, ready=False) as worker:
        engine = worker.engine_pid()
        os.kill(engine, signal.SIGSTOP)  # it starts no further until it was asked
        async with httpx.AsyncClient(base_url=worker.url, timeout=30) as client:
            starting = (await client.get("/readyz")).json()
            refused = await post(client)
            codes = [(await client.get(path)).status_code for path in ("/healthz", "/health")]
        os.kill(engine, signal.SIGCONT)
        assert codes == [200, 503]
        assert starting["status"] == "not ready"
        assert 0 <= starting["percent"] < 100
        assert (refused.status_code, refused.json()["error"]["reason"]) == (503, "not_ready")
        await asyncio.to_thread(worker.until, "/readyz", 200)
        await asyncio.to_thread(worker.until, "/health", 200, 1)


async def test_a_full_queue_is_answered_429_at_once(tmp_path: Path) -> None:
    with running_worker(tmp_path, *FLAGS, "--max-num-queued-reqs", "2") as worker:
        async with httpx.AsyncClient(base_url=worker.url, timeout=120) as client:
            tasks = await open_requests(client, worker)
            refused = await post(client)
            assert not any(task.done() for task in tasks)
            assert refused.status_code == 429
            assert int(refused.headers["retry-after"]) >= 1
            answers = await asyncio.gather(*tasks)
        assert [answer.status_code for answer in answers] == [200] * 6


async def test_shed_drops_what_cannot_meet_the_first_token_target(tmp_path: Path) -> None:
    flags = (*FLAGS, "--overload", "Shed", "--slo-ttft-ms", "2000")
    with running_worker(tmp_path, *flags) as worker:
        async with httpx.AsyncClient(base_url=worker.url, timeout=120) as client:
            tasks = [asyncio.create_task(post(client)) for _ in range(40)]
            answers = await asyncio.gather(*tasks)
        codes = [answer.status_code for answer in answers]
        # Ten rounds of four: however fast the machine, the last of them come too late.
        assert codes.count(200) >= 4
        assert codes.count(200) + codes.count(429) == 40
        dropped = [answer for answer in answers if answer.status_code == 429]
        assert "shed" in {answer.json()["error"]["reason"] for answer in dropped}
        assert all(int(answer.headers["retry-after"]) >= 1 for answer in dropped)


@pytest.mark.parametrize("stream", [False, True])
def test_what_has_begun_is_not_shed_though_some_of_it_waits(tmp_path: Path, stream: bool) -> None:
    flags = ("--max-num-seqs", "2", "--num-gpu-blocks-override", "256")
    shed = ("--overload", "Shed", "--slo-ttft-ms", "200")
    body = {"prompt": "x", "max_tokens": 600, "ignore_eos": True, "n": 5, "stream": stream}
    with running_worker(tmp_path, *flags, *shed) as worker:
        began_s = time.monotonic()
        answer = httpx.post(worker.url + "/v1/completions", json=body, timeout=120)
        assert time.monotonic() - began_s > 0.2, "the last of the five have waited too long"
    assert answer.status_code == 200
    assert "error" not in answer.text
    ends = answer.text.count('"finish_reason":"length"')
    assert ends == 5


def _run(line: list[str]) -> tuple[int, str]:
    done = subprocess.run(line, capture_output=True, text=True, timeout=120, check=False)
    return done.returncode, done.stderr


def test_every_problem_of_the_flags_is_told_at_once(tmp_path: Path) -> None:
    line = command(tmp_path / "nowhere", "--max-num-seqs", "0", "--gpu-memory-utilization", "2")
    status, told = _run([*line, "--api-key-file", str(tmp_path / "no"), "--colour", "--dtype", "x"])
    assert status == 2
    for name in ("nowhere", "max-num-seqs", "gpu-memory-utilization", "api-key-file", "--colour"):
        assert sum(name in line for line in told.splitlines()) == 1, told
    assert "Traceback" not in told


def test_a_model_that_cannot_start_is_told_in_one_sentence(tmp_path: Path) -> None:
    model = write_checkpoint(tmp_path / "model")
    status, told = _run(command(model, "--max-model-len", "1000000"))
    assert status == 2
    sentence = [line for line in told.splitlines() if line.startswith("sluice-worker: ")]
    assert len(sentence) == 1, told
    assert "Traceback" not in told


def test_a_key_of_the_environment_locks_the_api_and_is_in_no_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_API_KEY", "key-canary")
    with running_worker(tmp_path, ready=False) as worker:
        sent = [{"authorization": f"Bearer {key}"} for key in ("another", "key-canary")]
        got = [httpx.get(worker.url + "/v1/models", headers=one).status_code for one in sent]
        document = httpx.get(worker.url + "/openapi.json", headers=sent[-1]).json()
    assert got == [401, 200]
    assert document["components"]["securitySchemes"]
    assert "key-canary" not in worker.log.read_text()


def test_a_worker_serves_where_there_is_only_ipv6(tmp_path: Path) -> None:
    with running_worker(tmp_path, "--host", "::1", ready=False) as worker:
        port = urlsplit(worker.url).port
        assert httpx.get(f"http://[::1]:{port}/healthz").status_code == 200
        with contextlib.suppress(httpx.TransportError):  # another process may have that port there
            assert httpx.get(f"http://127.0.0.1:{port}/v1/models").status_code != 200


def test_a_taken_port_is_told_in_one_sentence(tmp_path: Path) -> None:
    model = write_checkpoint(tmp_path / "model")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        status, told = _run([*command(model), "--port", port])
    assert status == 2
    assert f"--port {port}" in told


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("program", ["sluice_worker --model", "sluice serve"])
def test_a_signal_while_the_flags_are_read_is_a_leave_like_any_other(
    tmp_path: Path, program: str, number: int
) -> None:
    """As process 1 of a container, one that installed no handler yet would not even end."""
    model = write_checkpoint(tmp_path / "model")
    held = tmp_path / "keys"
    os.mkfifo(held)
    line = [sys.executable, "-m", *program.split(), str(model), "--api-key-file", str(held)]
    with subprocess.Popen(line, stderr=subprocess.PIPE) as process:
        writer = os.open(held, os.O_WRONLY)  # once it is opened for reading
        process.send_signal(number)
        told = process.communicate(timeout=20)[1]
        os.close(writer)
    assert (process.returncode, told) == (0, b"")


@pytest.mark.parametrize("content", ["", "many", "-1", "0"])
def test_a_damaged_runtime_config_is_told_with_its_file(tmp_path: Path, content: str) -> None:
    model = write_checkpoint(tmp_path / "model")
    (tmp_path / "cap").write_text(content)
    status, told = _run(command(model, "--runtime-config-dir", str(tmp_path)))
    assert (status, str(tmp_path / "cap") in told) == (2, True)
