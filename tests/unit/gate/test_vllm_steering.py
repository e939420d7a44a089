"""The tokens of a step, and held first tokens: in vLLM nobody is lost and nothing spins."""

from collections import deque
from itertools import pairwise
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from sluice_core.latency import MIN_CHUNK_TOKENS
from sluice_core.port import EngineLimits
from sluice_core.steptime import REFIT_S, StepRecord
from sluice_vllm.steering import Steering
from unit.gate.made_vllm import Request, Scheduler, Status
from unit.gate.vllm_machine import Cost, Machine

CAP, TOKENS, TTFT_S = 32, 2048, 1.0
COST = Cost(10.0, 0.5, 0.0, 0.4, noise=0.0)
LIMITS = EngineLimits(
    epoch=0,
    cap=CAP,
    max_num_batched_tokens=TOKENS,
    itl_ms=44.0,
    ttft_ms=1e3 * TTFT_S,
    policy="deadline",
)


def create_steering(
    limits: EngineLimits = LIMITS,
    *,
    may_hold: bool = True,
    num_blocks: int = 10_000,
    num_prefill_lookahead: int = 0,
    num_spec_tokens: int = 0,
) -> Steering:
    """Of a scheduler of its own, with a model that it has learnt."""
    scheduler = Scheduler(
        max_num_active_reqs=CAP,
        max_num_scheduled_tokens=TOKENS,
        num_blocks=num_blocks,
        num_prefill_lookahead=num_prefill_lookahead,
        num_spec_tokens=num_spec_tokens,
    )
    steering = Steering(scheduler, limits, may_cut=True, may_hold=may_hold)
    shapes = [(0, 2048), (4, 32), (8, 64), (16, 0), (16, 128), (1, 0), (12, 40), (3, 256)]
    for step in range(80):
        steering.learn(record(*shapes[step % len(shapes)], 0.05 * step - 4.0))
    return steering


def record(decodes: int, prefill: int, at_s: float) -> StepRecord:
    ms = COST.step_ms + COST.decode_ms * decodes + COST.prompt_ms * prefill
    return StepRecord(at_s, decodes, 0, prefill, ms)


def machine(steering: Steering, *, at_once: int = 1) -> Machine:
    return Machine(scheduler_of(steering), steering, COST, at_once=at_once)


def scheduler_of(steering: Steering) -> Scheduler:
    scheduler = steering._scheduler
    assert isinstance(scheduler, Scheduler)
    return scheduler


def burst(num: int = 16, prompt: int = 100, at_s: float = 0.0) -> list[Request]:
    """Too many for short steps, if 100 tokens each; in time in long ones."""
    return [Request(f"{at_s}-{i}", prompt, arrival_time=at_s) for i in range(num)]


def tokens_beside(steering: Steering, num_decodes: int = 16) -> int:
    """Of a step beside so many decodes, with a prompt that is left."""
    running = [Request(str(i), 250, 250, num_output_tokens=1) for i in range(num_decodes)]
    chunk = Request("chunk", 4000, 100, is_prefill_chunk=True)
    scheduler_of(steering).running = [*running, chunk]
    steering.prepare(0.0)
    return scheduler_of(steering).max_num_scheduled_tokens


def no_deadline(itl_ms: float, tokens: int = TOKENS) -> EngineLimits:
    return EngineLimits(0, CAP, tokens, itl_ms=itl_ms)


# The tokens of a step


def test_without_a_step_the_tokens_are_the_engines() -> None:
    scheduler = Scheduler(max_num_scheduled_tokens=TOKENS)
    steering = Steering(scheduler, no_deadline(44.0), may_cut=True, may_hold=True)
    assert tokens_beside(steering) == TOKENS


def test_a_chunk_beside_decodes_fills_the_target() -> None:
    tokens = tokens_beside(create_steering(no_deadline(44.0)))
    room_ms = 44 - COST.step_ms - 16 * COST.decode_ms
    assert tokens - 16 == pytest.approx(room_ms / COST.prompt_ms, abs=3)


def test_a_lower_target_leaves_a_smaller_chunk_and_the_smallest_at_last() -> None:
    targets = (100.0, 60.0, 40.0, 5.0)
    sizes = [tokens_beside(create_steering(no_deadline(ms))) - 16 for ms in targets]
    assert sizes == sorted(sizes, reverse=True)
    assert len(set(sizes)) == 4
    assert sizes[-1] == MIN_CHUNK_TOKENS


def test_where_nobody_decodes_a_prompt_is_not_cut() -> None:
    assert tokens_beside(create_steering(no_deadline(44.0)), 0) == TOKENS


def test_drafts_are_no_part_of_the_chunk() -> None:
    alone = tokens_beside(create_steering(no_deadline(44.0)))
    drafting = create_steering(no_deadline(44.0), num_spec_tokens=3)
    assert tokens_beside(drafting) == alone + 3 * 16


