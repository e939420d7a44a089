"""Many of the largest bodies at once, of every shape: the API process stays within the memory that
the plan reserves for it, and its event loop runs on."""

import asyncio
import json
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path

import aiohttp
import pytest
from sluice_core.model.sizing import API_BYTES
from sluice_frontend.config import ServerConfig

from .lag_worker import LAG_FILE
from .worker_process import Worker, running_worker

NUM_AT_ONCE = 16
MOST_BYTES = ServerConfig().max_body_bytes
MOST_LAG_MS = 100.0
TEXT = b"def add(a, b): return a + b "


def filled(head: bytes, unit: bytes, tail: bytes, most: int = 1 << 30) -> bytes:
    """As many units as a body may hold, at most `most`."""
    num = (MOST_BYTES - len(head) - len(tail)) // len(unit)
    return head + unit * min(num, most) + tail


BESIDE = b'{"prompt":"a","x":['
SHAPES = {
    "brackets": ("/tokenize", filled(BESIDE, b"[],", b"0]}")),
    "lists": ("/tokenize", filled(BESIDE, b"[12345,12345],", b"0]}", 262_000)),
    "objects": ("/v1/completions", filled(BESIDE, b'{"abcdef":123},', b"0]}", 262_000)),
    "keys": (
        "/v1/completions",
        b'{"prompt":"a","x":{' + b",".join(b'"k%d":1' % i for i in range(350_000)) + b"}}",
    ),
    "characters": ("/tokenize", filled(BESIDE, '"Ā",'.encode(), b"0]}")),
    "digits": ("/v1/completions", filled(BESIDE, b"1" * 4000 + b",", b"0]}")),
    "depth": ("/v1/completions", filled(BESIDE, b"[" * 800 + b"]" * 800 + b",", b"0]}", 327)),
    "text": ("/v1/completions", filled(b'{"prompt":"', TEXT, b'"}')),
    "text to tokenize": ("/tokenize", filled(b'{"prompt":"', TEXT, b'"}', 600_000 // len(TEXT))),
    "letters": ("/tokenize", filled(b'{"prompt":"', b"Q", b'"}')),
    "signs": ("/tokenize", filled(b'{"prompt":"', "👩".encode(), b'"}')),
    "texts": ("/v1/completions", filled(b'{"prompt":[', b'"' + b"Q" * 4000 + b'",', b'"a"]}')),
    "ids": ("/v1/completions", filled(b'{"prompt":[', b"300,", b"0]}")),
    "lists of ids": (
        "/v1/completions",
        filled(b'{"max_tokens":1,"prompt":[', b"[" + b"300," * 4000 + b"0],", b"[0]]}"),
    ),
    "ids to detokenize": ("/detokenize", filled(b'{"tokens":[', b"300,", b"0]}")),
    "parts": (
        "/v1/chat/completions",
        filled(
            b'{"messages":[{"role":"user","content":[', b'{"type":"text","text":"a"},', b'"a"]}]}'
        ),
    ),
    "messages": (
        "/v1/chat/completions",
        filled(
            b'{"messages":[', b'{"role":"user","content":"%s"},' % (TEXT * 36), b'{"role":"user"}]}'
        ),
    ),
    "chat": (
        "/tokenize",
        filled(b'{"messages":[{"role":"user","content":"', TEXT, b'"}]}', 600_000 // len(TEXT)),
    ),
    "control tokens": (
        "/v1/chat/completions",
        filled(b'{"messages":[{"role":"user","content":"', b"<|end|>", b'"}]}'),
    ),
}
TEMPLATE = (
    "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for p in m.content %}{{ p.text }}{% endfor %}{% endif %}<|end|>{% endfor %}"
)


@pytest.fixture(scope="module")
def lags(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("lags") / "lags"


@pytest.fixture(scope="module")
def worker(tmp_path_factory: pytest.TempPathFactory, lags: Path) -> Iterator[Worker]:
    directory = tmp_path_factory.mktemp("worker")
    template = directory / "template.jinja"
    template.write_text(TEMPLATE)
    environ = {LAG_FILE: str(lags), "PYTHONPATH": str(Path(__file__).parents[1])}
    with running_worker(
        directory,
        *("--chat-template", str(template)),
        module="integration.lag_worker",
        environ=environ,
    ) as worker:
        yield worker


def api_bytes(worker: Worker) -> int:
    """Resident memory of the API process and of all beside it but the engine."""
    tasks = Path(f"/proc/{worker.process.pid}/task").iterdir()
    children = {int(pid) for task in tasks for pid in (task / "children").read_text().split()}
    pids = {worker.process.pid, *children} - {worker.engine_pid()}
    page = os.sysconf("SC_PAGE_SIZE")
    return sum(int(Path(f"/proc/{pid}/statm").read_text().split()[1]) for pid in pids) * page


@contextmanager
def watched(worker: Worker) -> Iterator[list[int]]:
    """What `api_bytes` was at its peak."""
    peak, done = [0], threading.Event()

    def watch() -> None:
        while not done.wait(0.005):
            peak[0] = max(peak[0], api_bytes(worker))

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield peak
    finally:
        done.set()
        thread.join()


async def health_times(url: str, done: asyncio.Event) -> list[float]:
    """Seconds that /healthz took, each after the other, until `done`."""
    times = []
    async with aiohttp.ClientSession() as client:
        while not done.is_set():
            begun_s = time.monotonic()
            async with client.get(url + "/healthz") as answer:
                assert answer.status == 200
            times.append(time.monotonic() - begun_s)
            await asyncio.sleep(0.01)
    return times


async def sent(worker: Worker, path: str, body: bytes) -> tuple[set[int], list[float]]:
    """The statuses of NUM_AT_ONCE such bodies at once, and the times of /healthz meanwhile."""
    done, connector = asyncio.Event(), aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(worker.url, connector=connector) as client:
        watching = asyncio.create_task(health_times(worker.url, done))

        async def post() -> int:
            async with client.post(path, data=BytesIO(body)) as answer:
                await answer.read()
                return answer.status

        statuses = await asyncio.gather(*(post() for _ in range(NUM_AT_ONCE)))
        done.set()
        return {*statuses}, await watching


def read_lags(path: Path) -> list[float]:
    """All so far, in milliseconds. One in which the process had less CPU time than that was of
    others on this machine, so that counts."""
    lines = (map(float, line.split()) for line in path.read_text().splitlines())
    return [min(lag, all_cpu) for lag, _, all_cpu in lines]


@pytest.mark.parametrize("shape", SHAPES)
async def test_large_bodies_leave_the_plan_its_memory_and_the_loop_its_time(
    worker: Worker, lags: Path, shape: str
) -> None:
    path, body = SHAPES[shape]
    assert 0.1 * MOST_BYTES < len(body) <= MOST_BYTES
    num_before = len(read_lags(lags))
    with watched(worker) as peak:
        statuses, times_s = await sent(worker, path, body)
    lag_ms = max(read_lags(lags)[num_before:])
    told = {"MiB": peak[0] >> 20, "lag ms": lag_ms, "statuses": statuses, "health": max(times_s)}
    print(shape, json.dumps(told, default=list))
    assert statuses <= {200, 400, 413, 429}, told
    assert peak[0] < API_BYTES, told
    assert lag_ms < MOST_LAG_MS, told
    assert sorted(times_s)[len(times_s) // 2] < MOST_LAG_MS / 1e3, told


async def test_small_requests_pass_beside_large_ones(worker: Worker) -> None:
    path, body = SHAPES["keys"]
    large = asyncio.create_task(sent(worker, path, body))
    async with aiohttp.ClientSession(worker.url) as client:
        times = []
        for _ in range(10):
            begun_s = time.monotonic()
            async with client.post("/tokenize", json={"prompt": TEXT.decode() * 1000}) as answer:
                assert answer.status == 200
            times.append(time.monotonic() - begun_s)
        assert not large.done()
        assert max(times) < 2
    await large
