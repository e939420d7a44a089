"""Any evidence at all gives bounded, finite, explained decisions."""

import math
from dataclasses import replace
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sluice_core.contract import Causes, FirstTokens, Requests, StepModel, Tick, TokenGaps, Waiting
from sluice_operator.reasons import Reason
from sluice_operator.tuner import CapLimits, ChunkLimits, Decision, Past, PodView, Targets, decide
from unit.operator.tuner.made import observation, pod, tick

count = st.integers(0, 10**6)
small = st.integers(0, 40)
sketches = st.dictionaries(st.integers(-300, 800), count, max_size=4)
coefficient = st.floats(0, 1) | st.floats(0, 1e6)
rarely = st.integers(0, 9).map(lambda number: number == 9)


@st.composite
def among(draw: st.DrawFn, n: int) -> int:
    """How many of `n` are over target: often none or few."""
    return draw(st.sampled_from([0, n // 5000, n // 100]) | st.integers(0, n))


@st.composite
def gaps(draw: st.DrawFn) -> TokenGaps:
    n = draw(count)
    at_cap = draw(st.just(n) | st.integers(0, n))
    over_at_cap = draw(among(at_cap))
    over = draw(st.just(over_at_cap) | st.integers(over_at_cap, n))
    in_prefill = draw(among(n)), draw(among(over))
    return TokenGaps(n, over, draw(small | count), at_cap, over_at_cap, draw(sketches), *in_prefill)


@st.composite
def ticks(draw: st.DrawFn, seq: int, t_s: float, epoch: int) -> Tick:
    n, steps = draw(count), draw(count)
    causes = Causes(draw(small), draw(small), draw(small), draw(small))
    return tick(
        seq,
        t_s=t_s,
        epoch=epoch if not draw(rarely) else draw(st.integers(0, 3)),
        boot_id=draw(st.sampled_from("ab")),
        settled=not draw(rarely),
        cap=draw(st.integers(1, 64)),
        arrivals=draw(count),
        refused=draw(count),
        finished=draw(st.just(0) | count),
        ttft=FirstTokens(n, draw(among(n)), causes, draw(sketches)),
        itl=draw(gaps()),
        e2e=Requests(n, draw(among(n)), draw(sketches)),
        steps=steps,
        slow_steps=draw(among(steps)),
        decodes=draw(count),
        prefill_tokens=draw(count),
        generated_tokens=draw(count),
        busy_s=draw(st.floats(0, 1e6)),
        throttled_s=draw(st.floats(0, 1e6)),
        running=draw(count),
        max_running=draw(count),
        waiting=Waiting(draw(small | count), draw(small | count)),
        failed=draw(st.dictionaries(st.sampled_from(["500", "cut", "died"]), count, max_size=2)),
    )


@st.composite
def rows(draw: st.DrawFn, now: float, epoch: int) -> list[Tick]:
    """A few ticks at any time; or one over and over, up to `now` or so: of 63 there is a whole
    run of 32 wherever they begin."""
    if draw(st.booleans()):
        ages = draw(st.lists(st.floats(-3, 20) | st.floats(0, 200), max_size=3))
        return [draw(ticks(seq, now - age_s, epoch)) for seq, age_s in enumerate(ages)]
    num, end_s = draw(st.sampled_from([40, 63, 80])), now - draw(st.floats(-3, 12))
    one = draw(ticks(draw(small), 0.0, epoch))
    return [
        msgspec.structs.replace(one, seq=one.seq + num - age, t_s=end_s - 2.0 * age)
        for age in reversed(range(num))
    ]


@st.composite
def pods(draw: st.DrawFn, name: str, now: float, epoch: int) -> PodView:
    model = draw(st.none() | st.builds(StepModel, *[coefficient] * 4, count, coefficient))
    its_epoch = epoch if not draw(rarely) else draw(st.integers(0, 3))
    chunk_is = draw(st.sampled_from(["live", "fixed"]))
    ran = draw(rows(now, epoch))
    view = pod(name, ran, model=model, epoch=its_epoch, chunk_is=chunk_is)
    gone: dict[str, Any] = {"evidence": None, "config": None} if draw(rarely) else {}
    flags: dict[str, Any] = {"ready": not draw(rarely), "terminating": draw(rarely)}
    seen_s = draw(st.none() | st.floats(now - 10, now) | st.floats(0, 400))
    return replace(view, seen_s=seen_s, **flags, **gone)


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


@settings(max_examples=200, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_any_evidence_gives_a_bounded_finite_explained_decision(data: st.DataObject) -> None:
    limits = CapLimits(
        data.draw(st.integers(1, 64)),
        data.draw(st.integers(1, 8)),
        1,
        data.draw(st.integers(1, 6)),
        data.draw(st.booleans()),
        0.0,
        data.draw(st.sampled_from([0.0, 30.0])),
        chunk=data.draw(st.none() | st.builds(ChunkLimits, may_roll=st.booleans())),
    )
    past, replicas, epoch = Past(), 2, 1
    cap, targets = data.draw(st.integers(1, 64)), data.draw(all_targets())
    if not data.draw(rarely):
        cap = limits.bound_cap(cap)
    for now in (200.0, 250.0, 302.0):
        names = "" if data.draw(rarely) else "xyz"[: data.draw(st.integers(1, 3))]
        views = [data.draw(pods(name, now, epoch)) for name in names]
        seen = observation(
            *views,
            now=now,
            targets=targets,
            limits=limits,
            cap=cap,
            epoch=epoch,
            replicas=replicas,
        )
        before_spell = _before_interference(past)
        past, decision = decide(past, seen)
        check(decision, seen.cap, seen.replicas, limits, before_spell)
        assert decide(past, seen) == decide(past, seen)
        past = msgspec.json.decode(msgspec.json.encode(past), type=Past)
        epoch += decision.cap != cap
        cap, replicas = decision.cap, decision.replicas


@settings(max_examples=100, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_no_evidence_moves_the_cap_of_static_batches(data: st.DataObject) -> None:
    size = data.draw(st.integers(1, 64))
    limits = CapLimits(size, size, 1, data.draw(st.integers(1, 6)), is_fixed=True)
    past, replicas = Past(), 2
    for now in (200.0, 250.0, 302.0):
        views = [data.draw(pods(name, now, 1)) for name in "xyz"[: data.draw(st.integers(1, 3))]]
        targets = data.draw(all_targets())
        seen = observation(
            *views, now=now, targets=targets, limits=limits, cap=size, replicas=replicas
        )
        past, decision = decide(past, seen)
        check(decision, size, replicas, limits, 0)
        assert (decision.cap, decision.cap_move.reason) == (size, Reason.STATIC_BATCH)
        assert decision.limited_by != "Minimum"
        replicas = decision.replicas


@pytest.mark.parametrize(
    ("num", "max_running", "reason"),
    [(30, 8, "Headroom"), (30, 3, "CapUnused"), (1, 8, "CollectingEvidence")],
)
def test_a_cap_that_is_proven_unused_or_not_yet_proven_is_decided_so(
    num: int, max_running: int, reason: str
) -> None:
    """What random evidence seldom reaches."""
    seen = observation(pod("a", [tick(seq, max_running=max_running) for seq in range(1, num + 1)]))
    past, decision = decide(Past(), seen)
    check(decision, seen.cap, seen.replicas, seen.limits, _before_interference(past))
    assert decision.cap_move.reason == reason


def _before_interference(past: Past) -> int:
    """The cap that was lowered under interference; it may come back in one step."""
    last = past.last_change
    return last.from_cap if last and last.reason == Reason.INTERFERENCE_LASTS else 0


def check(
    decision: Decision, cap: int, replicas: int, limits: CapLimits, before_spell: int
) -> None:
    """In bounds, at most doubled or half as far as a model points. Every number finite, and every
    change with its reason."""
    low = min(limits.min_num_seqs, limits.ceiling)
    assert low <= decision.cap_move.to <= limits.ceiling
    half = (decision.predicted_cap or 0) / 2
    assert decision.cap_move.to <= max(2 * cap, half, low, before_spell)
    if limits.replicas_external:
        assert decision.replicas == replicas
    else:
        assert limits.min_replicas <= decision.replicas_move.to <= limits.max_replicas
    assert bool(decision.cap_reason) == (decision.cap_move.to != cap)
    assert bool(decision.replicas_reason) == (decision.replicas_move.to != replicas)
    for move in (decision.cap_move, decision.replicas_move):
        assert move.reason.isalnum()
        assert move.message
        assert "nan" not in move.message
    for told in (decision.slo_met, decision.slo_feasible, decision.metrics, decision.succeed):
        assert told.reason.isalnum()
        assert told.message
    assert 0 <= decision.failures.share <= 1
    for judged in decision.verdicts.values():
        numbers = (judged.over_share, judged.quantile_ms or 0.0)
        assert all(math.isfinite(number) for number in numbers)
    assert decision.proposed_chunk is None or 64 <= decision.proposed_chunk <= 65_536
    assert math.isfinite(decision.arrivals_per_s)
    assert math.isfinite(decision.effective_batch)
