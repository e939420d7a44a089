"""Claims on the stored state: whatever somebody else has written there, a pass ends."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sluice_core.contract import FirstTokens, Lengths, StepModel, TokenGaps
from sluice_operator.children.runtime import DecidedRuntime, parse
from sluice_operator.plan.plan import plan
from sluice_operator.status.schema import STATUS
from sluice_operator.tuner import Past
from sluice_operator.tuner.constants import HISTORY, MAX_DOUBLINGS, REMEMBERED_CAPS
from unit.operator.observations import (
    NOW,
    SETTINGS,
    create_config,
    create_evidence,
    create_observed,
    create_pod,
    create_scrape,
    create_service,
    create_tick,
)

KNOWN = {"epoch": "1", "replicas": "1", "cap": "4"}
BREACHED = {"cap": 5, "time_s": 1.0, "times": 1, "mean_tokens": 100.0}
LOADED = {"cap": 5, "time_s": 1.0, "times": 1, "per_s": 1.0}
CHANGE = {"time_s": 1.0, "from_cap": 2, "to_cap": 4, "epoch": 1, "reason": "Headroom"}
SCALED = {
    "time_s": 1.0, "from_replicas": 1, "to_replicas": 2, "reason": "ScaledOut",
    "arrivals_per_s": 1.0, "drain_s": 5.0, "settled_s": 2.0,
}  # fmt: skip
WHOLE = {
    "targets": "99|500.0|50.0|None", "targets_since_s": 1.0, "breached_caps": [BREACHED],
    "last_change": CHANGE, "scale_history": [SCALED], "scale_out_since_s": 1.0,
    "scale_in_since_s": None, "scale_in_to": 1, "cold_start_s": 40.0, "loaded_cap": LOADED,
    "chunk_budget": {"tokens": 192, "time_s": 1.0, "key": "m|50"},
    "chunk_trial": {"tokens": 192, "num": 3, "total": 9, "at_s": 1.0, "key": "m|50"},
}  # fmt: skip


def past_of(held: Any) -> Past:
    """What is believed of `held` in a ConfigMap."""
    read = parse({**KNOWN, "past.json": json.dumps(held)})
    assert read is not None
    return read.past


def test_a_memory_that_is_believable_is_read_whole() -> None:
    past = past_of(WHOLE)
    assert json.loads(DecidedRuntime(1, 4, 1, past).data()["past.json"]).keys() == WHOLE.keys()
    assert past.breached_caps[0].times == 1
    assert past.scale_history[0].settled_s == 2.0


@pytest.mark.parametrize(
    "held",
    [
        {"breached_caps": [{**BREACHED, "times": 100_000_000_000}]},
        {"breached_caps": [{**BREACHED, "times": MAX_DOUBLINGS + 1}]},
        {"breached_caps": [{**BREACHED, "times": -1}]},
        {"breached_caps": [{**BREACHED, "cap": 0}]},
        {"breached_caps": [{**BREACHED, "cap": 4097}]},
        {"breached_caps": [{**BREACHED, "mean_tokens": -1.0}]},
        {"breached_caps": [BREACHED] * (REMEMBERED_CAPS + 1)},
        {"loaded_cap": {**LOADED, "times": 100_000_000_000}},
        {"loaded_cap": {**LOADED, "per_s": 1e300}},
        {"last_change": {**CHANGE, "time_s": -1e10}},
        {"last_change": {**CHANGE, "time_s": 1e15}},
        {"last_change": {**CHANGE, "from_cap": -5}},
        {"last_change": {**CHANGE, "epoch": 10**17}},
        {"last_change": {**CHANGE, "reason": "x" * 100_000}},
        {"scale_history": [{**SCALED, "time_s": -1e10}]},
        {"scale_history": [{**SCALED, "to_replicas": 10**6}]},
        {"scale_history": [{**SCALED, "drain_s": 1e10}]},
        {"scale_history": [SCALED] * (HISTORY + 1)},
        {"scale_in_to": 10**6},
        {"targets": "x" * 100_000},
        {"targets_since_s": -1.0},
        {"cold_start_s": -1.0},
        {"scale_out_since_s": 1e300},
    ],
)
def test_a_memory_that_no_operator_of_ours_has_written_is_forgotten(held: dict[str, Any]) -> None:
    """Each doubling is a power of two that the law computes: a large one takes all memory, of the
    operator of all objects."""
    assert past_of({**WHOLE, **held}) == Past()


ANY = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=8,
)
NUMBERS = st.one_of(
    st.integers(0, 9),
    st.sampled_from([-1, 4096, 1000, 10**11, 10**12, 10**30, -(10**11), 1e11, 1e300, 1e-300, NOW]),
    st.floats(allow_nan=False, allow_infinity=False),
)
VALUES = NUMBERS | st.none() | st.sampled_from(["Headroom", "InterferenceLasts", ""]) | ANY


def _like(known: dict[str, Any]) -> st.SearchStrategy[Any]:
    """`known` with some of its values replaced."""
    return st.dictionaries(st.sampled_from(sorted(known)), VALUES).map(lambda new: {**known, **new})


PASTS = st.fixed_dictionaries(
    {
        "breached_caps": st.lists(_like(BREACHED), max_size=REMEMBERED_CAPS + 1),
        "last_change": st.none() | _like(CHANGE),
        "scale_history": st.lists(_like(SCALED), max_size=HISTORY + 1),
        "loaded_cap": st.none() | _like(LOADED),
    }
).flatmap(
    lambda parts: _like({**WHOLE, **parts})  # a field of its own may be nonsense, too
)


@settings(max_examples=300, deadline=timedelta(seconds=20))
@given(PASTS | ANY, st.booleans())
def test_whatever_the_memory_says_a_pass_plans_in_time(held: Any, is_late: bool) -> None:
    gaps = TokenGaps(n=40, over=9, sketch={200: 40})
    first = FirstTokens(n=4, over=4 * is_late, sketch={300: 4})
    busy = {
        "arrivals": 4, "finished": 4, "ttft": first, "itl": gaps, "steps": 40, "decodes": 160,
        "running": 4, "max_running": 4, "busy_s": 1.9, "generated_tokens": 160,
    }  # fmt: skip
    ticks = [create_tick(seq, t_s=NOW - 120 + 2 * seq, **busy) for seq in range(60)]
    model = StepModel(10.0, 1.0, 0.01, 0.0, 100, 1.0)
    evidence = create_evidence(ticks=ticks, lengths=Lengths(200.0, 10.0, 50), step_model=model)
    scrape = replace(create_scrape(), evidence=evidence, config=create_config())
    pod, service = create_pod(), create_service()
    runtime = parse({**KNOWN, "past.json": json.dumps(held)})
    observed = create_observed(
        service, runtime=runtime, pods=(pod,), scrapes={pod.uid: scrape}, previous={}
    )
    planned = plan(service, observed, SETTINGS, NOW)
    assert planned.runtime is not None
    assert parse(planned.runtime.data()) is not None
    assert planned.status.keys() <= STATUS["properties"].keys()
