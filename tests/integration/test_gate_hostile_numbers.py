"""A gate outlives whatever numbers its engine says, and its cap holds: real processes."""

import json
import math
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from sluice_core.contract import Evidence, MemoryReport, decode
from sluice_core.port import EngineLoad
from sluice_core.wire import Ready, StepReport, encode_frame

from .worker_process import Worker, listening

CAP = 3
HOSTILE = (
    "4611686018427387904",
    "-5",
    "NaN",
    "Infinity",
    "-Infinity",
    "1e400",
    "1e18",
    '"x"',
    "[]",
)
"""As an engine may write them in JSON."""
HOSTILE_WORDS = ("NaN", "+Inf", "-Inf", "-5", "1e300", "1e18", "0x1", "x" * 5000)
"""As an engine may write them in its metrics."""


@dataclass
class Engine:
    """A made-up engine, whose words are settable. `peak`: most requests that it held at once."""

    answer: bytes = b"{}"
    content_type: str = "application/json"
    metrics: str = ""
    models: str = '{"data": [{"id": "m"}]}'
    about: str = "{}"
    peak: int = 0
    held: int = 0
    gate_open: threading.Event = field(default_factory=threading.Event)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        self.gate_open.set()

    def page(self, path: str) -> tuple[str, bytes]:
        """Type and body of GET `path`."""
        if path == "/metrics":
            return "text/plain; charset=hex", self.metrics.encode()
        if path == "/v1/models":
            return "application/json", self.models.encode()
        return "application/json", self.about.encode()

    def work(self) -> None:
        """Hold one request until the gate is open."""
        with self.lock:
            self.held += 1
            self.peak = max(self.peak, self.held)
        self.gate_open.wait(60)
        with self.lock:
            self.held -= 1


def _handler(engine: Engine) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._send(*engine.page(self.path))

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["content-length"]))
            engine.work()
            self._send(engine.content_type, engine.answer)

        def _send(self, kind: str, body: bytes) -> None:
            self.send_response(200)
            self.send_header("content-type", kind)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    return Handler


