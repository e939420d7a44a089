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
from sluice_core.wire import Snapshot, StepReport
from sluice_gate.engine.engines import ENGINES, load_of
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
floats, ints = st.sampled_from(FLOATS), st.sampled_from(INTS)


def _hostile(
    kind: type[msgspec.Struct], **rest: st.SearchStrategy[object]
) -> st.SearchStrategy[msgspec.Struct]:
    """A struct whose numbers are hostile, and whose other fields are `rest`."""
    of_kind: dict[object, st.SearchStrategy[object]] = {
        int: ints,
        float: floats,
        bool: st.booleans(),
    }
    drawn = {
        each.name: of_kind[each.type]
        for each in msgspec.structs.fields(kind)
        if each.type in of_kind
    }
    return st.fixed_dictionaries(drawn | rest).map(lambda fields: kind(**fields))


reports = _hostile(StepReport, tokens=st.just([]), snapshot=_hostile(Snapshot))
frames = st.one_of(
    reports.map(msgspec.msgpack.encode),
    st.lists(
        st.recursive(floats | ints | st.text(max_size=3), lambda i: st.lists(i, max_size=4)),
        max_size=12,
    ).map(lambda parts: msgspec.msgpack.encode(["Ready", *parts])),
    st.binary(max_size=40),
)


def framed(body: bytes) -> bytes:
    """As `sluice_core.wire` frames a message."""
    return len(body).to_bytes(4, "little") + body


def test_no_frame_on_the_engines_socket_ends_the_gate(tmp_path: Path) -> None:
    path = tmp_path / "engine.sock"
    with front(tmp_path, "--engine", "vllm", "--engine-socket", str(path)) as made:

        @fuzzed
        @given(st.lists(frames.map(framed) | st.binary(max_size=9), min_size=1, max_size=5))
        def holds(sent: list[bytes]) -> None:
            gate = made.living()
            with suppress(OSError), socket.socket(socket.AF_UNIX) as engine:
                engine.settimeout(1.0)
                engine.connect(str(path))
                engine.sendall(b"".join(sent))
                engine.shutdown(socket.SHUT_WR)
                while engine.recv(1 << 16):  # to the end: it has read all
                    pass
            made.judge(sent)
            assert gate.probe("/healthz")[0] == 200, sent

        spend(holds)
