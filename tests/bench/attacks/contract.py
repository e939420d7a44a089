"""Kind D: what a client and its engine say to each other, with the gate in between."""

import asyncio
import gzip
import json
from pathlib import Path

import httpx
from bench.attacks.table import Came, Stage, attack, came, stage, statuses
from integration.apiserver import running_apiserver
from integration.operator_runs import administrator
from strangers.client import Reply, ask, request
from strangers.engine import DONE, Answer, event, stream, whole
from strangers.stage import until
from unit.operator.objects import changed, valid_object

MB = 1_000_000
IDLE_S = 95.0
"""Go's and Traefik's clients keep idle connections for 90 s."""


async def _post(at: Stage, path: str, body: object, *headers: str) -> Reply:
    return await ask(at.gate.address, request("POST", path, body, headers), limit_s=20)


@attack("D", "speech", "/v1/audio/speech: five pieces in 1 s", "the first piece when it comes")
async def speech(directory: Path) -> Came:
    spoken = stream([b"RIFF" * 256] * 5, "audio/mpeg", gap_s=0.25)
    with stage(directory, answers=[spoken]) as at:
        reply = await _post(at, "/v1/audio/speech", {"input": "a"})
        text = f"{reply.status}; the first piece after {reply.first_s:.2f} s of {reply.took_s:.2f}"
        return came(at.gate, reply.status == 200 and reply.first_s < reply.took_s / 2, text)


def zstd(data: bytes) -> bytes:
    """A zstd frame with one raw block (RFC 8878, 3.1.1)."""
    head = b"\x28\xb5\x2f\xfd\x20" + bytes([len(data)])  # one segment, its size in one byte
    return head + (len(data) << 3 | 1).to_bytes(3, "little") + data


@attack(
    "D",
    "compressed",
    "bodies with Content-Encoding gzip and zstd",
    "at the engine as they were sent",
)
async def compressed(directory: Path) -> Came:
    body = json.dumps({"prompt": "a"}).encode()
    sent = {"gzip": gzip.compress(body), "zstd": zstd(body)}
    with stage(directory) as at:
        replies = [
            await _post(at, "/v1/completions", data, f"content-encoding: {name}")
            for name, data in sent.items()
        ]
        arrived = {seen.header("content-encoding"): seen.body for seen in at.reached()}
        ok = arrived == sent and all(reply.status == 200 for reply in replies)
        return came(at.gate, ok, f"{statuses(replies)}; {len(arrived)} at the engine")


@attack(
    "D",
    "cors",
    "the engine's Access-Control-Allow-Origin: https://a.example with credentials; a preflight",
    "the engine's own words, once",
)
async def cors(directory: Path) -> Came:
    own = [
        ("access-control-allow-origin", "https://a.example"),
        ("access-control-allow-credentials", "true"),
        ("content-length", "2"),
    ]
    with stage(directory, answers=[Answer(headers=own, pieces=[b"{}"])]) as at:
        origin = "origin: https://a.example"
        reply = await _post(at, "/v1/completions", {"prompt": "a"}, origin)
        asked = (origin, "access-control-request-method: POST")
        before = await ask(at.gate.address, request("OPTIONS", "/v1/completions", b"", asked))
        told = [each.headers.get("access-control-allow-origin") for each in (reply, before)]
        twice = reply.raw.lower().count(b"access-control-allow-origin") > 1
        ok = told == ["https://a.example"] * 2 and not twice
        return came(at.gate, ok, f"answer: {told[0]}, preflight: {told[1]}")


@attack("D", "request-id", "no X-Request-Id of the client; one of the engine", "one id all the way")
async def request_id(directory: Path) -> Came:
    with stage(directory) as at:
        given = await _post(at, "/v1/completions", {"prompt": "a"})
        seen = [each.header("x-request-id") for each in at.reached()]
        same = seen == [given.headers.get("x-request-id")]
        at.engine.answers(whole({"choices": []}, headers=[("x-request-id", "engine-7")]))
        kept = (await _post(at, "/v1/completions", {"prompt": "a"})).headers.get("x-request-id")
        text = f"the engine saw the client's: {same}; the engine's reached it: {kept == 'engine-7'}"
        return came(at.gate, same and kept == "engine-7", text)


@attack(
    "D", "many-inputs", "2,048 inputs to /v1/embeddings, 1,500 documents to /rerank", "200 and 200"
)
async def many_inputs(directory: Path) -> Came:
    with stage(directory) as at:
        replies = [
            await _post(at, "/v1/embeddings", {"input": ["a"] * 2048}),
            await _post(at, "/rerank", {"query": "a", "documents": ["a"] * 1500}),
        ]
        return came(at.gate, all(r.status == 200 for r in replies), statuses(replies))


