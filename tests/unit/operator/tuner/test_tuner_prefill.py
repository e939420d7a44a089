"""Prefill interference: gaps beside another request's prompt, in chunks that nobody can change."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sluice_core.contract import StepModel, TokenGaps, Waiting
from sluice_core.latency import StepLaw
from sluice_operator.tuner import CapLimits, ChunkBudget, ChunkLimits, Decision, Past, decide
from sluice_operator.tuner import constants as k
from sluice_operator.tuner.model import allowed_chunk, needed_chunk
from sluice_operator.tuner.types import ChunkTrial
from unit.operator.tuner.made import LIMITS, TARGETS, gaps, late, observation, pod, tick

MODEL = StepModel(10.0, 1.0, 0.0, 0.1, 1000, 1.05)
"""A full cap of 8 takes 18 ms. 50 ms less the margin leave 245 tokens: two digits make it 192."""
DAY_S = 86_400.0
ROLLED = ChunkLimits(may_roll=True, key="m")


def met_prompts(n: int = 300, over: int = 60, outside: int = 0) -> TokenGaps:
    """1,000 gaps at the cap; late are `over` of `n` beside prompts, and `outside` of the rest."""
    late_ones = over + outside
    usual = gaps(1000, late_ones)
    return replace_gaps(usual, n_in_prefill=n, over_in_prefill=over)


def replace_gaps(itl: TokenGaps, **changes: Any) -> TokenGaps:
    fields = {name: getattr(itl, name) for name in itl.__struct_fields__}
    return TokenGaps(**(fields | changes))


def decided(
    itl: TokenGaps,
    model: StepModel | None = None,
    chunk_is: str = "fixed",
    past: Past | None = None,
    limits: CapLimits = LIMITS,
    now: float = 60.0,
    **changes: Any,
) -> tuple[Past, Decision]:
    first = int(now / 2) - 29
    ticks = [tick(seq, itl=itl, **changes) for seq in range(first, first + 30)]
    view = pod("a", ticks, model=model, chunk_is=chunk_is)
    return decide(past or Past(), observation(view, limits=limits))


@pytest.mark.parametrize("model", [MODEL, None], ids=["modelled", "unmodelled"])
def test_gaps_late_only_beside_prompts_lower_no_cap_and_the_budget_is_named(
    model: StepModel | None,
) -> None:
    _, decision = decided(met_prompts(), model)
    assert (decision.cap, decision.replicas) == (8, 1)
    assert decision.cap_move.reason == decision.slo_feasible.reason == "PrefillInterference"
    assert decision.slo_feasible.holds is False
    wanted = "maxNumBatchedTokens to 192, now 2048" if model else "maxNumBatchedTokens below 2048"
    assert wanted in decision.slo_feasible.message
    assert "1800 of them beside another request's prompt" in decision.slo_feasible.message
    assert decision.slo_met.holds is False


def test_gaps_late_only_in_steps_that_are_long_on_purpose_lower_no_cap() -> None:
    _, decision = decided(met_prompts(), MODEL, chunk_is="live")
    assert (decision.cap, decision.cap_move.reason) == (8, "LongSteps")
    assert "1800 of them in steps that were long" in decision.slo_feasible.message
    assert decision.proposed_chunk is None
    assert decision.slo_met.holds is False
    _, decision = decided(met_prompts(over=0, outside=60), MODEL, chunk_is="live")
    assert decision.cap_move.reason == "InterTokenLatencyBreached"


def test_gaps_that_are_late_without_a_prompt_too_lower_the_cap() -> None:
    assert decided(met_prompts(outside=30))[1].cap < 8
    assert decided(met_prompts(outside=7))[1].cap == 8, "exactly as many as are allowed"


def test_where_nearly_all_gaps_meet_prompts_the_step_model_tells_what_decodes_alone_take() -> None:
    heavy = StepModel(10.0, 7.0, 0.0, 0.1, 1000, 1.05)
    all_of_them = met_prompts(n=1000)
    assert decided(all_of_them, MODEL)[1].cap == 8
    assert decided(all_of_them, heavy)[1].cap < 8
    assert decided(all_of_them)[1].cap < 8, "nobody can tell, so the cap is tried"


def test_first_tokens_that_wait_for_the_cap_still_raise_it() -> None:
    _, decision = decided(met_prompts(), MODEL, ttft=late(10, 10), waiting=Waiting(cap=9))
    assert decision.cap_move.reason in ("Headroom", "FirstTokenBreached")
    assert 8 < decision.cap <= 16


def test_a_budget_that_is_small_enough_is_not_blamed_on_the_user() -> None:
    slow = StepModel(10.0, 1.0, 0.0, 0.005, 1000, 1.05)
    message = decided(met_prompts(), slow)[1].slo_feasible.message
    assert "maxNumBatchedTokens" not in message
    assert "a looser target" in message


milliseconds = st.floats(0, 1e6)


@given(
    milliseconds, milliseconds, st.just(0.0) | st.floats(1e-6, 1e6), st.integers(1, 1024),
    st.floats(0.1, 1e6),
)  # fmt: skip
def test_an_allowed_chunk_holds_the_target_or_is_the_least(
    a: float, b: float, d: float, cap: int, itl_ms: float
) -> None:
    law, limits = StepLaw(a, b, 0.0, d), ChunkLimits()
    tokens = allowed_chunk(law, replace(TARGETS, itl_ms=itl_ms), cap, limits)
    if tokens is None:
        assert d == 0
        return
    assert limits.least <= tokens <= limits.most
    assert tokens == limits.least or law.step_ms(cap, 0, tokens) <= 0.85 * itl_ms * (1 + 1e-9)
    fewer = allowed_chunk(law, replace(TARGETS, itl_ms=itl_ms), cap + 1, limits)
    assert fewer is not None
    assert fewer <= tokens


def _proposals(
    *costs: float, past: Past | None = None, every_s: float = 2.0, **changes: Any
) -> tuple[Past, int]:
    """The past after passes with models of such costs of a prompt token, and how many it took
    until a budget was new."""
    start = past or Past()
    past = start
    for number, cost in enumerate(costs, 1):
        model = StepModel(10.0, 1.0, 0.0, cost, 1000, 1.05)
        now = 60.0 + every_s * number
        ticks = [
            tick(seq, itl=gaps(1000, 0), **changes)
            for seq in range(int(now / 2) - 29, int(now / 2) + 1)
        ]
        view = pod("a", ticks, model=model, chunk_is="fixed")
        limits = replace(LIMITS, chunk=ROLLED)
        past, _ = decide(past, replace(observation(view, limits=limits), now=now))
        if past.chunk_budget != start.chunk_budget:
            return past, number
    return past, 0


def test_a_budget_is_taken_once_five_minutes_of_traffic_proposed_it() -> None:
    """A model of a few seconds rolled the pods for a guess."""
    past, number = _proposals(*[0.1] * 200)
    assert number == k.CHUNK_TICKS
    assert past.chunk_budget is not None
    assert (past.chunk_budget.tokens, past.chunk_trial) == (192, None)


def test_a_start_that_is_slower_than_what_follows_is_forgotten() -> None:
    past, number = _proposals(*[1.0] * 20, *[0.1] * 200)
    assert number == 20 + k.CHUNK_TICKS
    assert past.chunk_budget is not None
    assert past.chunk_budget.tokens == 192


def test_a_model_that_hears_nothing_new_settles_nothing() -> None:
    assert _proposals(*[0.1] * 200, max_running=0, running=0)[1] == 0
    assert _proposals(*[0.1] * 200, every_s=0.5)[1] == 0, "a tick is counted once"


def test_under_a_load_that_never_rests_the_roll_comes_within_an_hour() -> None:
    past, number = _proposals(*[0.1, 0.05] * 1000)
    assert number == k.CHUNK_TICKS_MOST
    assert past.chunk_budget is not None
    assert past.chunk_budget.tokens == 192, "the smaller of the two"


def test_a_wanted_budget_replaces_another_after_a_day() -> None:
    limits = replace(LIMITS, chunk=ROLLED)
    known = ChunkBudget(192, 60.0, "m|50")
    settled = {
        96: ChunkTrial(96, 150, 150, 0.0, "m|50"),
        384: ChunkTrial(384, 150, 150, 0.0, "m|50"),
    }
    faster, slower = (StepModel(10.0, 1.0, 0.0, d, 1000, 1.05) for d in (0.05, 0.2))
    prompts_late = late(10, 10, "prefill")
    for now, model, ttft, itl, tokens, trial in (
        (DAY_S, faster, prompts_late, met_prompts(), 192, 384),
        (DAY_S + 60, faster, prompts_late, met_prompts(), 384, 384),
        (DAY_S + 60, faster, late(10, 0), met_prompts(), 192, 384),
        (DAY_S, slower, late(10, 0), met_prompts(), 192, 96),
        (DAY_S + 60, slower, late(10, 0), met_prompts(), 96, 96),
        (DAY_S + 60, slower, late(10, 0), gaps(1000, 0), 192, 96),
    ):
        past = Past(chunk_budget=known, chunk_trial=settled[trial])
        later, _ = decided(itl, model, past=past, limits=limits, now=now, ttft=ttft)
        assert later.chunk_budget is not None
        assert later.chunk_budget.tokens == tokens
    past = Past(chunk_budget=known, chunk_trial=settled[96])
    unheard, _ = decided(met_prompts(), None, past=past, limits=limits, now=2 * DAY_S)
    assert unheard.chunk_budget == known, "kept without a model"
    for chunk in (replace(ROLLED, key="other"), replace(ROLLED, least=256)):
        other = replace(limits, chunk=chunk)
        assert decided(met_prompts(), None, past=past, limits=other)[0].chunk_budget is None


def test_a_budget_is_only_proposed_where_pods_may_not_roll_or_it_is_hardly_better() -> None:
    settled = Past(chunk_trial=ChunkTrial(192, 150, 150, 0.0, "m|50"))
    held = replace(LIMITS, chunk=replace(ROLLED, may_roll=False))
    past, decision = decided(met_prompts(), MODEL, limits=held, past=settled)
    assert (past.chunk_budget, decision.proposed_chunk) == (None, 192)
    alike = StepModel(10.0, 1.0, 0.0, 0.014, 1000, 1.05)
    rolled = replace(LIMITS, chunk=ROLLED)
    past, decision = decided(met_prompts(), alike, limits=rolled, past=settled)
    assert (past.chunk_budget, decision.proposed_chunk) == (None, 1536)
    assert decided(met_prompts(), MODEL, limits=rolled, past=settled)[0].chunk_budget is not None


token_ms = st.just(0.0) | st.floats(1e-6, 10)
laws = st.builds(StepLaw, st.floats(0.1, 100), st.floats(0, 100), st.just(0.0), token_ms)
loads = st.floats(0, 1e6)


@given(laws, loads, loads, st.floats(0, 1024), st.builds(ChunkLimits, most=st.integers(64, 65_536)))
def test_the_budget_for_a_load_is_within_limits_rises_with_it_and_is_the_most_if_none_serves_it(
    law: StepLaw, one: float, other: float, decodes: float, limits: ChunkLimits
) -> None:
    light, heavy = (needed_chunk(law, load, decodes, limits) for load in sorted((one, other)))
    assert limits.least <= light <= heavy <= limits.most
    assert law.d == 0 or needed_chunk(law, 2 / law.d, decodes, limits) == limits.most


@given(laws, st.floats(0, 100), st.floats(0, 1024))
def test_steps_of_that_budget_compute_what_arrives(
    law: StepLaw, tokens_per_ms: float, decodes: float
) -> None:
    budget = needed_chunk(law, tokens_per_ms, decodes, ChunkLimits())
    chunk = budget - decodes
    if budget == ChunkLimits().most:
        return
    assert law.d * tokens_per_ms < 1
    assert chunk >= tokens_per_ms * law.step_ms(decodes, 0, chunk) * (1 - 1e-9)


@given(laws, loads, st.integers(1, 64), st.sampled_from([None, 500.0]))
def test_a_load_never_makes_the_proposed_budget_smaller_and_only_a_first_token_target_larger(
    law: StepLaw, arrivals: float, cap: int, ttft_ms: float | None
) -> None:
    model = StepModel(law.a, law.b, 0.0, law.d, 1000, 1.05)
    ticks = [tick(seq, arrivals=int(arrivals), max_running=cap) for seq in range(1, 31)]
    targets = replace(TARGETS, ttft_ms=ttft_ms)
    seen = observation(pod("a", ticks, model=model, chunk_is="fixed"), targets=targets)
    proposed = decide(Past(), seen)[1].proposed_chunk
    allowed = allowed_chunk(law, targets, min(cap, seen.cap), ChunkLimits())
    if allowed is None or ttft_ms is None:
        assert proposed == allowed
    else:
        assert proposed is not None
        assert allowed <= proposed <= ChunkLimits().most


def test_a_budget_that_the_prompts_need_is_named_though_it_breaks_gaps() -> None:
    """50 requests/s of 64 tokens leave 0.68 of the time, so that steps of 18 ms need 94 of them."""
    dear = StepModel(10.0, 1.0, 0.0, 0.2, 1000, 1.05)
    busy: dict[str, Any] = {"arrivals": 100, "prefill_tokens": 6400, "ttft": late(100, 0)}
    _, quiet = decided(met_prompts(), dear)
    assert quiet.proposed_chunk == 96
    _, decision = decided(met_prompts(), dear, **busy)
    assert decision.proposed_chunk == 192
    message = decision.slo_feasible.message
    assert "maxNumBatchedTokens to 192, now 2048" in message
    assert "with less the arriving prompts would be late" in message
    _, overloaded = decided(met_prompts(), dear, **(busy | {"arrivals": 1000}))
    assert overloaded.proposed_chunk == 65_536
    assert "more pods" in overloaded.slo_feasible.message
