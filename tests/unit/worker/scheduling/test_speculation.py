"""Drafts: what is looked up, when they are let loose, and what they may cost."""

from collections.abc import Sequence as Seq

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sluice_worker.base.config import NgramSpeculation
from sluice_worker.scheduling import drafts as drafts_module
from sluice_worker.scheduling.speculation import (
    INDEXED_PER_STEP,
    MAX_GROWTH,
    MIN_ACCEPTANCE,
    MIN_JUDGED_TOKENS,
    WINDOW_TOKENS,
    Drafter,
    draft_length,
    num_right,
)
from sluice_worker.scheduling.step import StepWork
from unit.worker.engine.factories import create_request, create_scheduler
from unit.worker.engine.virtual import FixedLaw, add, set_limits, step, unlimited, written

NGRAM = NgramSpeculation("ngram", 4, prompt_lookup_max=4, prompt_lookup_min=2)


def seen(token_ids: list[int], config: NgramSpeculation = NGRAM) -> Drafter:
    """A drafter that was right before, so that it drafts as much as it may."""
    drafter = Drafter(config)
    for _ in range(3):
        drafter.judge(1, 1)
    drafter.see(token_ids)
    return drafter


def test_what_followed_the_same_words_last_is_drafted() -> None:
    text = [1, 2, 3, 4, 9, 1, 2, 3, 5, 6, 7, 8, 1, 2, 3]
    assert seen(text).draft(text, 4) == (5, 6, 7, 8)
    assert seen(text).draft(text, 2) == (5, 6)


def test_the_longest_match_wins() -> None:
    text = [9, 2, 3, 4, 1, 2, 3, 5, 0, 0, 9, 2, 3]
    assert seen(text).draft(text, 1) == (4,)


def test_a_loop_is_drafted_past_the_end_of_the_text() -> None:
    text = [5, 6, 7, 5, 6, 7, 5]
    assert seen(text).draft(text, 4) == (6, 7, 5, 6)


def test_nothing_is_drafted_for_words_that_are_new() -> None:
    text = [1, 2, 3, 4, 5, 6]
    assert seen(text).draft(text, 4) == ()


def test_a_long_prompt_is_looked_through_over_several_steps() -> None:
    text = [0, 1] * INDEXED_PER_STEP
    drafter = seen(text)
    assert drafter.draft(text, 4) == ()
    drafter.see(text)
    assert drafter.draft(text, 4) == (0, 1, 0, 1)


def test_a_copy_is_followed_through_a_changed_word() -> None:
    phrase = list(range(10, 30))
    drafter = seen([*phrase, 0, *phrase[:5]])
    text = [*phrase, 0, *phrase[:5], 99]
    drafter.see(text)
    assert drafter.draft(text, 2) == ()  # the change itself is like nothing before
    text.append(phrase[6])
    drafter.see(text)
    assert drafter.draft(text, 2) == tuple(phrase[7:9])


def test_a_wrong_draft_makes_the_next_one_short_and_right_ones_make_it_grow() -> None:
    text = [1, 2, 3] * 4
    drafter = seen(text, NgramSpeculation("ngram", 16, 3, 2))
    lengths = []
    for accepted in (0, 2, 4, 8, 3, 2):
        drafted = drafter.draft(text, 64)
        drafter.judge(len(drafted), accepted)
        lengths.append(len(drafted))
    assert lengths == [16, 2, 4, 8, 16, 2]


@given(st.lists(st.integers(0, 2), min_size=1, max_size=60), st.integers(1, 8))
def test_a_draft_is_what_follows_an_earlier_occurrence(text: list[int], most: int) -> None:
    drafter = seen(text, NgramSpeculation("ngram", 8, 3, 1))
    drafts = drafter.draft(text, most)
    assert len(drafts) in (0, min(most, 8))
    size = next((n for n in (3, 2, 1) if occurs_before(text, n)), 0)
    assert bool(drafts) == bool(size)
    if drafts:
        whole = [*text, *drafts]
        starts = [i for i in range(size, len(text)) if text[i - size : i] == text[-size:]]
        start = max(starts)
        assert whole[len(text) :] == whole[start : start + len(drafts)]


def occurs_before(text: list[int], size: int) -> bool:
    starts = range(size, len(text))
    return len(text) >= size and any(text[i - size : i] == text[-size:] for i in starts)