@attack(
    "D", "large-media", "a picture of 4 MB, a sound of 10 MB", "what the engine takes: 200, 200"
)
async def large_media(directory: Path) -> Came:
    url = {"url": "data:image/png;base64," + "A" * (4 * MB * 4 // 3)}
    chat = {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": url}]}]}
    part = b'--x\r\ncontent-disposition: form-data; name="file"; filename="a.wav"\r\n\r\n'
    sound = part + b"\0" * (10 * MB) + b"\r\n--x--\r\n"
    with stage(directory) as at:
        replies = [
            await _post(at, "/v1/chat/completions", chat),
            await _post(
                at,
                "/v1/audio/transcriptions",
                sound,
                "content-type: multipart/form-data; boundary=x",
            ),
        ]
        return came(at.gate, all(r.status == 200 for r in replies), statuses(replies))


@attack(
    "D",
    "idle-connection",
    f"a kept connection that is idle for {IDLE_S:.0f} s, then a request on it",
    "answered: proxies in front keep theirs for 90 s and longer",
    is_long=True,
)
async def idle_connection(directory: Path) -> Came:
    sent = b"GET /readyz HTTP/1.1\r\nhost: localhost\r\n\r\n"
    with stage(directory) as at:
        reader, writer = await asyncio.open_connection(*at.gate.address)
        writer.write(sent)
        await reader.readuntil(b"}")  # the whole of the first answer
        loop = asyncio.get_running_loop()
        start_s = loop.time()
        try:
            await asyncio.wait_for(reader.read(1), IDLE_S)
            text, ok = f"closed after {loop.time() - start_s:.0f} s", False
        except TimeoutError:
            writer.write(sent)
            ok = (await reader.readuntil(b"}")).startswith(b"HTTP/1.1 200")
            text = "answered" if ok else "not answered"
        writer.close()
        return came(at.gate, ok, text)


STREAMS = {
    "/v1/messages": event({"type": "content_block_delta", "delta": {"text": "a"}}),
    "/completion": event({"content": "a", "stop": False}),
    "/infill": event({"content": "a", "stop": False}),
}


def _first_tokens(admin_url: str) -> float:
    """First tokens of the last minute."""
    lines = httpx.get(admin_url + "/metrics", timeout=10).text.splitlines()
    mark = "sluice_last_minute_values"
    found = [line for line in lines if line.startswith(mark) and "first_token" in line]
    return sum(float(line.rpartition(" ")[2]) for line in found)


@attack(
    "D",
    "streams-counted",
    "streams of /v1/messages, /completion and /infill",
    "their first tokens are in the evidence",
)
async def streams_counted(directory: Path) -> Came:
    counted = [path for path in STREAMS if await _is_counted(directory, path)]
    with stage(directory) as at:
        text = f"counted: {', '.join(counted) or 'none of them'}"
        return came(at.gate, len(counted) == len(STREAMS), text)


async def _is_counted(directory: Path, path: str) -> bool:
    streamed = stream([STREAMS[path]] * 5 + [DONE], gap_s=0.05)
    with stage(directory, answers=[streamed]) as at:
        body = {"prompt": "a", "messages": [{"role": "user", "content": "a"}], "stream": True}
        await _post(at, path, body)
        admin_url = at.gate.worker.admin_url
        return await asyncio.to_thread(until, lambda: _first_tokens(admin_url) > 0, 5) is not None


@attack(
    "D",
    "count-tokens",
    "/v1/messages/count_tokens while the only place is taken",
    "answered at once",
)
async def count_tokens(directory: Path) -> Came:
    slow = Answer(path="/v1/completions", hangs=True)
    with stage(directory, "--max-num-seqs", "1", answers=[slow]) as at:
        held = asyncio.create_task(_post(at, "/v1/completions", {"prompt": "a"}))
        await asyncio.sleep(0.5)
        sent = request("POST", "/v1/messages/count_tokens", {"messages": []})
        reply = await ask(at.gate.address, sent, limit_s=3)
        held.cancel()
        await asyncio.gather(held, return_exceptions=True)
        return came(at.gate, reply.status == 200, f"{reply.status or 'no answer in 3 s'}")


@attack(
    "D",
    "long-arguments",
    "engine.args with one of 337 characters, and 68 of them",
    "accepted by the API server",
)
async def long_arguments(directory: Path) -> Came:
    objects = "/apis/sluice.dev/v1alpha1/namespaces/default/inferenceservices"
    long = "--compilation-config=" + json.dumps({"x": "y" * 308})
    many = [f"--flag-{number}=1" for number in range(68)]
    said = []
    with running_apiserver(directory / "api") as server, administrator(server) as client:
        for args in ([long], many):
            engine = {"name": "VLLM", "image": "registry.invalid/vllm:1", "args": args}
            body = changed(valid_object(), "spec.engine", engine)
            answer = client.post(objects, params={"dryRun": "All"}, json=body)
            said.append(answer.status_code)
    return Came(f"{said[0]} and {said[1]}", said == [201, 201])
