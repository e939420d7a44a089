"""Bodies of strangers: the engine never runs more sequences than the gate has counted."""

import asyncio
import gzip
import json
from pathlib import Path

from fuzz.budget import fuzzed, spend
from fuzz.front import CAP, front
from hypothesis import given
from hypothesis import strategies as st
from strangers.client import ask, request
from strangers.engine import whole
from strangers.sequences import ROUTES

HOLD = whole({"choices": [], "usage": {"prompt_tokens": 1}}, hold_s=0.05)
"""So that requests at once meet in the engine."""
NUM_AT_ONCE = 3
TEXTS = ("a", "", "\ud83d", "x" * 99)
prompts = st.one_of(
    st.sampled_from(TEXTS),
    st.lists(st.sampled_from(TEXTS), max_size=9),
    st.lists(st.integers(0, 9), max_size=9),
    st.lists(st.lists(st.integers(0, 9), max_size=3), max_size=9),
)
numbers = st.one_of(
    st.integers(0, 9),
    st.sampled_from(["6", " 6", "6.0", 6.0, "06", "6e0", True, None, -1, 1e308, 1 << 70, [6]]),
)
NAMES = ("n", "N", "\\u006e", "n_cmpl", "best_of", "stream", "priority", "model")
field = st.one_of(
    st.tuples(st.sampled_from(NAMES), numbers),
    st.tuples(st.sampled_from(["prompt", "PROMPT", "inputs", "text", "input_ids"]), prompts),
    st.tuples(
        st.sampled_from(["parameters", "sampling_params"]), st.fixed_dictionaries({"n": numbers})
    ),
    st.tuples(st.just("messages"), st.just([{"role": "user", "content": "a"}])),
)
paths = st.one_of(
    st.sampled_from(sorted(ROUTES)),
    st.sampled_from(
        ["/v1/completions#a", "/v1/%63ompletions", "//v1/completions", "/v1/completions?x=1",
         "/v1/completions/", "/V1/completions", "http://localhost/v1/completions"],
    ),
)  # fmt: skip
ENCODINGS = ("utf-8", "utf-8-sig", "utf-16", "utf-16-le", "utf-32")


@st.composite
def bodies(draw: st.DrawFn) -> bytes:
    """A JSON object whose fields may come twice, in an encoding that Python's parser reads."""
    fields = draw(st.lists(field, min_size=1, max_size=5))
    pairs = [f'"{name}":{json.dumps(value)}' for name, value in fields]
    if not draw(st.integers(0, 5)):
        pairs.append(
            '"x":' + draw(st.sampled_from(["NaN", "1e999", "[" * 50 + "]" * 50, '"\\ud800"']))
        )
    return ("{" + ",".join(pairs) + "}").encode(draw(st.sampled_from(ENCODINGS)))


def test_no_body_takes_more_places_than_were_counted(tmp_path: Path) -> None:
    with front(tmp_path) as made:

        @fuzzed
        @given(paths, bodies(), st.booleans())
        def holds(path: str, body: bytes, is_gzip: bool) -> None:
            gate = made.living()
            made.engine.answers(HOLD)
            made.engine.forget()
            coding = ["content-encoding: gzip"] if is_gzip else []
            sent = request("POST", path, gzip.compress(body) if is_gzip else body, coding)

            async def at_once() -> list[int]:
                asked = [ask(gate.address, sent, limit_s=5) for _ in range(NUM_AT_ONCE)]
                return [reply.status for reply in await asyncio.gather(*asked)]

            assert 500 not in asyncio.run(at_once()), (path, body)
            most = made.engine.record().most_beside
            assert most <= CAP, f"{most} sequences at once at a cap of {CAP}: {path} {body!r}"
            made.judge((path, body))

        spend(holds)
