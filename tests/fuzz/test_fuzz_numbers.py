"""Numbers of an engine's metrics, and frames on its socket."""

import math
import socket
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path

import msgspec
from fuzz.budget import fuzzed, slow, spend
from fuzz.front import Front, front
from fuzz.words import words
from hypothesis import given
from hypothesis import strategies as st
from sluice_core.bounded import Numbers
from sluice_core.contract import MemoryReport
from sluice_core.engines import ENGINES
from sluice_core.port import EngineLoad
from sluice_core.wire import Ready, StepReport
from sluice_gate.engine.load import load_of
from strangers import watch
from strangers.engine import Answer

KNOWN = sorted(
    {
        name
        for facts in ENGINES.values()
        for name in (*facts.waiting, *facts.kv_usage, *facts.preemptions, *facts.tokens)
    }
)
VALUES = [*words("NaN +Inf -Inf inf -1 0 1 0.5 1e308 -1e308 1_0 x"), "9" * 400, ""]
name = st.sampled_from(KNOWN) | st.text(max_size=9)
labels = st.sampled_from(["", '{a="b"}', '{a="}"}', '{a="\\""}', "{", '{le="+Inf"}', "{}"])
sample = st.tuples(name, labels, st.sampled_from(VALUES) | st.floats().map(repr)).map(
    lambda parts: f"{parts[0]}{parts[1]} {parts[2]}\n"
)
every = st.sampled_from(VALUES).map(lambda value: "".join(f"{one} {value}\n" for one in KNOWN))
texts = st.lists(every | sample | st.text(max_size=30), max_size=20).map("".join)


def test_a_load_is_always_finite_and_never_negative() -> None:
    @fuzzed
    @given(st.sampled_from(sorted(ENGINES)), texts)
    def holds(engine: str, text: str) -> None:
        numbers = Numbers("metrics", Counter())
        load = load_of(ENGINES[engine], text, numbers)  # type: ignore[index]  # a literal's name
        for number in (load.waiting, load.kv_usage, load.preemptions, load.tokens):
            assert number is None or (math.isfinite(number) and number >= 0), (text, load)

    spend(holds)


def looked(made: Front, limit_s: float = 5.0) -> None:
    """Return once the gate has read the engine's metrics, and has looked for others since."""
    for _ in range(2):
        made.engine.forget()
        gate, end_s = made.gate, time.monotonic() + limit_s
        while gate is not None and gate.exit_code() is None and time.monotonic() < end_s:
            if any(seen.path == "/metrics" for seen in made.engine.record().requests):
                break
            time.sleep(0.05)


def test_no_metrics_of_an_engine_end_the_gate(tmp_path: Path) -> None:
    with front(tmp_path, "--engine", "vllm") as made:

        @slow
        @given(texts.map(lambda text: text.encode("utf-8", "replace")) | st.binary(max_size=99))
        def holds(text: bytes) -> None:
            made.living()
            told = [("content-type", "text/plain; charset=utf-8")]
            made.engine.answers(Answer(path="/metrics", headers=told, pieces=[text]))
            looked(made)
            made.judge(text)

        spend(holds)


FLOATS = (math.nan, math.inf, -math.inf, -1.0, 0.0, 0.01, 1e300, -1e300)
INTS = (0, 1, 5, -1, 1 << 62, -(1 << 62), (1 << 64) - 1)
REPORT = StepReport(
    [], 0, 0.0, 0.01, 1, 1, 0, 1, False, EngineLoad(1, 0, 0, 1, 0, 10, 0, 0, 0, 0)
)  # fmt: skip
READY = Ready(8, 8, 8, 1, 1, 0, 0, MemoryReport({}, {}, 0), None, "kernels")
OF_KIND: dict[type, tuple[object, ...]] = {float: FLOATS, int: INTS, bool: (True, False)}
OTHERS: tuple[object, ...] = (None, "\x1b[2J", [], {}, [1, 2], b"a", math.nan, 1 << 62)


@st.composite
def messages(draw: st.DrawFn) -> bytes:
    """A message with some hostile numbers, and seldom with a field of another kind or number."""
    values: list[object] = msgspec.to_builtins(draw(st.sampled_from([REPORT, REPORT, READY])))
    lists = [values, values, *(each for each in values if isinstance(each, list) and each)]
    is_odd = draw(st.integers(0, 7)) == 0
    for _ in range(draw(st.integers(1, 3))):
        inside = draw(st.sampled_from(lists))
        at = draw(st.sampled_from([i for i, each in enumerate(inside) if type(each) in OF_KIND]))
        inside[at] = draw(st.sampled_from(OTHERS if is_odd else OF_KIND[type(inside[at])]))
    if is_odd:
        values = values[: draw(st.integers(0, len(values)))] + draw(st.sampled_from([[], [1]]))
    return msgspec.msgpack.encode(values)


frames = st.one_of(messages(), messages(), messages(), st.binary(max_size=40))


def framed(body: bytes) -> bytes:
    """As `sluice_core.wire` frames a message."""
    return len(body).to_bytes(4, "little") + body


def test_no_frame_on_the_engines_socket_ends_the_gate(tmp_path: Path) -> None:
    path = tmp_path / "engine.sock"
    with front(tmp_path, "--engine", "vllm", "--engine-socket", str(path)) as made:

        @fuzzed
        @given(st.lists(frames.map(framed), min_size=1, max_size=5), st.binary(max_size=3))
        def holds(sent: list[bytes], half: bytes) -> None:
            gate = made.living()
            with suppress(OSError), socket.socket(socket.AF_UNIX) as engine:
                engine.settimeout(1.0)
                engine.connect(str(path))
                engine.sendall(b"".join(sent) + half)
                engine.shutdown(socket.SHUT_WR)
                while engine.recv(1 << 16):  # to the end: it has read all
                    pass
            made.judge(sent)
            assert watch.ask(gate.address) == 200, sent

        spend(holds)
