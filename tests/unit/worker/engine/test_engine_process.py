"""The engine as a real process over a real socket pair."""

import json
import socket
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
from sluice_core.errors import MAX_TOLD, told
from sluice_core.port import EngineLimits
from sluice_core.wire import (
    Abort,
    CheckIntegrity,
    Failed,
    Finished,
    FromEngine,
    Heartbeat,
    Integrity,
    Ready,
    Shutdown,
    StepReport,
    encode_frame,
    to_engine_decoder,
)
from sluice_worker.base.config import EngineConfig
from sluice_worker.engine import process as engine_process_module
from sluice_worker.engine import startup
from sluice_worker.engine.process import (
    BURST_S,
    LARGE_BYTES,
    REFILL_S,
    Disconnected,
    Link,
    Loop,
    serve,
)
from unit.worker.engine.factories import (
    create_engine,
    create_request,
    create_requests,
    create_scheduler,
    save_llama,
)
from unit.worker.engine.process import engine_process


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("llama")
    save_llama(path, num_hidden_layers=24)  # so that steps take milliseconds
    return path


def config(checkpoint: Path, **changes: object) -> EngineConfig:
    values: dict[str, object] = {
        "model": str(checkpoint),
        "max_num_seqs": 4,
        "max_num_batched_tokens": 48,
        "num_gpu_blocks_override": 128,
        "block_size": 16,
        **changes,
    }
    return EngineConfig(**values)  # type: ignore[arg-type]


def is_planned(ready: Ready) -> bool:
    """Whether the weights take what was planned; packed ones of so few rows are padded."""
    planned, measured = (m["weights_bytes"] for m in (ready.memory.planned, ready.memory.measured))
    return planned <= measured <= 1.2 * planned


def test_life_of_an_engine_process(checkpoint: Path) -> None:
    with engine_process(config(checkpoint, itl_ms=1000.0, epoch=3)) as engine:
        ready = engine.wait_for(Ready)
        assert (ready.ceiling, ready.num_blocks, ready.kv_tokens) == (4, 128, 2048)
        assert ready.max_model_len == 512
        assert 1 <= ready.predicted_cap <= 4
        assert ready.step_model is not None
        assert is_planned(ready)
        assert ready.memory.corrected["weights_bytes"] == ready.memory.measured["weights_bytes"]
        # Idle, it beats.
        first = engine.wait_for(Heartbeat)
        assert engine.wait_for(Heartbeat).steps == first.steps == 0
        # It generates, and each report carries the epoch in force.
        requests = create_requests((1, 17, 65), max_tokens=8)
        for request in requests:
            engine.send(request)
        tokens, reports = engine.outputs({request.request_id for request in requests})
        assert [len(tokens[request.request_id]) for request in requests] == [8, 8, 8]
        assert {report.epoch for report in reports} == {3}
        firsts = [token.first for report in reports for token in report.tokens if token.first]
        assert len(firsts) == 3
        # A change is in force from the next step on, and lowering the cap ends nobody.
        long = [create_request(f"long{i}", 20, max_tokens=400) for i in range(3)]
        for request in long:
            engine.send(request)
        engine.wait_for(StepReport, lambda report: report.num_running == 3)
        engine.send(EngineLimits(epoch=4, cap=1, max_num_batched_tokens=32, itl_ms=None))
        changed = engine.wait_for(StepReport, lambda report: report.epoch == 4)
        assert changed.num_running == 3
        assert changed.at_cap
        # Aborts free the blocks at once; unknown ids are ignored.
        engine.send(Abort("nobody"))
        for request in long:
            engine.send(Abort(request.request_id))
        ended = [engine.wait_for(Finished) for _ in long]
        assert {message.error for message in ended} == {None}
        assert ended[-1].snapshot.used_blocks == 0
        engine.send(CheckIntegrity())
        assert engine.wait_for(Integrity).problem is None
        # What can never fit is refused, and the queue moves on.
        engine.send(create_request("huge", 500, max_tokens=100))
        refused = engine.wait_for(Finished)
        assert "maximum context length is 512 tokens" in str(refused.error)
        # Shutdown lets running work finish.
        engine.send(create_request("last", 5, max_tokens=30))
        engine.send(Shutdown())
        tokens, _ = engine.outputs({"last"})
        assert len(tokens["last"]) == 30
        assert engine.exit_status() == 0


def test_engine_ends_itself_when_the_api_process_is_gone(checkpoint: Path) -> None:
    with engine_process(config(checkpoint)) as engine:
        engine.wait_for(Ready)
        engine.send(create_request("a", 5, max_tokens=500))
        engine.wait_for(StepReport)
        engine.hang_up()
        assert engine.exit_status() == 1


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"model": "/nowhere"}, "not a directory"),
        ({"max_model_len": 4096}, "max_position_embeddings 512"),
        ({"num_gpu_blocks_override": 3}, "max_model_len 48"),
    ],
)
def test_failed_start_says_why_and_exits_with_2(
    checkpoint: Path, changes: dict[str, object], sentence: str
) -> None:
    with engine_process(config(checkpoint, **changes)) as engine:
        assert sentence in engine.wait_for(Failed).message
        assert engine.exit_status() == 2