def test_few_tokens_still_serve_all_decodes() -> None:
    assert tokens_beside(create_steering(no_deadline(44.0, tokens=8))) == 16 + 1


def test_the_first_steps_are_each_learnt_from_then_one_a_second() -> None:
    steering = Steering(Scheduler(), LIMITS, may_cut=True, may_hold=True)
    models = [steering.learn(record(4, 32, 0.01 * step)) for step in range(200)]
    fitted = [step for step, model in enumerate(models) if model is not None]
    assert fitted[:32] == list(range(32))
    assert all(later - sooner >= 100 * REFIT_S - 1 for sooner, later in pairwise(fitted[31:]))


# Held first tokens


@pytest.mark.parametrize("at_once", [1, 2])
@pytest.mark.parametrize("lookahead", [0, 3])
def test_a_burst_is_computed_but_for_its_end_and_then_let_go_at_once(
    at_once: int, lookahead: int
) -> None:
    steering = create_steering(num_prefill_lookahead=lookahead)
    requests = burst(16, 130)
    served = machine(steering, at_once=at_once).serve(requests)
    assert served.num_held
    firsts = {answer.tokens_s[0] for answer in served.answers.values()}
    assert len(firsts) == 1, "all in one step"
    assert max(firsts) <= TTFT_S
    assert all(len(answer.tokens_s) == 16 for answer in served.answers.values())


@pytest.mark.parametrize(
    ("limits", "may_hold"),
    [(LIMITS, False), (replace(LIMITS, policy="fcfs"), True), (replace(LIMITS, itl_ms=None), True)],
)
def test_nobody_is_held_where_none_may_be_or_nothing_is_won(
    limits: EngineLimits, may_hold: bool
) -> None:
    served = machine(create_steering(limits, may_hold=may_hold)).serve(burst(16, 130))
    assert not served.num_held


def test_a_share_of_the_deadline_bounds_the_hold() -> None:
    firsts = [
        machine(create_steering(replace(LIMITS, hold_share=share))).serve(burst(16, 130))
        for share in (1.0, 0.1)
    ]
    assert firsts[0].num_held
    assert not firsts[1].num_held


def test_a_queue_with_an_order_of_vllms_own_is_not_held() -> None:
    steering = create_steering()
    scheduler_of(steering).waiting = burst(16, 130)  # type: ignore[assignment]
    steering.prepare(0.0)
    assert not steering.division.held


def test_decodes_come_first_then_who_is_let_go_then_the_others_by_deadline() -> None:
    steering = create_steering()
    scheduler = scheduler_of(steering)
    soon = SimpleNamespace(extra_args={"sluice_ttft_ms": 900})
    others = [Request(str(i), 170, 50, is_prefill_chunk=True) for i in range(14)]
    others[5].sampling_params = soon
    ending = Request("ending", 130, 129, is_prefill_chunk=True)
    late = Request("late", 130, 50, is_prefill_chunk=True, arrival_time=-9.0)
    decode = Request("decode", 50, 50, num_output_tokens=1)
    scheduler.running = [late, ending, *others, decode]
    steering.prepare(0.0)
    assert scheduler.running[0] is decode
    held = steering.division.held
    assert len(held) >= 14
    assert "late" not in held
    names = [request.request_id for request in scheduler.running]
    assert names.index("5") < names.index("0") < names.index("late")
    steering._scheduler.kv_cache_manager = SimpleNamespace(usage=0.99)
    steering.prepare(0.0)
    assert not steering.division.held, "the cache is full"
    assert scheduler.running[:2] == [decode, ending]


@pytest.mark.parametrize(
    ("request_", "computed", "new", "may"),
    [
        (Request("h", 100, status=Status.RUNNING), 40, 60, 59),
        (Request("h", 100, status=Status.RUNNING), 99, 1, 0),
        (Request("h", 100, status=Status.RUNNING), 40, 20, 20),
        (Request("h", 100), 0, 100, 99),
        (Request("h", 1), 0, 1, 1),
        (Request("h", 100), 99, 1, 1),
        (Request("h", 100, max_tokens=1), 0, 100, 100),
        (Request("free", 100), 0, 100, 100),
    ],
    ids=["end", "held", "middle", "waits", "one token", "whole hit", "answer of one", "not held"],
)
def test_a_held_prompt_stops_before_its_end_but_one_that_waits_with_its_end_left_starts(
    request_: Request, computed: int, new: int, may: int
) -> None:
    steering = create_steering()
    steering.division = steering.division._replace(held=frozenset(["h"]))
    assert steering.trim(request_, computed, new) == may