def test_a_request_speculates_only_over_80_percent_of_the_last_drafts() -> None:
    drafter = Drafter(NGRAM)
    assert not drafter.is_on
    for _ in range(MIN_JUDGED_TOKENS // 4 - 1):
        drafter.judge(4, 4)
    assert not drafter.is_on  # too few to tell
    drafter.judge(4, 4)
    assert drafter.is_on
    for _ in range(WINDOW_TOKENS // 4):
        drafter.judge(4, 4)
    drafter.judge(4, 0)
    assert drafter.is_on  # 28 of 32
    drafter.judge(4, 0)
    assert not drafter.is_on  # 24 of 32
    for _ in range(WINDOW_TOKENS // 4):
        drafter.judge(4, 4)
    assert drafter.is_on  # what was long ago does not count


@given(st.lists(st.tuples(st.integers(1, 8), st.integers(0, 8)), max_size=40))
def test_the_window_is_of_the_last_drafts_and_never_under_its_size(
    drafts: list[tuple[int, int]],
) -> None:
    drafter = Drafter(NGRAM)
    judged = [(drafted, min(drafted, accepted)) for drafted, accepted in drafts]
    for drafted, accepted in judged:
        drafter.judge(drafted, accepted)
    window: list[tuple[int, int]] = []
    for pair in reversed(judged):
        if sum(drafted for drafted, _ in window) >= WINDOW_TOKENS:
            break
        window.append(pair)
    total = sum(drafted for drafted, _ in window)
    share = sum(accepted for _, accepted in window) / max(total, 1)
    assert drafter.is_on == (total >= MIN_JUDGED_TOKENS and share > MIN_ACCEPTANCE)


def test_probes_notice_a_copy_without_a_single_draft_being_verified() -> None:
    phrase = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3, 8, 4]
    text = [*phrase, 100, 101]
    drafter = seen(text)
    for token in [*phrase, 102, 103, 104]:
        text.append(token)
        drafter.see(text)
    assert drafter.is_on  # compared with what came, and right
    for token in range(110, 130):
        text.append(token)
        drafter.see(text)
    assert drafter.is_on  # nothing to look up, nothing to be wrong about
    for token in range(130, 150):
        text += phrase[2:4]
        drafter.see(text)
        text.append(token)
        drafter.see(text)
    assert not drafter.is_on


@given(st.integers(1, 8), st.integers(1, 16), st.floats(0.0, 0.5))
def test_drafts_are_as_long_as_pays_and_no_step_more_than_doubles(
    most: int, decodes: int, per_row: float
) -> None:
    length = draft_length(most, decodes, decodes, lambda drafted: 1 + per_row * drafted)
    assert 0 <= length <= most
    assert length == 0 or 1 + per_row * length * decodes <= MAX_GROWTH
    if per_row == 0:
        assert length == most


def test_a_compute_bound_step_carries_no_draft() -> None:
    assert draft_length(8, 16, 16, lambda drafted: (16 + drafted) / 16) == 0


def test_the_right_ones_are_the_leading_ones() -> None:
    assert num_right((1, 2, 3), [1, 2, 3, 4]) == 3
    assert num_right((1, 2, 3), [1, 9, 3, 4]) == 1
    assert num_right((1, 2), [None, 2, 3]) == 0


def test_sampled_requests_and_steps_with_prefill_carry_no_draft() -> None:
    scheduler = create_scheduler(cap=4, budget=64, max_model_len=400, speculation=NGRAM)
    greedy = create_request("greedy", [1, 2, 3] * 10, max_tokens=120)
    drawn = create_request("drawn", [1, 2, 3] * 10, max_tokens=120, temperature=0.7)
    add(scheduler, greedy)
    add(scheduler, drawn)
    while scheduler.counters.num_drafts < 5:
        planned, _ = step(scheduler)
        assert all(w.sequence.request_id == "greedy" for w in planned.works if w.drafts)
    add(scheduler, create_request("long", 200, max_tokens=2))
    while scheduler.running[-1].num_uncomputed_tokens != 1:
        planned, _ = step(scheduler)
        assert planned.num_draft_tokens == 0
        assert planned.num_prefill_tokens > 0
    while not step(scheduler)[0].num_draft_tokens:
        assert scheduler.has_work


class Counted(Drafter):
    """Counts the tokens that all of its kind have looked through."""

    num_indexed = 0

    def _index(self, token_ids: Seq[int], end: int) -> None:
        Counted.num_indexed += end - self._num_indexed
        super()._index(token_ids, end)


def test_long_prompts_share_what_is_looked_through_in_a_step_and_all_get_to_draft(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(drafts_module, "Drafter", Counted)
    scheduler = create_scheduler(
        num_blocks=1000, budget=1 << 20, max_model_len=2000, speculation=NGRAM
    )
    prompt = [1, 2, 3] * INDEXED_PER_STEP
    names = "abcdef"
    for name in names:
        add(scheduler, create_request(name, prompt, max_tokens=200))
    drafted: set[str] = set()
    while scheduler.has_work:
        before = Counted.num_indexed
        planned, _ = step(scheduler, growth=lambda *_: 1.0)
        own = sum(work.num_samples for work in planned.works)
        assert Counted.num_indexed - before <= INDEXED_PER_STEP + own
        drafted |= {work.sequence.request_id for work in planned.works if work.drafts}
    assert drafted == set(names)


def test_drafts_take_only_blocks_that_are_left_and_give_back_what_was_rejected() -> None:
    scheduler = create_scheduler(num_blocks=12, block_size=4, max_model_len=48, speculation=NGRAM)
    sequence = add(scheduler, create_request("a", [1, 2, 3] * 4, max_tokens=36))
    while scheduler.has_work:
        step(scheduler)
        held = len(sequence.block_ids)
        assert held <= -(-sequence.num_tokens // 4)
        assert scheduler.check_integrity() is None
    assert sequence.token_ids[12:] == written(sequence.request)
    assert scheduler.counters.num_preemptions == 0


def test_a_guess_takes_no_block_that_is_not_there() -> None:
    scheduler = create_scheduler(num_blocks=48, block_size=1, max_model_len=48, speculation=NGRAM)
    sequences = [
        add(scheduler, create_request(name, [1, 2, 3] * 4, max_tokens=36)) for name in "ab"
    ]
    while scheduler.has_work:
        step(scheduler)
        assert scheduler.check_integrity() is None
    assert scheduler.counters.num_preemptions > 0
    assert scheduler.counters.num_drafts > 0
    for sequence in sequences:
        assert sequence.token_ids[12:] == written(sequence.request)


LOOP = [1, 2, 3]


def sample_loop(works: Seq[StepWork]) -> list[int]:
    """As `sample`, of a model that writes the three over and over."""
    ends = [(work.start + work.num_tokens, work.num_samples) for work in works]
    return [LOOP[p % 3] for end, num in ends for p in range(end - num + 1, end + 1)]


def test_drafts_stay_within_the_budget_and_within_what_the_target_leaves() -> None:
    scheduler, asked = create_scheduler(cap=2, budget=64, speculation=NGRAM), set[int]()
    for name in "ab":
        add(scheduler, create_request(name, LOOP * 10, max_tokens=120))

    def growth(decodes: int, kv_tokens: int, drafted: int) -> float:
        assert (decodes, kv_tokens) == (2, sum(s.num_tokens for s in scheduler.running))
        asked.add(drafted)
        return 1.0

    planned = scheduler.schedule(0.0, unlimited, growth)
    while planned.num_draft_tokens < 8:
        scheduler.commit(planned, sample_loop(planned.works), 0.0)
        planned = scheduler.schedule(0.0, unlimited, growth)
    scheduler.commit(planned, sample_loop(planned.works), 0.0)
    set_limits(scheduler, 2, 6)
    planned = scheduler.schedule(0.0, unlimited, growth)
    assert (planned.num_decodes, planned.num_draft_tokens) == (2, 4)
    scheduler.commit(planned, sample_loop(planned.works), 0.0)
    assert asked == {4, 8}
    assert scheduler.schedule(0.0, FixedLaw(lambda *_: 0), growth).num_draft_tokens == 0


def test_no_guess_is_made_behind_the_last_token() -> None:
    scheduler = create_scheduler(speculation=NGRAM)
    add(scheduler, create_request("a", LOOP * 4, max_tokens=37))
    while scheduler.has_work:
        planned = scheduler.schedule(0.0, unlimited)
        assert all(work.start + work.num_tokens < 12 + 37 for work in planned.works)
        scheduler.commit(planned, sample_loop(planned.works), 0.0)
    assert scheduler.counters.num_drafts > 3


def test_blocks_of_guesses_that_were_wrong_are_given_back() -> None:
    scheduler = create_scheduler(num_blocks=100, block_size=1, max_model_len=100, speculation=NGRAM)
    sequence = add(scheduler, create_request("a", LOOP * 4, max_tokens=60))
    planned = scheduler.schedule(0.0, unlimited)
    while planned.num_draft_tokens < 4:
        scheduler.commit(planned, sample_loop(planned.works), 0.0)
        planned = scheduler.schedule(0.0, unlimited)
    assert len(sequence.block_ids) == sequence.num_tokens + 4
    scheduler.commit(planned, [9] * 5, 0.0)
    assert len(sequence.block_ids) == sequence.num_tokens
    assert scheduler.check_integrity() is None


def test_a_stop_token_that_was_guessed_right_is_the_last_one() -> None:
    scheduler = create_scheduler(speculation=NGRAM, eos=[3])
    sequence = add(scheduler, create_request("a", LOOP * 4, max_tokens=60, min_tokens=38))
    ended = []
    while scheduler.has_work:
        planned = scheduler.schedule(0.0, unlimited)
        (work,), sampled = planned.works, sample_loop(planned.works)
        outcomes = scheduler.commit(planned, sampled, 0.0)
        ended += [(outcome.token_id, outcome.finish_reason) for outcome in outcomes]
    assert 3 in work.drafts
    assert sampled[-1] != 3, "more was right behind it"
    assert ended == [(token, None) for token in sequence.token_ids[12:-1]] + [(3, "stop")]
    assert sequence.num_output_tokens == 39


def test_nan_of_a_later_draft_keeps_the_tokens_before_it_and_starts_over() -> None:
    """Kernels multiply some rows at a time: those before them stay sound, and right ones among them
    are spoiled by a wrong one behind."""
    scheduler = create_scheduler(speculation=NGRAM, block_size=4)
    sequence = add(scheduler, create_request("a", [1, 2, 3] * 4, max_tokens=60))
    planned, _ = step(scheduler)
    while not planned.num_draft_tokens:
        planned = scheduler.schedule(0.0, unlimited)
        (work,) = planned.works
        if not work.drafts:
            scheduler.commit(planned, [[1, 2, 3][len(sequence.token_ids) % 3]], 0.0)
    assert len(work.drafts) == 4
    right = list(work.drafts[:2])
    outcomes = scheduler.commit(planned, [*right, None, None, None], 0.0)
    assert [(o.token_id, o.finish_reason) for o in outcomes] == [(token, None) for token in right]
    assert list(scheduler.waiting) == [sequence]
    assert sequence.drafter is None
    assert scheduler.check_integrity() is None
    while scheduler.has_work:
        step(scheduler)
    assert sequence.num_output_tokens == 60


@pytest.mark.parametrize("own_token_is_nan", [False, True])
def test_nan_of_a_draft_clears_the_blocks_and_starts_over(own_token_is_nan: bool) -> None:
    """Also where it spread to the token that was no guess, as it does in kernels."""
    scheduler = create_scheduler(speculation=NGRAM, block_size=4)
    sequence = add(scheduler, create_request("a", [1, 2, 3] * 4, max_tokens=60))
    planned, _ = step(scheduler)
    while not planned.num_draft_tokens:
        scheduler.cache.take_dirty()
        planned = scheduler.schedule(0.0, unlimited)
        (work,) = planned.works
        if not work.drafts:
            token = [1, 2, 3][len(sequence.token_ids) % 3]
            scheduler.commit(planned, [token], 0.0)
    spoiled = sequence.block_ids[(work.start + 1) // 4 :]
    wrong = None if own_token_is_nan else (work.drafts[0] + 1) % 7
    outcomes = scheduler.commit(planned, [wrong, None, None, None, None], 0.0)
    assert [outcome.token_id for outcome in outcomes] == ([] if own_token_is_nan else [wrong])
    assert (sequence.drafter is None) == own_token_is_nan  # or it would be guessed again
    assert list(scheduler.waiting) == [sequence]
    assert set(spoiled) <= set(scheduler.cache.take_dirty())
    assert scheduler.counters.num_preemptions == 0
    assert scheduler.check_integrity() is None
    while scheduler.has_work:
        step(scheduler)
    assert sequence.num_output_tokens == 60
