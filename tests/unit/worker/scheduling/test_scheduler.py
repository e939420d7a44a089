"""Who starts and who continues, without a model: every step samples the token 7."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sluice_core.latency import MIN_CHUNK_TOKENS
from sluice_core.port import EngineLimits
from sluice_core.wire import Submit
from sluice_core.work import Sampling
from sluice_worker.scheduling.scheduler import ALONE_TIMES, Scheduler
from sluice_worker.scheduling.sequence import Sequence
from sluice_worker.scheduling.step import BookedToken, Step
from unit.worker.engine.factories import Sliced, create_request, create_requests, create_scheduler
from unit.worker.engine.virtual import FixedLaw, unlimited


def add(scheduler: Scheduler, *requests: Submit, now: float = 0.0) -> list[Sequence]:
    sequences = [Sequence(request, seed=0) for request in requests]
    for sequence in sequences:
        assert scheduler.can_admit(sequence.request) is None
        scheduler.add(sequence, now)
    return sequences


def step(scheduler: Scheduler, now: float = 0.0) -> tuple[Step, list[BookedToken]]:
    planned = scheduler.schedule(now, unlimited)
    sampled = [7 for work in planned.works if work.samples]
    for work in planned.works:
        if work.sequence.needs_prompt_scores:  # as the runner does
            work.sequence.num_scored_tokens = work.start + work.num_tokens + 1
    return planned, scheduler.commit(planned, sampled, now)


def set_cap(scheduler: Scheduler, cap: int, budget: int = 48) -> None:
    scheduler.limits = EngineLimits(scheduler.limits.epoch + 1, cap, budget)


def test_decodes_come_first_and_prefill_takes_the_rest_of_the_budget() -> None:
    scheduler = create_scheduler(budget=48)
    add(scheduler, *create_requests((10, 100)))
    first, _ = step(scheduler)
    assert [work.num_tokens for work in first.works] == [10, 38]
    second, _ = step(scheduler)
    assert [work.num_tokens for work in second.works] == [1, 47]
    assert (second.num_decodes, second.num_prefill_tokens) == (1, 47)
    third, _ = step(scheduler)
    assert [(work.start, work.num_tokens, work.samples) for work in third.works] == [
        (11, 1, True),
        (85, 15, True),
    ]


def test_chunk_is_sized_for_the_inter_token_target_but_never_below_the_floor() -> None:
    scheduler = create_scheduler(budget=400, itl_ms=50.0)
    add(scheduler, *create_requests((10,)))
    scheduler.schedule(0.0, unlimited)
    scheduler.commit(scheduler.schedule(0.0, unlimited), [7], 0.0)
    add(scheduler, create_request("long", 300))
    assert scheduler.schedule(0.0, FixedLaw(lambda n, kv: 123)).num_prefill_tokens == 123
    assert (
        scheduler.schedule(0.0, FixedLaw(lambda n, kv: -5)).num_prefill_tokens == MIN_CHUNK_TOKENS
    )


def test_a_chunk_is_asked_for_with_all_that_decodes_and_the_context_that_it_reads() -> None:
    scheduler, asked = create_scheduler(budget=400), list[tuple[int, int]]()

    def limit(decodes: int, kv_tokens: int) -> int:
        asked.append((decodes, kv_tokens))
        return 200

    add(scheduler, *create_requests((10, 20)))
    step(scheduler)
    add(scheduler, create_request("long", 300))
    scheduler.schedule(0.0, FixedLaw(limit))
    assert asked == [(2, 11 + 21)]


def test_without_decodes_a_chunk_is_as_large_as_such_a_step_may_be() -> None:
    def limit(decodes: int, kv_tokens: int) -> int:
        return 1 if decodes or kv_tokens else 200

    scheduler = create_scheduler(budget=400, itl_ms=50.0)
    add(scheduler, create_request("long", 300))
    assert scheduler.schedule(0.0, FixedLaw(limit)).num_prefill_tokens == 200
    assert scheduler.schedule(0.0, unlimited).num_prefill_tokens == 300


def test_more_decodes_than_budget_starve_nobody() -> None:
    scheduler = create_scheduler(cap=4, budget=48)
    add(scheduler, *create_requests((5, 6, 7, 100)))
    step(scheduler)
    set_cap(scheduler, 4, budget=2)
    planned, _ = step(scheduler)
    assert (planned.num_decodes, len(planned.works)) == (4, 4)  # the last is a chunk of one


def test_cap_bounds_admission_in_order_of_arrival() -> None:
    scheduler = create_scheduler(cap=2)
    sequences = add(scheduler, *create_requests((3, 4, 5)))
    planned, _ = step(scheduler)
    assert scheduler.running == sequences[:2]
    assert (scheduler.num_waiting_for("cap"), scheduler.num_waiting_for("kv")) == (1, 0)
    assert planned.at_cap


@pytest.mark.parametrize(("num", "at_cap"), [(8, False), (9, True)])
def test_a_step_that_nearly_fills_the_cap_is_at_the_cap(num: int, at_cap: bool) -> None:
    scheduler = create_scheduler(cap=10, budget=200)
    add(scheduler, *create_requests(range(1, num + 1)))
    assert step(scheduler)[0].at_cap == at_cap


def test_whom_no_step_has_looked_at_waits_for_nothing_yet() -> None:
    scheduler = create_scheduler(cap=2)
    add(scheduler, *create_requests((3, 4)))
    assert (scheduler.num_waiting_for("cap"), scheduler.num_waiting_for("kv")) == (0, 0)


def test_who_comes_during_a_step_that_leaves_room_waits_for_nothing() -> None:
    scheduler = create_scheduler(cap=2)
    add(scheduler, create_request("a", 3))
    step(scheduler, now=0.0)
    (late,) = add(scheduler, create_request("b", 3), now=1.0)
    step(scheduler, now=5.0)
    assert (late.wait_cap_s, late.wait_kv_s) == (0.0, 0.0)


def test_lowering_the_cap_drains_and_never_kills() -> None:
    scheduler = create_scheduler(cap=4)
    sequences = add(scheduler, *create_requests((3, 4, 5, 6, 9), max_tokens=4))
    step(scheduler)
    set_cap(scheduler, 1)
    while scheduler.running != sequences[4:]:
        planned, _ = step(scheduler)
        assert planned.num_running in (4, 1)
    assert all(sequence.num_output_tokens == 4 for sequence in sequences[:4])


def test_raising_the_cap_takes_effect_at_the_next_step() -> None:
    scheduler = create_scheduler(cap=1)
    add(scheduler, *create_requests((3, 4, 5)))
    step(scheduler)
    set_cap(scheduler, 3)
    assert step(scheduler)[0].num_running == 3


def test_out_of_blocks_preempts_the_newest_and_loses_no_token() -> None:
    scheduler = create_scheduler(num_blocks=6, block_size=16, cap=2, max_model_len=96)
    old, new = add(
        scheduler,
        create_request("old", 30, max_tokens=40),
        create_request("new", 30, max_tokens=40),
    )
    while not scheduler.counters.num_preemptions:
        step(scheduler)
    assert scheduler.running == [old]
    assert list(scheduler.waiting) == [new]
    assert new.block_ids == []
    assert new.num_output_tokens > 0
    lost = new.num_lost_tokens
    assert lost == new.num_tokens - 1
    assert not scheduler.abort("new", if_waiting=True), "it has begun, though it waits"
    while scheduler.has_work:
        step(scheduler)
        assert scheduler.check_integrity() is None
    # What the prefix cache still had when it went on was not thrown away.
    assert scheduler.counters.preempted_tokens == lost - lost // 16 // 2 * 16
    assert new.cached_tokens == 0
    # It was its own: who comes back does not ask for anything.
    assert (scheduler.counters.prefix_queries, scheduler.counters.prefix_hits) == (60, 0)
    assert (old.num_output_tokens, new.num_output_tokens) == (40, 40)


def test_what_is_computed_again_from_its_beginning_is_found_as_that() -> None:
    """Not behind what it held before: whoever asks for both would get the KV of other positions."""
    scheduler = create_scheduler(num_blocks=6, block_size=16, cap=2, max_model_len=96)
    _, new = add(
        scheduler,
        create_request("old", 30, max_tokens=66),  # takes the whole pool
        create_request("new", 30, max_tokens=40),
    )
    while scheduler.has_work:
        step(scheduler)
    assert scheduler.counters.preempted_tokens > 30
    assert len(scheduler.pool.match([*new.token_ids, 0], "")) == (new.num_tokens - 1) // 16


def test_a_prompt_of_one_token_that_gives_way_in_the_step_that_was_to_compute_it_waits() -> None:
    scheduler = create_scheduler(
        num_blocks=4, block_size=1, budget=2, max_model_len=4, prefix_caching=False, policy="fcfs"
    )
    *_, short = add(
        scheduler,
        create_request("a", [1], max_tokens=2),
        create_request("b", [2], max_tokens=3),
        create_request("short", [3], max_tokens=1),
    )
    step(scheduler)
    assert short in scheduler.running
    planned = scheduler.schedule(0.0, unlimited)
    assert list(scheduler.waiting) == [short]
    assert short not in [work.sequence for work in planned.works]
    assert scheduler.check_integrity() is None


@pytest.mark.parametrize(("num_blocks", "fits"), [(4, 2), (200, 1)])
def test_who_starts_leaves_some_blocks_for_those_that_run(num_blocks: int, fits: int) -> None:
    """One, or a hundredth of them."""
    for num in (fits, fits + 1):
        scheduler = create_scheduler(num_blocks=num_blocks, budget=1 << 20, max_model_len=1 << 20)
        add(scheduler, create_request("first", 16 * (num_blocks - 3)))
        add(scheduler, create_request("next", 16 * num - 1))
        step(scheduler)
        assert (scheduler.num_waiting_for("kv"), len(scheduler.running)) == (
            (0, 2) if num == fits else (1, 1)
        )


def test_who_needs_the_whole_pool_starts_once_nobody_runs() -> None:
    scheduler = create_scheduler(num_blocks=2, block_size=2, max_model_len=4)
    _, whole = add(
        scheduler,
        create_request("a", [1], max_tokens=1),
        create_request("whole", [2, 3, 4], max_tokens=1),
    )
    step(scheduler)
    step(scheduler)
    assert whole.num_output_tokens == 1


def test_what_can_never_fit_is_refused_and_the_queue_moves_on() -> None:
    scheduler = create_scheduler(num_blocks=4, max_model_len=512)
    told = {
        "maximum context length": create_request("a", 500, max_tokens=13),
        "KV blocks": create_request("b", 60, max_tokens=5),
        "not in the vocabulary": create_request("c", [1, 2, 99999]),
    }
    for words, request in told.items():
        assert words in (scheduler.can_admit(request) or "")
    for bad in (create_request("d", []), create_request("f", 3, max_tokens=0)):
        assert "at least one token in and one out" in (scheduler.can_admit(bad) or "")
    assert "not in the vocabulary" in (scheduler.can_admit(create_request("g", [1, -1])) or "")
    assert scheduler.can_admit(create_request("e", 60, max_tokens=4)) is None


def test_waits_are_booked_to_what_was_lacking() -> None:
    scheduler = create_scheduler(num_blocks=4, cap=1, max_model_len=64)
    add(scheduler, create_request("a", 40, max_tokens=3), now=0.0)
    step(scheduler, now=1.0)
    (second,) = add(scheduler, create_request("b", 40, max_tokens=1), now=3.0)
    step(scheduler, now=5.0)
    set_cap(scheduler, 2)
    step(scheduler, now=8.0)  # "a" is done after this one, but held the blocks until then
    step(scheduler, now=12.0)
    assert (second.wait_cap_s, second.wait_kv_s) == (5.0, 4.0)


def test_who_waits_for_blocks_is_matched_again_only_once_there_may_be_enough(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    scheduler = create_scheduler(num_blocks=24, block_size=4, budget=512, max_model_len=96)
    (first, last) = add(scheduler, *create_requests((48, 64), max_tokens=16))
    num_matched, match = 0, scheduler.pool.match

    def counted(token_ids: list[int], salt: str) -> list[int]:
        nonlocal num_matched
        num_matched += token_ids is last.token_ids
        return match(token_ids, salt)

    monkeypatch.setattr(scheduler.pool, "match", counted)
    num_steps = 0
    while last in scheduler.waiting:
        step(scheduler)
        num_steps += 1
    assert first not in scheduler.running
    # The first look, one after the other's prompt was sealed, and one as it starts.
    assert (num_steps, num_matched) == (17, 3)


def test_waste_is_what_no_token_will_have_of_the_blocks_that_are_used() -> None:
    scheduler = create_scheduler(block_size=16)
    assert scheduler.cache.rounding_waste(scheduler.running) == 0.0
    add(scheduler, *create_requests((14, 20)))
    step(scheduler)
    assert scheduler.cache.rounding_waste(scheduler.running) == (1 + 11) / 48


def test_prefix_hit_is_not_computed_again_and_counted() -> None:
    scheduler = create_scheduler(cap=1)
    prompt = list(range(40))
    add(scheduler, create_request("a", prompt, max_tokens=2))
    while scheduler.has_work:
        step(scheduler)
    (second,) = add(scheduler, create_request("b", [*prompt, 5, 6], max_tokens=2))
    planned, _ = step(scheduler)
    assert (planned.works[0].start, planned.works[0].num_tokens) == (32, 10)
    assert second.cached_tokens == 32
    assert (scheduler.counters.prefix_queries, scheduler.counters.prefix_hits) == (82, 32)


def test_prompts_that_are_scored_come_in_small_parts_beside_others() -> None:
    scored = Sampling(prompt_logprobs=1)
    scheduler = create_scheduler(num_blocks=256, budget=2048, max_model_len=2048, scored_at_once=64)
    add(scheduler, create_request("alone", 2000, max_tokens=20, sampling=scored))
    planned, _ = step(scheduler)
    assert planned.num_prefill_tokens == ALONE_TIMES * 64, "nobody's next token is held up"
    step(scheduler)
    _, *others = add(
        scheduler,
        create_request("plain", 500),
        create_request("first", 100, sampling=scored),
        create_request("second", 100, sampling=scored),
    )
    parts = []
    while any(not other.num_output_tokens for other in others):
        planned, _ = step(scheduler)
        parts.append({work.sequence.request_id: work.num_tokens for work in planned.works})
        assert planned.scores_prompts
    assert parts == [
        {"alone": 1, "plain": 500, "first": 64},
        {"alone": 1, "plain": 1, "first": 36, "second": 28},
        {"alone": 1, "plain": 1, "first": 1, "second": 64},
        {"alone": 1, "plain": 1, "first": 1, "second": 8},
    ]
    planned, _ = step(scheduler)
    assert not planned.scores_prompts
    assert scheduler.counters.prefix_queries == 500, "only the plain one asked for anything"
    assert scheduler.check_integrity() is None


def test_a_prompt_is_scored_also_where_there_is_hardly_room_for_one_row_of_logits() -> None:
    scheduler = create_scheduler(scored_at_once=0)
    (scored,) = add(scheduler, create_request("a", 9, sampling=Sampling(prompt_logprobs=1)))
    step(scheduler)
    assert scored.num_computed_tokens > 0


def prefilled(scheduler: Scheduler, *requests: Submit) -> list[int]:
    """Prompt tokens that each step computed until all have their first token."""
    sequences, computed = add(scheduler, *requests), []
    while not all(sequence.num_output_tokens for sequence in sequences):
        planned, _ = step(scheduler)
        computed.append(
            sum(w.num_tokens for w in planned.works if w.sequence.num_output_tokens < 2)
        )
        assert scheduler.check_integrity() is None
    return computed


def test_a_prefix_that_a_burst_shares_is_computed_once() -> None:
    prompt = list(range(40))
    requests = [create_request(name, [*prompt, *range(i, i + 5)], max_tokens=9)
                for i, name in enumerate("abcd")]  # fmt: skip
    scheduler = create_scheduler(cap=4, budget=200)
    assert prefilled(scheduler, *requests)[0] == 45
    assert scheduler.counters.prefix_hits == 3 * 32
    apart = create_scheduler(cap=4, budget=200, prefix_caching=False)
    assert prefilled(apart, *requests)[0] == 4 * 45
    assert apart.counters.prefix_queries == 0


def test_others_are_served_while_the_followers_of_a_prefix_wait() -> None:
    prompt = list(range(40))
    requests = [create_request("a", [*prompt, 1]), create_request("b", [*prompt, 2]),
                create_request("other", list(range(100, 150))),
                create_request("salted", [*prompt, 3], salt="x")]  # fmt: skip
    scheduler = create_scheduler(cap=4, budget=200)
    a, b, other, salted = add(scheduler, *requests)
    step(scheduler)
    assert [s.num_output_tokens for s in (a, b, other, salted)] == [1, 0, 1, 1]
    step(scheduler)
    assert (b.num_output_tokens, b.cached_tokens, salted.cached_tokens) == (1, 32, 0)


def test_no_hit_across_salts() -> None:
    scheduler = create_scheduler(cap=1)
    prompt = list(range(40))
    add(scheduler, create_request("a", prompt, max_tokens=2, salt="x"))
    while scheduler.has_work:
        step(scheduler)
    (other,) = add(scheduler, create_request("b", prompt, max_tokens=2, salt="y"))
    step(scheduler)
    assert other.cached_tokens == 0


def test_non_finite_row_fails_alone_and_is_neither_cached_nor_left_dirty() -> None:
    scheduler = create_scheduler(cap=2)
    bad, good = add(scheduler, *create_requests((20, 21)))
    planned = scheduler.schedule(0.0, unlimited)
    blocks = list(bad.block_ids)
    outcomes = scheduler.commit(planned, [None, 7], 0.0)
    assert [outcome.finish_reason for outcome in outcomes] == ["error", None]
    assert scheduler.running == [good]
    assert scheduler.pool.match(bad.token_ids, "") == []
    assert scheduler.cache.take_dirty() == blocks
    assert scheduler.cache.take_dirty() == []


def fail(scheduler: Scheduler, bad: Sequence) -> None:
    """A step whose logits for `bad` are not finite."""
    planned = scheduler.schedule(0.0, unlimited)
    works = [work for work in planned.works if work.samples]
    scheduler.commit(planned, [None if work.sequence is bad else 7 for work in works], 0.0)
    assert scheduler.check_integrity() is None


def test_what_was_sound_before_a_non_finite_row_is_found_no_more() -> None:
    scheduler, prompt = create_scheduler(budget=100), list(range(64))
    (bad,) = add(scheduler, create_request("bad", prompt, max_tokens=20))
    step(scheduler)
    blocks = list(bad.block_ids)
    assert scheduler.pool.match([*prompt, 1], "") == blocks[:4]
    fail(scheduler, bad)
    assert scheduler.pool.match([*prompt, 1], "") == []
    assert set(blocks) <= set(scheduler.cache.take_dirty())


def test_of_a_non_finite_row_what_another_sequence_shares_is_neither_cleared_nor_lost() -> None:
    scheduler, prompt = create_scheduler(budget=100), list(range(64))
    good, bad = add(
        scheduler,
        create_request("good", prompt, max_tokens=20),
        create_request("bad", [*prompt, 5, 6], max_tokens=20),
    )
    step(scheduler)
    step(scheduler)
    shared, own = bad.block_ids[:4], bad.block_ids[4:]
    assert good.block_ids[:4] == shared
    assert bad.num_output_tokens
    fail(scheduler, bad)
    dirty = scheduler.cache.take_dirty()
    assert set(own) <= set(dirty)
    assert not set(shared) & set(dirty)
    assert scheduler.pool.match([*prompt, 1], "") == shared


def test_of_a_prompt_that_is_given_up_only_what_was_written_is_cleared() -> None:
    scheduler = create_scheduler(num_blocks=64, block_size=16, budget=40)
    (long,) = add(scheduler, create_request("long", 500))
    step(scheduler)
    assert (long.num_computed_tokens, len(long.block_ids)) == (40, 32)
    written = long.block_ids[:3]
    scheduler.abort("long")
    assert scheduler.cache.take_dirty() == written


def test_what_a_step_ahead_writes_has_a_block_from_the_start_and_is_cleared_as_well() -> None:
    scheduler = create_scheduler(block_size=16, budget=48, num_ahead=1)
    (long,) = add(scheduler, create_request("long", 160))
    step(scheduler)
    assert (long.num_computed_tokens, len(long.block_ids)) == (48, 11)
    written = long.block_ids[:4]
    scheduler.abort("long")
    assert scheduler.cache.take_dirty() == written


def test_of_a_prompt_that_is_given_up_what_the_prefix_cache_gave_is_not_cleared() -> None:
    scheduler, prompt = create_scheduler(budget=100), list(range(64))
    add(scheduler, create_request("before", prompt, max_tokens=1))
    step(scheduler)
    (long,) = add(scheduler, create_request("long", [*prompt, *range(64, 190)]))
    step(scheduler)
    assert (long.cached_tokens, long.num_computed_tokens, long.num_output_tokens) == (64, 164, 0)
    found, written = long.block_ids[:4], long.block_ids[4:11]
    scheduler.abort("long")
    assert scheduler.cache.take_dirty() == written
    assert scheduler.pool.match([*prompt, 1], "") == found


def test_who_comes_with_a_burst_is_looked_up_once_in_the_step_that_admits_it() -> None:
    prompt = list(range(64))
    scheduler = create_scheduler(cap=8, budget=512)
    add(scheduler, create_request("before", prompt, max_tokens=1))
    step(scheduler)
    sequences = add(scheduler, *(create_request(str(i), [*prompt, i]) for i in range(4)))
    for sequence in sequences:
        sequence.token_ids = Sliced(sequence.request.prompt_token_ids)
    scheduler.schedule(0.0, unlimited)
    assert [sequence.num_computed_tokens for sequence in sequences] == [64] * 4
    assert isinstance(sequences[0].token_ids, Sliced)
    assert sequences[0].token_ids.num_slices == 4, "one look for each block, and no comparison"


def test_stop_tokens_end_a_sequence_only_after_min_tokens() -> None:
    scheduler = create_scheduler(eos=[7])
    plain, ignoring, patient, custom = add(
        scheduler,
        create_request("a", 3),
        create_request("b", 3, ignore_eos=True, max_tokens=3),
        create_request("c", 3, min_tokens=3),
        create_request("d", 3, ignore_eos=True, stop_token_ids=[7], max_tokens=9),
    )
    assert patient.forbidden_tokens(frozenset([7])) == [7]
    reasons = {}
    while scheduler.has_work:
        for outcome in step(scheduler)[1]:
            if outcome.finish_reason:
                sequence = outcome.sequence
                reasons[sequence.request_id] = (outcome.finish_reason, sequence.num_output_tokens)
    assert reasons == {"a": ("stop", 1), "b": ("length", 3), "c": ("stop", 3), "d": ("stop", 1)}


Action = tuple[str, int, int]
ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.integers(1, 40), st.integers(1, 12)),
        st.tuples(st.just("abort"), st.integers(0, 30), st.just(0)),
        st.tuples(st.just("cap"), st.integers(1, 8), st.integers(1, 64)),
        st.tuples(st.just("step"), st.integers(1, 4), st.just(0)),
    ),
    max_size=60,
)


@given(actions=ACTIONS, num_blocks=st.integers(13, 30), caching=st.booleans())
@settings(max_examples=150)
def test_random_adds_aborts_and_caps_leak_no_block_and_lose_no_request(
    actions: list[Action], num_blocks: int, caching: bool
) -> None:
    scheduler = create_scheduler(
        num_blocks=num_blocks, block_size=4, max_model_len=52, prefix_caching=caching
    )
    live: dict[str, Sequence] = {}
    for number, (kind, first, second) in enumerate(actions):
        if kind == "add":
            prompt = [(first + i) % 5 for i in range(first)]
            request = create_request(str(number), prompt, max_tokens=second)
            (live[str(number)],) = add(scheduler, request)
        elif kind == "abort":
            assert scheduler.abort(str(first)) == (live.pop(str(first), None) is not None)
        elif kind == "cap":
            set_cap(scheduler, first, second)
        else:
            for _ in range(first):
                run_checked_step(scheduler, live)
    set_cap(scheduler, 4)
    for _ in range(3000):
        if not live:
            break
        run_checked_step(scheduler, live)
    assert not live
    assert not scheduler.has_work
    assert scheduler.pool.num_used == 0


def run_checked_step(scheduler: Scheduler, live: dict[str, Sequence]) -> None:
    budget = scheduler.limits.max_num_batched_tokens
    planned, outcomes = step(scheduler)
    assert planned.num_decodes + planned.num_prefill_tokens <= max(budget, planned.num_decodes + 1)
    assert len({id(work.sequence) for work in planned.works}) == len(planned.works)
    assert all(work.num_tokens for work in planned.works)
    for outcome in outcomes:
        if outcome.finish_reason:
            ended = live.pop(outcome.sequence.request_id)
            assert ended.num_output_tokens == ended.request.max_tokens
    assert scheduler.check_integrity() is None
