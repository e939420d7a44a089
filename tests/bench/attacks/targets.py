"""Kind A: the request line, the sequences and the keys."""

import asyncio
import json
from pathlib import Path

from bench.attacks.table import Came, Stage, attack, came, stage, statuses
from strangers.client import Reply, ask, request
from strangers.engine import Answer, Seen, whole

CAP = 8
CAP_FLAGS = ("--max-num-seqs", str(CAP))
KEY = "client-key"
HOLD = whole({"choices": [], "usage": {"prompt_tokens": 1}}, hold_s=0.3)
"""An answer that takes its time, so that requests at once meet in the engine."""
SIX = {"prompt": "a", "n": 6}
BOM, WIDE = b"\xef\xbb\xbf", "utf-16"


async def raw(at: Stage, method: str, target: str, *headers: str, body: object = b"") -> Reply:
    """The answer to a request with this very target."""
    return await ask(at.gate.address, request(method, target, body, headers), limit_s=10)


@attack("A", "other-host", "GET @127.0.0.1:PORT/x", "400; no other host is asked")
async def other_host(directory: Path) -> Came:
    hits: list[bytes] = []

    async def listen(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        hits.append(await reader.readline())
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 6\r\nconnection: close\r\n\r\nsecret")
        writer.close()

    other = await asyncio.start_server(listen, "127.0.0.1", 0)
    host = f"127.0.0.1:{other.sockets[0].getsockname()[1]}"
    targets = [f"@{host}/x", f"x@{host}/x", f":@{host}/x", f"http://{host}/x", f"//{host}/x"]
    async with other:
        with stage(directory) as at:
            replies = [await raw(at, "GET", target) for target in targets]
            # An absolute form may name any Host; a path of two slashes is a path.
            ok = not hits and all(reply.status == 400 for reply in replies[:3])
            text = f"{statuses(replies)}; {len(hits)} requests at the other host"
            return came(at.gate, ok, text, requests_at_other_host=len(hits))


@attack(
    "A",
    "admin-port",
    "PATCH @127.0.0.1:ADMIN/v1/runtime_config, cap 1",
    "400; the cap stays",
)
async def admin_port(directory: Path) -> Came:
    with stage(directory, *CAP_FLAGS) as at:
        target = "@{}:{}/v1/runtime_config".format(*at.gate.admin)
        reply = await raw(at, "PATCH", target, body={"cap": 1, "epoch": 1})
        cap = int(at.gate.worker.metric("sluice_cap"))
        ok = reply.status == 400 and cap == CAP
        return came(at.gate, ok, f"{reply.status}; the cap is {cap}", cap=cap)


@attack(
    "A",
    "malformed-targets",
    "`:99/x`, `.x/`, `x`, `%2Fversion`, `*`, `ftp://h/x`",
    "400 each, and no traceback",
)
async def malformed_targets(directory: Path) -> Came:
    targets = (":99/x", ".x/", "x", "%2Fversion", "*", "ftp://h/x")
    with stage(directory) as at:
        replies = [await raw(at, "GET", target) for target in targets]
        reached = len(at.reached())
        ok = all(reply.status == 400 for reply in replies) and not reached
        text = f"{statuses(replies)}; {reached} at the engine"
        return came(at.gate, ok, text, requests_at_engine=reached)


async def _three(directory: Path, sent: bytes, *flags: str) -> Came:
    """Three equal requests at once, at a cap of 8: the engine may never run more."""
    with stage(directory, *CAP_FLAGS, *flags, answers=[HOLD]) as at:
        replies = await asyncio.gather(*(ask(at.gate.address, sent) for _ in range(3)))
        most = at.engine.record().most
        ok = most <= CAP and all(reply.status in (200, 400) for reply in replies)
        text = f"{statuses(replies)}; {most} sequences at the engine at once, cap {CAP}"
        return came(at.gate, ok, text, sequences_at_once=most)


@attack("A", "fragment", "POST /v1/completions#a, n: 6, three at once", "400, or counted as 6")
async def fragment(directory: Path) -> Came:
    return await _three(directory, request("POST", "/v1/completions#a", SIX))


@attack("A", "invocations", "POST /invocations, n: 6, three at once", "counted as 6")
async def invocations(directory: Path) -> Came:
    return await _three(directory, request("POST", "/invocations", SIX), "--engine", "vllm")


@attack(
    "A", "prompt-lists", "POST /completion of llama.cpp, 6 prompts, three at once", "counted as 6"
)
async def prompt_lists(directory: Path) -> Came:
    sent = request("POST", "/completion", {"prompt": list("abcdef")})
    return await _three(directory, sent, "--engine", "llamacpp")


SPELLINGS = (
    ("/v1/completions", b'{"prompt":"a","n":1,"n":6}'),
    ("/v1/completions", b'{"n":6,"prompt":"a","n":"6"}'),
    ("/v1/completions", BOM + b'{"prompt":"a","n":6}'),
    ("/v1/completions", json.dumps(SIX).encode(WIDE)),
    ("/v1/completions", b'{"prompt":"a","\\u006e":6}'),
    ("/v1/completions", b'{"prompt":"a","n":6,"x":NaN}'),
    ("/v1/completions", b'{"prompt":"a","n":6e0}'),
    ("/v1/%63ompletions", b'{"prompt":"a","n":6}'),
    ("/v1/completions?x=1", b'{"prompt":"a","n":6}'),
    ("http://localhost/v1/completions", b'{"prompt":"a","n":6}'),
)


@attack(
    "A",
    "spellings",
    "n: 6 twice, with a BOM, in UTF-16, escaped, beside NaN, as 6e0, `%63`, absolute form",
    "400, or counted as 6",
)
async def spellings(directory: Path) -> Came:
    worst, replies = 0, list[Reply]()
    with stage(directory, *CAP_FLAGS, answers=[HOLD]) as at:
        for target, body in SPELLINGS:
            at.engine.forget()
            sent = request("POST", target, body)
            replies += await asyncio.gather(*(ask(at.gate.address, sent) for _ in range(3)))
            worst = max(worst, at.engine.record().most)
        ok = worst <= CAP and all(reply.status in (200, 400) for reply in replies)
        text = f"{statuses(replies)}; {worst} sequences at the engine at once, cap {CAP}"
        return came(at.gate, ok, text, sequences_at_once=worst)


@attack(
    "A",
    "no-key",
    "keys set: POST /%76ersion, GET http://h/version, POST /version, without a key",
    "nothing reaches the engine",
)
async def no_key(directory: Path) -> Came:
    asked = (("POST", "/%76ersion"), ("GET", "http://h/version"), ("POST", "/version"))
    with stage(directory, keys=[KEY]) as at:
        replies = [await raw(at, method, target, body=b"{}") for method, target in asked]
        reached = len(at.reached())
        text = f"{statuses(replies)}; {reached} at the engine"
        return came(at.gate, not reached, text, requests_at_engine=reached)


@attack(
    "A",
    "queue-without-key",
    "keys set, 100 places to wait, 150 POST /version without a key, then one client with it",
    "the client with the key is answered",
)
async def queue_without_key(directory: Path) -> Came:
    flags = ("--max-num-seqs", "1", "--max-num-queued-reqs", "100")
    slow = [Answer(path="/version", hangs=True)]
    with stage(directory, *flags, keys=[KEY], answers=slow) as at:
        sent = request("POST", "/version", b"{}")
        crowd = [asyncio.create_task(ask(at.gate.address, sent, limit_s=20)) for _ in range(150)]
        await asyncio.sleep(2)
        auth = f"authorization: Bearer {KEY}"
        reply = await raw(at, "POST", "/v1/completions", auth, body={"prompt": "a"})
        for task in crowd:
            task.cancel()
        await asyncio.gather(*crowd, return_exceptions=True)
        return came(at.gate, reply.status == 200, f"the client with the key: {reply.status}")


def _has_key(seen: Seen) -> bool:
    return any(KEY in value for _, value in seen.headers)


@attack(
    "A",
    "key-forwarded",
    "keys set, Authorization: Bearer KEY; and the same without keys set",
    "the engine never sees a key of the gate; without keys the header passes",
)
async def key_forwarded(directory: Path) -> Came:
    auth, told = f"authorization: Bearer {KEY}", list[bool]()
    for keys in ([KEY], list[str]()):
        with stage(directory / str(len(keys)), keys=keys) as at:
            await raw(at, "POST", "/v1/completions", auth, body={"prompt": "a"})
            told.append(any(map(_has_key, at.reached())))
            if not keys:
                text = f"the engine saw it: {told[0]}; without keys: {told[1]}"
                return came(at.gate, told == [False, True], text)
    raise AssertionError("the last of the two returns")