class Scripted(Link):
    """Reads of so many bytes, each of which takes a while on `clock`."""

    def __init__(self, sizes: Iterable[int], read_s: float, clock: SimpleNamespace) -> None:
        self._buffer = bytearray()
        self._sizes, self._read_s, self._clock = iter(sizes), read_s, clock
        self.timeouts_s: list[float] = []

    def _read(self, timeout_s: float) -> int:
        self.timeouts_s.append(timeout_s)
        self._clock.now_s += self._read_s
        return next(self._sizes)


@pytest.mark.parametrize(
    ("sizes", "read_s", "num_reads"),
    [
        ([0, LARGE_BYTES], 0.0, 1),
        ([LARGE_BYTES - 1, 9], 0.0, 1),
        ([LARGE_BYTES, 1, 5, 0, 9], 0.0, 4),
        ([LARGE_BYTES] * 99, 0.3 * BURST_S, 5),
    ],
    ids=["nothing", "no burst", "until it ends", "for a while"],
)
def test_what_comes_behind_a_burst_is_heard_without_a_step_for_each_part_of_it(
    monkeypatch: pytest.MonkeyPatch, sizes: list[int], read_s: float, num_reads: int
) -> None:
    clock = SimpleNamespace(now_s=1000.0)
    monkeypatch.setattr(
        engine_process_module, "time", SimpleNamespace(monotonic=lambda: clock.now_s)
    )
    link = Scripted(sizes, read_s, clock)
    assert link.receive(1.0) == []
    assert link.timeouts_s == [1.0] + [REFILL_S] * (num_reads - 1)


def test_a_burst_larger_than_the_socket_is_heard_in_its_order() -> None:
    messages = [*(create_request(str(i), 2048) for i in range(200)), Abort("7")]
    burst = b"".join(encode_frame(message) for message in messages)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    with ours, theirs, ThreadPoolExecutor(1) as pool:
        sent, link, frames = pool.submit(ours.sendall, burst), Link(theirs), list[bytes]()
        while len(frames) < len(messages):
            frames += link.receive(1.0)
        sent.result()
    assert [to_engine_decoder.decode(frame) for frame in frames] == messages


class Hearer(Link):
    """What is heard of the engine, and what its standard error had said by then."""

    def __init__(self, config: EngineConfig, capsys: pytest.CaptureFixture[str]) -> None:
        self.heard: list[tuple[FromEngine, str]] = []
        self._config, self._capsys = config, capsys

    def receive_config(self) -> tuple[EngineConfig, list[bytes]]:
        return self._config, []

    def send(self, message: FromEngine) -> None:
        self.heard.append((message, self._capsys.readouterr().err))


def test_a_failure_is_told_in_one_line_after_its_traceback(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("CUDA error: unspecified launch failure\nCompile with advice.\n")

    monkeypatch.setattr(startup, "start", fail)
    monkeypatch.setattr(engine_process_module, "set_threads", lambda _: None)
    link = Hearer(config(checkpoint), capsys)
    assert serve(link) == 1
    message, said = link.heard[-1]
    assert message == Failed("RuntimeError: CUDA error: unspecified launch failure")
    assert said.endswith("Compile with advice.\n\n")
    assert len(told(MemoryError("x" * 1000))) == MAX_TOLD
    assert told(MemoryError()) == "MemoryError: "


class Leaver(Link):
    """What is heard of the engine until its first look at what has come."""

    def __init__(self) -> None:
        self.heard: list[FromEngine] = []

    def send(self, message: FromEngine) -> None:
        self.heard.append(message)

    def receive(self, timeout_s: float) -> list[bytes]:
        raise Disconnected


def test_tokens_of_a_step_are_told_before_the_failure_that_followed_them(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a draft, some tokens may be right before the output is not finite: none is lost."""
    engine = create_engine(checkpoint, create_scheduler())
    engine.submit(create_request("a", 20), 0.0)
    report, _ = engine.step()
    failure = Finished("a", "not finite", engine.snapshot())
    monkeypatch.setattr(engine, "step", lambda: (report, [failure]))
    link = Leaver()
    with pytest.raises(Disconnected):
        Loop(link, engine).run([])
    assert link.heard[-2:] == [report, failure]


def test_float16_of_a_checkpoint_runs_as_bfloat16_on_a_cpu(
    tmp_path: Path, checkpoint: Path
) -> None:
    """For the kernels have no float16, and torch's products of it are slow."""
    fields = json.loads((checkpoint / "config.json").read_text()) | {"torch_dtype": "float16"}
    fields.pop("dtype", None)
    (tmp_path / "config.json").write_text(json.dumps(fields))
    said = {}
    for dtype in ("auto", "bfloat16", "float16"):
        with engine_process(config(tmp_path, load_format="dummy", dtype=dtype)) as engine:
            said[dtype] = engine.wait_for(Ready).kernels
    assert said["auto"] == said["bfloat16"]
    assert "float16" in said["float16"]


def test_dummy_weights_need_a_config_only_and_a_panic_is_told_before_the_end(
    tmp_path: Path, checkpoint: Path
) -> None:
    (tmp_path / "config.json").write_bytes((checkpoint / "config.json").read_bytes())
    with engine_process(config(tmp_path, load_format="dummy", dtype="bfloat16")) as engine:
        ready = engine.wait_for(Ready)
        assert is_planned(ready)
        engine.send(create_request("a", 5, max_tokens=4))
        tokens, _ = engine.outputs({"a"})
        assert len(tokens["a"]) == 4
        engine.send_raw(b"\xc1")  # what msgpack never uses: nothing that the loop could go on from
        assert "MessagePack" in engine.wait_for(Failed).message
        assert engine.exit_status() == 1