@contextmanager
def gated(
    directory: Path, engine: Engine, kind: str, *flags: str, capacity: bool = True
) -> Iterator[Worker]:
    """A real gate before `engine`, ready."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(engine))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    log = directory / "gate.log"
    sized = ("--max-num-seqs", str(CAP)) if capacity else ()
    command = [
        *(sys.executable, "-m", "sluice_gate", "--engine", kind, *sized),
        *("--upstream", f"http://127.0.0.1:{server.server_port}", "--max-num-queued-reqs", "64"),
        *("--host", "127.0.0.1", "--port", "0", "--admin-port", "0", *flags),
    ]
    with log.open("wb") as output:
        process = subprocess.Popen(command, stderr=output)
    try:
        gate = listening(process, log)
        gate.until("/readyz", 200, 30)
        yield gate
    finally:
        engine.gate_open.set()
        process.kill()
        process.wait()
        server.shutdown()
        server.server_close()


def evidence(gate: Worker) -> Evidence:
    return decode(httpx.get(gate.admin_url + "/v1/evidence", timeout=10).content, Evidence)


def outlives(gate: Worker) -> None:
    """Two more ticks close, into which all numbers so far went, and the gate is ready."""
    before = max((tick.seq for tick in evidence(gate).ticks), default=0)
    end_s = time.monotonic() + 30
    while max((tick.seq for tick in evidence(gate).ticks), default=0) < before + 2:
        assert gate.process.poll() is None, gate.log.read_text()
        assert time.monotonic() < end_s, "no tick closes any more"
        time.sleep(0.1)
    assert httpx.get(gate.url + "/readyz").status_code == 200


def holds_cap(gate: Worker, engine: Engine) -> None:
    """Of four times the cap, the engine holds the cap; in the end all are answered."""
    engine.peak = 0
    engine.gate_open.clear()
    engine.answer, engine.content_type = b'{"usage": {"prompt_tokens": 1}}', "application/json"
    with ThreadPoolExecutor(4 * CAP) as clients:
        sent = [clients.submit(post, gate) for _ in range(4 * CAP)]
        until(lambda: engine.held == CAP)
        time.sleep(0.3)  # in which more would come if they could
        engine.gate_open.set()
        assert [one.result().status_code for one in sent] == [200] * 4 * CAP
    assert engine.peak == CAP


def post(gate: Worker, path: str = "/v1/completions", **more: Any) -> httpx.Response:
    body = {"model": "m", "prompt": "hello", **more}
    return httpx.post(gate.url + path, json=body, timeout=30)


def until(holds: Callable[[], bool], limit_s: float = 20.0) -> None:
    end_s = time.monotonic() + limit_s
    while not holds():
        assert time.monotonic() < end_s, "it does not come true"
        time.sleep(0.02)


def unreadable(gate: Worker, source: str) -> float:
    text = httpx.get(gate.admin_url + "/metrics", timeout=10).text
    lines = [line for line in text.splitlines() if line.startswith("sluice_unreadable_total")]
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if f'source="{source}"' in line)


USAGES = [
    '{"usage": {"prompt_tokens": %s, "completion_tokens": %s}}',
    '{"usage": {"input_tokens": 3, "output_tokens": %s, "total_tokens": %s}}',
    '{"prompt_eval_count": %s, "eval_count": %s, "done": true}',
    '{"details": {"generated_tokens": %s, "input_length": %s}}',
    '{"meta_info": {"prompt_tokens": %s, "completion_tokens": %s}}',
]


def test_a_gate_outlives_any_usage_of_an_answer_in_one_piece(tmp_path: Path) -> None:
    engine = Engine()
    with gated(tmp_path, engine, "custom") as gate:
        for form in USAGES:
            for value in HOSTILE:
                engine.answer = form.replace("%s", value).encode()
                assert post(gate).content == engine.answer
        outlives(gate)
        assert unreadable(gate, "usage") >= len(HOSTILE) * len(USAGES)
        holds_cap(gate, engine)


CHUNKS = [
    'data: {"choices": [{"index": %s, "text": "a"}], "usage": {"completion_tokens": %s}}\n\n',
    'data: {"choices": [], "usage": {"prompt_tokens": %s, "completion_tokens": %s}}\n\n',
    'data: {"index": %s, "text": "a", "meta_info": {"completion_tokens": %s}}\n\n',
    'data: {"token": {}, "index": %s, "details": {"generated_tokens": %s}}\n\n',
]


def test_a_gate_outlives_any_usage_in_a_stream(tmp_path: Path) -> None:
    engine = Engine(content_type="text/event-stream")
    with gated(tmp_path, engine, "vllm") as gate:
        for form in CHUNKS:
            events = "".join(form.replace("%s", value) for value in ("1", *HOSTILE, "2"))
            engine.answer = events.encode() + b"data: [DONE]\n\n"
            assert post(gate, stream=True).content == engine.answer
        outlives(gate)
        assert unreadable(gate, "usage") >= len(HOSTILE) * len(CHUNKS)
        holds_cap(gate, engine)


def test_a_gate_outlives_any_count_of_ollama(tmp_path: Path) -> None:
    engine = Engine(content_type="application/x-ndjson")
    with gated(tmp_path, engine, "ollama") as gate:
        for value in HOSTILE:
            last = f'{{"done": true, "prompt_eval_count": {value}, "eval_count": {value}}}\n'
            engine.answer = b'{"done": false, "response": "a"}\n' + last.encode()
            assert post(gate, "/api/generate").content == engine.answer
        outlives(gate)
        assert unreadable(gate, "usage") >= len(HOSTILE)
        holds_cap(gate, engine)


NAMES = (
    *("vllm:num_requests_waiting", "vllm:kv_cache_usage_perc"),
    *("vllm:num_preemptions_total", "vllm:generation_tokens_total"),
)


def test_a_gate_outlives_any_number_in_metrics(tmp_path: Path) -> None:
    engine = Engine()
    with gated(tmp_path, engine, "vllm") as gate:
        for word in HOSTILE_WORDS:
            seen = unreadable(gate, "metrics")
            engine.metrics = "".join(f"{name} {word}\n" for name in NAMES)
            until(partial(_has_more, gate, seen + len(NAMES)))
        outlives(gate)
        holds_cap(gate, engine)


def _has_more(gate: Worker, least: float) -> bool:
    assert gate.process.poll() is None, gate.log.read_text()
    return unreadable(gate, "metrics") >= least


def test_a_gates_metrics_can_be_read_whatever_the_engines_are(tmp_path: Path) -> None:
    forged = (
        'sluice_epoch 99\n sluice_epoch 99\nvllm:a 1.0\n# EOF\n{\n\x1b[2J\nvllm:b{a="}"} 2\nhalf'
    )
    engine = Engine(metrics=forged)
    with gated(tmp_path, engine, "vllm") as gate:
        until(lambda: "vllm:a 1.0" in httpx.get(gate.admin_url + "/metrics").text)
        page = httpx.get(gate.admin_url + "/metrics").text
    theirs = [line for line in page.splitlines() if "sluice_" not in line]
    assert theirs == ["vllm:a 1.0", 'vllm:b{a="}"} 2']
    assert "99" not in [
        line.rsplit(" ", 1)[1] for line in page.splitlines() if "sluice_epoch" in line
    ]


ABOUT = (("llamacpp", "total_slots"), ("sglang", "max_running_requests"))


@pytest.mark.parametrize(("kind", "name"), ABOUT)
@pytest.mark.parametrize("value", ["4611686018427387904", "-5", '"x"'])
def test_a_gate_outlives_what_an_engine_says_of_itself(
    tmp_path: Path, kind: str, name: str, value: str
) -> None:
    models = f'{{"data": [{{"id": "m", "max_model_len": {value}}}]}}'
    engine = Engine(about=f'{{"{name}": {value}}}', models=models)
    flags = ("--initial-num-seqs", str(CAP))
    with gated(tmp_path, engine, kind, *flags, capacity=False) as gate:
        outlives(gate)
        assert unreadable(gate, "about") == 2
        holds_cap(gate, engine)


STEP = StepReport(
    tokens=[], epoch=0, started_s=1.0, step_s=0.01, num_decodes=1, num_kv_tokens=1,
    num_prefill_tokens=0, num_running=1, at_cap=False,
    snapshot=EngineLoad(1, 0, 0, 0, 0, 0, 0, 0, 0, 0),
)  # fmt: skip
NUMBERS = (math.nan, math.inf, -math.inf, -1, 1e300, 2**62)
FIELDS = ("epoch", "step_s", "num_decodes", "num_prefill_tokens", "num_running", "price_s")


def hostile_frames() -> Iterator[bytes]:
    """Reports with one impossible number each, and with such a state."""
    for name in FIELDS:
        for value in NUMBERS:
            yield encode_frame(msgspec.structs.replace(STEP, **{name: value}))
    for value in NUMBERS:
        state = msgspec.structs.replace(STEP.snapshot, running=value, used_blocks=value)
        yield encode_frame(msgspec.structs.replace(STEP, snapshot=state))
    yield struct.pack("<I", 30_000) + b"\x91" * 30_000  # a list in a list in a list


GARBAGE = (
    b"\xff\xff\xff\xff" + b"x" * 8,
    struct.pack("<I", 1 << 25) + b"\x00" * (1 << 16),
    struct.pack("<I", 5) + b"\xdd\xff\xff\xff\xff",
    struct.pack("<I", 3) + b"\xc1\xc1\xc1",
    struct.pack("<I", 0),
)


def test_a_gate_outlives_hostile_frames_and_keeps_its_connection(tmp_path: Path) -> None:
    path, engine = tmp_path / "engine.sock", Engine()
    with gated(tmp_path, engine, "vllm", "--engine-socket", str(path)) as gate:
        frames = list(hostile_frames())
        with socket.socket(socket.AF_UNIX) as inner:
            inner.connect(str(path))
            inner.sendall(b"".join(frames) + encode_frame(STEP))
            until(lambda: unreadable(gate, "socket") == len(frames))
            outlives(gate)
            inner.sendall(encode_frame(STEP))  # the connection is still there
            until(lambda: sum(tick.steps for tick in evidence(gate).ticks) == 2)
        holds_cap(gate, engine)


def test_garbage_closes_its_own_connection_only(tmp_path: Path) -> None:
    path, engine = tmp_path / "engine.sock", Engine()
    with gated(tmp_path, engine, "vllm", "--engine-socket", str(path)) as gate:
        with socket.socket(socket.AF_UNIX) as sound:
            sound.connect(str(path))
            for data in GARBAGE:
                with socket.socket(socket.AF_UNIX) as inner:
                    inner.settimeout(20)
                    inner.connect(str(path))
                    inner.sendall(data)
                    with suppress(ConnectionResetError):  # it left bytes unread
                        while inner.recv(1 << 16):  # the limits, and then the end
                            pass
            sound.sendall(encode_frame(STEP))
            until(lambda: sum(tick.steps for tick in evidence(gate).ticks) == 1)
        holds_cap(gate, engine)
        limits = httpx.get(gate.admin_url + "/v1/runtime_config").json()
        assert (limits["cap"], limits["ceiling"]) == (CAP, CAP)


def test_numbers_within_the_bounds_close_ticks_as_well(tmp_path: Path) -> None:
    path, engine = tmp_path / "engine.sock", Engine()
    with gated(tmp_path, engine, "vllm", "--engine-socket", str(path)) as gate:
        most = msgspec.structs.replace(
            STEP, step_s=1e6, num_decodes=1 << 30, num_prefill_tokens=1 << 30, num_running=1 << 30
        )
        engine.answer = json.dumps({"usage": {"prompt_tokens": 1 << 30}}).encode()
        with socket.socket(socket.AF_UNIX) as inner:
            inner.connect(str(path))
            inner.sendall(encode_frame(most) * 1000)
            until(lambda: gate.metric("sluice_unreadable_total") == 0)
            outlives(gate)
        assert max(tick.busy_s for tick in evidence(gate).ticks) > 1e8


def test_an_engine_that_tells_its_steps_is_busy_in_them_alone(tmp_path: Path) -> None:
    path, engine = tmp_path / "engine.sock", Engine()
    with (
        gated(tmp_path, engine, "vllm", "--engine-socket", str(path)) as gate,
        socket.socket(socket.AF_UNIX) as inner,
        ThreadPoolExecutor(1) as client,
    ):
        inner.connect(str(path))
        memory = MemoryReport({}, {}, 1600)
        inner.sendall(encode_frame(Ready(4, 4, 4, 2048, 16, 100, 1600, memory, None, "")))
        inner.sendall(encode_frame(STEP))
        until(lambda: sum(tick.steps for tick in evidence(gate).ticks) == 1)
        engine.answer, engine.content_type = b'{"usage": {"prompt_tokens": 1}}', "application/json"
        engine.gate_open.clear()
        sent = client.submit(post, gate)
        until(lambda: engine.held == 1)
        outlives(gate)  # seconds with a request
        engine.gate_open.set()
        assert sent.result().status_code == 200
        inner.sendall(encode_frame(STEP))
        until(lambda: sum(tick.steps for tick in evidence(gate).ticks) == 2)
        assert sum(tick.busy_s for tick in evidence(gate).ticks) == pytest.approx(2 * STEP.step_s)