def test_who_waits_with_blocks_is_counted_before_the_queue() -> None:
    """The second queue of vLLM 0.31 and later."""
    steering = create_steering()
    scheduler = scheduler_of(steering)
    first, *others = burst(CAP, 60)
    scheduler.kv_holding_waiting = deque([first])  # type: ignore[attr-defined]
    scheduler.waiting = deque([*others, Request("beyond the cap", 60)])
    steering.prepare(0.0)
    assert first.request_id in steering.division.held
    assert "beyond the cap" not in steering.division.held


def test_prompts_that_must_end_in_several_tokens_get_them_when_they_are_let_go() -> None:
    steering = create_steering(replace(LIMITS, itl_ms=5.0), num_prefill_lookahead=3)
    decodes = [Request(f"d{i}", 250, 250, num_output_tokens=1) for i in range(16)]
    ending = [Request(str(i), 130, 127, is_prefill_chunk=True) for i in range(16)]
    scheduler_of(steering).running = [*decodes, *ending]
    steering.law.held = frozenset(request.request_id for request in ending)
    steering.prepare(0.0)
    assert scheduler_of(steering).max_num_scheduled_tokens == 16 + 3 * 16


def test_after_a_stall_that_makes_them_late_all_are_let_go() -> None:
    steering = create_steering()
    stalled = machine(steering)
    stalled.stalls_ms = {0: 2e3 * TTFT_S}
    stalled.serve(burst(16, 130))
    assert stalled.num_held == 1
    ended_s = min(answer.tokens_s[0] for answer in stalled.answers.values())
    assert max(answer.tokens_s[0] for answer in stalled.answers.values()) <= ended_s + 0.2


def test_held_prompts_that_have_all_blocks_are_let_go_after_one_empty_step() -> None:
    steering = create_steering(num_blocks=95)  # ten prompts, which do not count as full
    served = machine(steering).serve(burst(16, 130))
    assert served.num_held
    assert served.scheduler.num_empty <= 1
    assert served.scheduler.usage == 0


@pytest.mark.parametrize(
    ("scheduled", "waits", "is_held"),
    [(0, False, False), (40, True, False), (40, False, True), (TOKENS, True, True)],
    ids=["nothing moves", "no blocks for who waits", "all run", "no tokens for who waits"],
)
def test_nobody_is_held_after_a_step_that_could_not_serve_all(
    scheduled: int, waits: bool, is_held: bool
) -> None:
    steering = create_steering()
    scheduler = scheduler_of(steering)
    scheduler.running = [Request(str(i), 130, 1, is_prefill_chunk=True) for i in range(15)]
    scheduler.waiting = deque(burst(1, 130) if waits else [])
    steering.prepare(0.0)
    assert steering.division.held
    numbers = {"0": scheduled} if scheduled else {}
    scheduler.requests = {"0": scheduler.running[0]}
    scheduler.max_num_scheduled_tokens = TOKENS
    output = SimpleNamespace(num_scheduled_tokens=numbers, total_num_scheduled_tokens=scheduled)
    steering.scheduled(output, 0.0)
    steering.ended(output, 0.0)
    steering.prepare(0.0)
    assert bool(steering.division.held) == is_held


def test_a_request_preempted_after_its_first_token_is_not_held() -> None:
    steering = create_steering()
    scheduler = scheduler_of(steering)
    back = Request("back", 130, num_output_tokens=4, num_preemptions=1, status=Status.PREEMPTED)
    scheduler.come(*burst(16, 130), back)
    steering.prepare(0.0)
    assert steering.division.held
    assert "back" not in steering.division.held


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.integers(1, 200), st.integers(1, 12), st.sampled_from([0.0, 0.3, 1.2]), st.booleans()
        ),
        min_size=1,
        max_size=40,
    ),
    st.integers(30, 200),
    st.sampled_from([1, 2]),
    st.sampled_from([0, 3]),
)
def test_every_request_is_answered_and_every_block_is_free_again(
    drawn: list[tuple[int, int, float, bool]], num_blocks: int, at_once: int, lookahead: int
) -> None:
    """Prompts of few tokens, whole hits, preemption, aborts of held ones, steps that overlap."""
    steering = create_steering(num_blocks=num_blocks, num_prefill_lookahead=lookahead)
    served = machine(steering, at_once=at_once)
    requests = [
        Request(
            str(i),
            prompt,
            arrival_time=at_s,
            max_tokens=num,
            num_cached=(prompt - 1) // 16 * 16 if is_hit else 0,
        )
        for i, (prompt, num, at_s, is_hit) in enumerate(drawn)
    ]
    served.aborts = 2
    served.serve(sorted(requests, key=lambda request: request.arrival_time))
    whole = {name for name, a in served.answers.items() if len(a.tokens_s) == a.request.max_tokens}
    assert whole >= {request.request_id for request in requests} - served.aborted
    assert served.scheduler.usage == 0
    assert served.scheduler.num_empty <= 2 * served.num_held + 2 * len(requests)
