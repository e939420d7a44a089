"""The token budget of a step: within the target, never below what must run."""

from itertools import pairwise

import pytest
from sluice_core.latency import MIN_CHUNK_TOKENS
from sluice_core.steptime import REFIT_S, StepRecord
from sluice_core.wire import EngineLimits
from sluice_vllm.budget import Budget

MS, MS_PER_DECODE, MS_PER_TOKEN = 10.0, 0.5, 0.4


def limits(itl_ms: float | None, tokens: int = 2048) -> EngineLimits:
    return EngineLimits(epoch=1, max_num_seqs=16, max_num_batched_tokens=tokens, itl_ms=itl_ms)


def record(decodes: int, prefill: int, at_s: float) -> StepRecord:
    ms = MS + MS_PER_DECODE * decodes + MS_PER_TOKEN * prefill
    return StepRecord(at_s, decodes, 0, prefill, ms)


@pytest.fixture
def learnt() -> Budget:
    budget = Budget()
    shapes = [(0, 2048), (4, 32), (8, 64), (16, 0), (16, 128), (1, 0), (12, 40), (3, 256)]
    for step in range(80):
        budget.learn(record(*shapes[step % len(shapes)], 0.05 * step))
    return budget


def test_without_a_step_the_budget_is_the_engines() -> None:
    assert Budget().tokens(limits(44.0), 0, 0) == 2048


def test_a_chunk_beside_decodes_fills_the_target(learnt: Budget) -> None:
    tokens = learnt.tokens(limits(44.0), 16, 4000)
    assert tokens - 16 == pytest.approx((44 - MS - 16 * MS_PER_DECODE) / MS_PER_TOKEN, abs=3)


def test_a_lower_target_leaves_a_smaller_chunk_and_the_smallest_at_last(learnt: Budget) -> None:
    sizes = [learnt.tokens(limits(ms), 16, 4000) - 16 for ms in (100.0, 60.0, 40.0, 5.0)]
    assert sizes == sorted(sizes, reverse=True)
    assert len(set(sizes)) == 4
    assert sizes[-1] == MIN_CHUNK_TOKENS


def test_where_nobody_decodes_a_prompt_is_not_cut(learnt: Budget) -> None:
    assert learnt.tokens(limits(44.0), 0, 0) == 2048


def test_drafts_are_no_part_of_the_chunk(learnt: Budget) -> None:
    alone = learnt.tokens(limits(44.0), 16, 4000)
    assert learnt.tokens(limits(44.0), 16, 4000, per_decode=4) == alone + 3 * 16


def test_a_budget_below_the_decodes_still_serves_them_all(learnt: Budget) -> None:
    assert learnt.tokens(limits(44.0, tokens=8), 16, 4000) == 16 + 1


def test_the_first_steps_are_each_learnt_from_then_one_a_second() -> None:
    budget = Budget()
    models = [budget.learn(record(4, 32, 0.01 * step)) for step in range(200)]
    fitted = [step for step, model in enumerate(models) if model is not None]
    assert fitted[:32] == list(range(32))
    assert all(later - sooner >= 100 * REFIT_S - 1 for sooner, later in pairwise(fitted[31:]))
