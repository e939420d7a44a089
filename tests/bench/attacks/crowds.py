"""Kind B: loop, memory, descriptors and places that strangers share."""

import asyncio
import json
import os
import signal
import socket
import time
from collections.abc import Sequence
from pathlib import Path

from bench.attacks.table import MAX_HELD_MS, Came, Stage, attack, came, lag, stage, statuses
from integration.apiserver import running_apiserver
from integration.operator_runs import administrator, running_operator, write_models
from integration.worker_process import running_worker
from strangers.client import Reply, ask, request, stall
from strangers.engine import DONE, TOKEN, Answer, event, stream, whole
from strangers.stage import until, watched
from strangers.watch import resident_mib

MIB = 1 << 20
ROOM_BYTES = 4 * MIB - 100
CROWD = "127.0.0.2"
"""The stranger's address; others ask from 127.0.0.1, so that addresses tell them apart."""
CONTAINER_MIB = 512
WORKER_MIB = 150
"""More than this the API process may not take over an idle one: the memory plan leaves no more."""
STREAM = {"prompt": "a", "stream": True}


def large_bodies() -> list[bytes]:
    """Bodies of nearly 4 MiB: lists, objects, texts and numbers, which cost a parser most."""
    items = (b"[],", b'{"a":{}},', b'"a",', b"1,")
    filled = [(item * (ROOM_BYTES // len(item))).rstrip(b",") for item in items]
    return [b'{"prompt":[%s],"max_tokens":1}' % each for each in filled]


def large_texts() -> list[bytes]:
    """Bodies of nearly 4 MiB that a tokenizer has to read: words, and no words."""
    return [
        b'{"prompt":"%s","max_tokens":1}' % (text * (ROOM_BYTES // len(text)))
        for text in (b"word ", b"a", b"\\u20ac", b"1 + 1 = ")
    ]


@attack(
    "B", "large-bodies", "8 bodies of 4 MiB of lists, objects, texts at once", "loop held < 100 ms"
)
async def large(directory: Path) -> Came:
    with stage(directory) as at:
        sent = [request("POST", "/v1/completions", body) for body in large_bodies() * 2]
        replies = await asyncio.gather(*(ask(at.gate.address, each) for each in sent))
        ok = at.gate.end_watch().held_worst_ms < MAX_HELD_MS
        return came(at.gate, ok, f"{lag(at.gate)}; {statuses(replies)}")


@attack(
    "B",
    "large-bodies-worker",
    "8 bodies of 4 MiB at our worker, on /tokenize and on /v1/completions",
    f"its API process takes at most {WORKER_MIB} MiB more",
)
async def large_at_worker(directory: Path) -> Came:
    with running_worker(directory) as worker, watched(worker) as server:
        idle_mib, replies = resident_mib(worker.process.pid), list[Reply]()
        for path in ("/tokenize", "/v1/completions"):
            sent = [request("POST", path, body) for body in large_bodies() + large_texts()]
            replies += await asyncio.gather(*(ask(server.address, each) for each in sent))
        more_mib = server.end_watch().most_mib - idle_mib
        text = f"{idle_mib:.0f} MiB idle, {more_mib:.0f} more; {lag(server)}; {statuses(replies)}"
        return came(server, more_mib < WORKER_MIB, text, more_mib=round(more_mib))


@attack(
    "B",
    "one-line",
    "a stream with one event of 64 MiB",
    "linear: under 1.5 s of CPU, loop held < 100 ms",
)
async def one_line(directory: Path) -> Came:
    long = stream([b'data: {"x":"', b'"}\n\n', DONE], num_fill=64 * MIB)
    with stage(directory, answers=[long]) as at:
        reply = await ask(at.gate.address, request("POST", "/v1/completions", STREAM), limit_s=90)
        sight = at.gate.end_watch()
        ok = reply.num_bytes > 64 * MIB and sight.held_worst_ms < MAX_HELD_MS and sight.cpu_s < 1.5
        return came(at.gate, ok, f"{sight.cpu_s:.1f} s of CPU; {lag(at.gate)}")


@attack("B", "token-ids", "one event of 3,000,000 token ids", "loop held < 100 ms")
async def token_ids(directory: Path) -> Came:
    ids = event({"choices": [{"index": 0, "text": "a", "token_ids": [1] * 3_000_000}]})
    with stage(directory, answers=[stream([ids, DONE])]) as at:
        reply = await ask(at.gate.address, request("POST", "/v1/completions", STREAM), limit_s=60)
        ok = reply.status == 200 and at.gate.end_watch().held_worst_ms < MAX_HELD_MS
        return came(at.gate, ok, f"{reply.status}; {lag(at.gate)}")


@attack(
    "B",
    "whole-answers",
    "16 answers of 48 MiB in one piece",
    f"passed on as they come: under half of the container's {CONTAINER_MIB} MiB",
)
async def whole_answers(directory: Path) -> Came:
    kind = [("content-type", "application/json")]
    large = Answer(headers=kind, pieces=[b'{"data":"', b'"}'], num_fill=48 * MIB)
    with stage(directory, answers=[large]) as at:
        sent = request("POST", "/v1/embeddings", {"input": "a"})
        asked = [ask(at.gate.address, sent, limit_s=60, keep=4096) for _ in range(16)]
        replies = await asyncio.gather(*asked)
        most_mib = at.gate.end_watch().most_mib
        ok = most_mib < CONTAINER_MIB / 2 and all(r.num_bytes > 48 * MIB for r in replies)
        return came(at.gate, ok, f"{most_mib:.0f} MiB; {lag(at.gate)}; {statuses(replies)}")


async def _other(at: Stage, limit_s: float) -> Reply:
    """The answer to a well-behaved client of another address."""
    sent = request("POST", "/v1/chat/completions", {"messages": []})
    return await ask(at.gate.address, sent, limit_s=limit_s)


@attack(
    "B",
    "hanging-requests",
    "2,400 POST /tokenize that hang in the engine, from one address",
    "another address is answered; hardly any request has a connection to the engine too",
)
async def hanging(directory: Path) -> Came:
    num, slow = 2400, [Answer(path="/tokenize", hangs=True)]
    with stage(directory, answers=slow) as at:
        sent = request("POST", "/tokenize", {"prompt": "a"})
        asked = (ask(at.gate.address, sent, limit_s=60, source=CROWD) for _ in range(num))
        crowd = [asyncio.create_task(each) for each in asked]
        await asyncio.wait(crowd, timeout=8)
        reply = await _other(at, 5)
        for task in crowd:
            task.cancel()
        await asyncio.gather(*crowd, return_exceptions=True)
        files = at.gate.end_watch().most_files
        text = f"the other client: {reply.status or 'no answer'}; {files} descriptors"
        return came(at.gate, reply.status == 200 and files < 1.1 * num, text)


LONG_TOKEN = event({"choices": [{"index": 0, "text": "x" * 45_000}]})
ENDLESS = stream([LONG_TOKEN], repeat=4000, path="/v1/completions")
"""More than any reader's buffers hold, in few events: the count of tokens costs little."""


@attack(
    "B",
    "unread-streams",
    "600 streams of one client that reads none, cap 64, readers cut after 2 s",
    "another client is answered within 10 s",
)
async def unread(directory: Path) -> Came:
    flags = ("--max-num-seqs", "64", "--write-timeout", "2")
    with stage(directory, *flags, answers=[ENDLESS]) as at:
        sent = request("POST", "/v1/completions", STREAM)
        stalled = [stall(at.gate.address, sent, CROWD) for _ in range(600)]
        reply = await _other(at, 20)
        _close(stalled)
        files = at.gate.end_watch().most_files
        got = f"{reply.status} after {reply.took_s:.1f} s" if reply.status else "no answer in 20 s"
        ok = reply.status == 200 and reply.took_s < 10
        return came(at.gate, ok, f"the other client: {got}; {files} descriptors")


def _close(stalled: Sequence[socket.socket | None]) -> None:
    for connection in stalled:
        if connection is not None:
            connection.close()


@attack(
    "B",
    "stalled-places",
    "as many readers that stall as there are places; --liveness-timeout 4",
    "ready and live for 8 s: the engine is well",
)
async def stalled_places(directory: Path) -> Came:
    flags = ("--max-num-seqs", "8", "--liveness-timeout", "4")
    with stage(directory, *flags, answers=[ENDLESS]) as at:
        sent = request("POST", "/v1/completions", STREAM)
        stalled = [stall(at.gate.address, sent, CROWD) for _ in range(8)]
        said = await _probed(at, 8)
        _close(stalled)
        return came(at.gate, not said, _in_words(said))


async def _probed(at: Stage, seconds: float) -> dict[str, str]:
    """The first failure of /readyz and of /healthz within so many seconds, and its reason."""
    said, start_s = dict[str, str](), time.monotonic()
    while (after_s := time.monotonic() - start_s) < seconds:
        for path in ("/readyz", "/healthz"):
            status, reason = await asyncio.to_thread(at.gate.probe, path)
            if status != 200:
                said.setdefault(
                    path, f"{status} after {after_s:.0f} s ({reason.partition(',')[0]})"
                )
        await asyncio.sleep(0.5)
    return said


def _in_words(said: dict[str, str]) -> str:
    return "; ".join(f"{path}: {what}" for path, what in said.items()) or "ready and live"


KEYS = ("first", "second")
SERVICE_S = 0.05
SHARES_S = 6.0


async def _share(directory: Path, cap: int, more: dict[str, object], *flags: str) -> Came:
    """The second key's share of the answers, beside a crowd of the first."""
    slow = whole({"choices": [], "usage": {"prompt_tokens": 1}}, hold_s=SERVICE_S)
    counts = {key: 0 for key in KEYS}
    with stage(directory, "--max-num-seqs", str(cap), *flags, keys=KEYS, answers=[slow]) as at:

        async def client(key: str, body: dict[str, object]) -> None:
            sent = request("POST", "/v1/completions", body, [f"authorization: Bearer {key}"])
            while True:
                reply = await ask(at.gate.address, sent, limit_s=SHARES_S)
                counts[key] += reply.status == 200
                if reply.status != 200:
                    await asyncio.sleep(0.05)

        clients = [client("first", {"prompt": "a", **more}) for _ in range(32)]
        tasks = [
            asyncio.create_task(each) for each in (*clients, client("second", {"prompt": "a"}))
        ]
        await asyncio.sleep(SHARES_S)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        total = max(1, sum(counts.values()))
        share = round(100 * counts["second"] / total)
        text = f"{counts['second']} of {total} answers: {share} %"
        return came(at.gate, share >= 40, text, second_share_percent=share)


HALF = "the second key gets about half of the answers"


@attack("B", "crowd", "32 clients of one key, one client of another, by arrival", HALF)
async def crowd(directory: Path) -> Came:
    return await _share(directory, 1, {})


@attack("B", "crowd-priority", "the same, the crowd with priority: -1000", HALF)
async def crowd_priority(directory: Path) -> Came:
    return await _share(directory, 1, {"priority": -1000}, "--scheduling-policy", "priority")


@attack("B", "crowd-many", "the same, the crowd with n: 100 at a cap of 100", HALF)
async def crowd_many(directory: Path) -> Came:
    return await _share(directory, 100, {"n": 100})


@attack(
    "B",
    "estimate",
    "five chats with 100 tools each (12,000 prompt tokens, few bytes), then 40 KB of text",
    "an estimate refuses nothing for good: 200",
)
async def estimate(directory: Path) -> Came:
    usage = {"prompt_tokens": 12_000, "completion_tokens": 1, "total_tokens": 12_001}
    tool = {"type": "function", "function": {"name": "f" * 40, "parameters": {"type": "object"}}}
    chat = {"messages": [{"role": "user", "content": "a"}], "tools": [tool] * 100}
    text = {"messages": [{"role": "user", "content": "word " * 8000}]}
    with stage(directory, answers=[whole({"choices": [], "usage": usage})]) as at:
        path = "/v1/chat/completions"
        for _ in range(5):
            await ask(at.gate.address, request("POST", path, chat))
        reply = await ask(at.gate.address, request("POST", path, text))
        why = "" if reply.status == 200 else f": {_message(reply)}"
        return came(at.gate, reply.status == 200, f"{reply.status}{why}")


def _message(reply: Reply) -> str:
    try:
        return str(json.loads(reply.body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return reply.text()


@attack(
    "B",
    "long-prefill",
    "32 KB of text, 50 s until the first byte, on an engine without metrics",
    "ready and live all the time, and answered",
    is_long=True,
)
async def long_prefill(directory: Path) -> Came:
    slow = stream([TOKEN, DONE], hold_s=50.0)
    with stage(directory, answers=[slow]) as at:
        sent = request("POST", "/v1/completions", STREAM | {"prompt": "word " * 6500})
        answer = asyncio.create_task(ask(at.gate.address, sent, limit_s=70))
        said = await _probed(at, 52)
        reply = await answer
        ok = not said and reply.status == 200
        return came(at.gate, ok, f"{reply.status or 'no answer'}; {_in_words(said)}")


@attack(
    "B",
    "real-hang",
    "the engine's process stops in the middle of a stream; --liveness-timeout 4",
    "not live within 15 s",
)
async def real_hang(directory: Path) -> Came:
    slow = stream([TOKEN], repeat=4000, gap_s=0.05)
    with stage(directory, "--liveness-timeout", "4", answers=[slow]) as at:
        sent = request("POST", "/v1/completions", STREAM)
        answer = asyncio.create_task(ask(at.gate.address, sent, limit_s=40))
        await asyncio.sleep(1)
        os.kill(at.engine.process.pid, signal.SIGSTOP)
        took_s = await asyncio.to_thread(until, lambda: at.gate.probe("/healthz")[0] == 503, 20)
        answer.cancel()
        text = f"not live after {took_s:.1f} s" if took_s else "live for ever"
        return came(at.gate, took_s is not None and took_s < 15, text)


@attack(
    "B",
    "operator-metrics",
    "192 unfinished requests to the operator's metrics port",
    "no thread for each, and /metrics answers",
)
async def operator_metrics(directory: Path) -> Came:
    models = write_models(directory / "models")
    with (
        running_apiserver(directory / "api") as server,
        administrator(server),
        running_operator(server, models, directory / "operator.log") as operator,
    ):
        address = ("127.0.0.1", operator.metrics_port)
        idle = _threads(operator.process.pid)
        held = [stall(address, b"GET /metrics HTTP/1.1\r\nhost: x\r\n", CROWD) for _ in range(192)]
        await asyncio.sleep(3)
        more = _threads(operator.process.pid) - idle
        reply = await ask(address, request("GET", "/metrics"), limit_s=10)
        _close(held)
        text = f"{more} threads more; /metrics: {reply.status or 'no answer'}"
        ok = more < 64 and reply.status == 200
        return Came(text, ok, {"threads_more": more})


def _threads(pid: int) -> int:
    return len(list(Path(f"/proc/{pid}/task").iterdir()))
