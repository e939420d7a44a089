"""Any evidence at all gives bounded, finite, explained decisions."""

import math
from dataclasses import replace
from typing import Any

import msgspec
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sluice_operator.tuner import Decision, Limits, Past, PodView, Targets, decide
from sluice_worker.contract import (
    Causes,
    FirstTokens,
    Requests,
    StepModel,
    Tick,
    TokenGaps,
    Waiting,
)
from unit.operator.tuner.made import observation, pod, tick

count = st.integers(0, 10**6)
small = st.integers(0, 40)
sketches = st.dictionaries(st.integers(-300, 800), count, max_size=4)
coefficient = st.floats(0, 1e6)


@st.composite
def ticks(draw: st.DrawFn, seq: int) -> Tick:
    n, at_cap = draw(count), draw(count)
    causes = Causes(draw(small), draw(small), draw(small), draw(small))
    return tick(
        seq,
        t_s=draw(st.floats(0, 200)),
        epoch=draw(st.integers(0, 3)),
        boot_id=draw(st.sampled_from("ab")),
        settled=draw(st.booleans()),
        max_num_seqs=draw(st.integers(1, 64)),
        arrivals=draw(count),
        refused=draw(count),
        finished=draw(count),
        ttft=FirstTokens(n, draw(st.integers(0, n)), causes, draw(sketches)),
        itl=TokenGaps(n, draw(st.integers(0, n)), draw(count), at_cap, at_cap, draw(sketches)),
        e2e=Requests(n, draw(st.integers(0, n)), draw(sketches)),
        steps=draw(count),
        decodes=draw(count),
        prefill_tokens=draw(count),
        generated_tokens=draw(count),
        busy_s=draw(st.floats(0, 1e6)),
        throttled_s=draw(st.floats(0, 1e6)),
        running=draw(count),
        max_running=draw(count),
        waiting=Waiting(draw(count), draw(count)),
    )


@st.composite
def pods(draw: st.DrawFn, name: str) -> PodView:
    rows = [draw(ticks(seq)) for seq in range(draw(st.integers(0, 6)))]
    model = draw(st.none() | st.builds(StepModel, *[coefficient] * 4, count, coefficient))
    view = pod(name, rows, model=model, epoch=draw(st.integers(0, 3)))
    gone: dict[str, Any] = {"evidence": None, "config": None} if draw(st.booleans()) else {}
    flags: dict[str, Any] = {"ready": draw(st.booleans()), "terminating": draw(st.booleans())}
    return replace(view, seen_s=draw(st.none() | st.floats(0, 300)), **flags, **gone)


@st.composite
def all_targets(draw: st.DrawFn) -> Targets:
    target = st.none() | st.floats(0.1, 1e5)
    return Targets(
        draw(st.sampled_from(["50", "90", "95", "99", "99.9", "99.99"])),
        draw(target),
        draw(target),
        draw(target),
        draw(st.sampled_from([30.0, 600.0])),
        draw(st.sampled_from(["Queue", "Shed"])),
        draw(st.sampled_from(["Enforce", "Advisory"])),
    )


@settings(max_examples=300, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_any_evidence_gives_a_bounded_finite_explained_decision(data: st.DataObject) -> None:
    limits = Limits(
        data.draw(st.integers(1, 64)),
        data.draw(st.integers(1, 8)),
        1,
        data.draw(st.integers(1, 6)),
        data.draw(st.booleans()),
        0.0,
        data.draw(st.sampled_from([0.0, 30.0])),
    )
    past, cap, replicas, epoch = Past(), data.draw(st.integers(1, 64)), 2, 1
    targets = data.draw(all_targets())
    for now in (100.0, 150.0, 202.0):
        views = [data.draw(pods(name)) for name in "xyz"[: data.draw(st.integers(0, 3))]]
        seen = observation(
            *views,
            now=now,
            targets=targets,
            limits=limits,
            cap=cap,
            epoch=epoch,
            replicas=replicas,
        )
        past, decision = decide(past, seen)
        check(decision, seen.cap, seen.replicas, limits)
        assert decide(past, seen) == decide(past, seen)
        past = msgspec.json.decode(msgspec.json.encode(past), type=Past)
        epoch += decision.cap != cap
        cap, replicas = decision.cap, decision.replicas


def check(decision: Decision, cap: int, replicas: int, limits: Limits) -> None:
    """In bounds, at most doubled, every number finite, and every change with its reason."""
    low = min(limits.min_num_seqs, limits.ceiling)
    assert low <= decision.cap_move.to <= limits.ceiling
    assert decision.cap_move.to <= max(2 * cap, low)
    if limits.replicas_external:
        assert decision.replicas == replicas
    else:
        assert limits.min_replicas <= decision.replicas_move.to <= limits.max_replicas
    assert bool(decision.cap_reason) == (decision.cap_move.to != cap)
    assert bool(decision.replicas_reason) == (decision.replicas_move.to != replicas)
    assert decision.reason.isalnum()
    assert decision.message
    for judged in decision.verdicts.values():
        numbers = (judged.over_share, judged.quantile_ms or 0.0)
        assert all(math.isfinite(number) for number in numbers)
    assert math.isfinite(decision.arrivals_per_s)
    assert math.isfinite(decision.effective_batch)
    assert "nan" not in decision.message
