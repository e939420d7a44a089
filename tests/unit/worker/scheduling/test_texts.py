"""Which texts a step takes: by budget, cap, length and age."""

from hypothesis import given
from hypothesis import strategies as st
from sluice_core.port import EngineLimits
from sluice_worker.scheduling.texts import AGE_S, TextQueue, WaitingText

LENGTHS = st.lists(st.integers(1, 300), min_size=1, max_size=60)


def queue_of(lengths: list[int], cap: int = 8, budget: int = 256) -> TextQueue:
    queue = TextQueue(EngineLimits(0, cap, budget))
    for number, length in enumerate(lengths):
        queue.add(WaitingText(str(number), [0] * length, 0, 0.0))
    return queue


def lengths_of(texts: list[WaitingText]) -> list[int]:
    return [len(text.token_ids) for text in texts]


@given(LENGTHS, st.integers(1, 20), st.integers(1, 400), st.floats(0, 2))
def test_each_text_is_taken_once_within_cap_and_budget(
    lengths: list[int], cap: int, budget: int, now_s: float
) -> None:
    queue, taken = queue_of(lengths, cap, budget), list[WaitingText]()
    while any(queue.counts):
        step = queue.take(now_s)
        assert 1 <= len(step) <= cap
        assert len(step) == 1 or sum(lengths_of(step)) <= budget
        assert lengths_of(step) == sorted(lengths_of(step))
        taken += step
    assert sorted(taken, key=lambda text: int(text.request_id)) == queue_texts(lengths)


def queue_texts(lengths: list[int]) -> list[WaitingText]:
    return [WaitingText(str(number), [0] * length, 0, 0.0) for number, length in enumerate(lengths)]


@given(LENGTHS, st.floats(0, 2))
def test_the_oldest_is_always_taken(lengths: list[int], now_s: float) -> None:
    assert "0" in [text.request_id for text in queue_of(lengths).take(now_s)]


def test_near_lengths_go_together_until_one_is_old() -> None:
    lengths = [10, 90, 11, 95, 12, 10]
    assert lengths_of(queue_of(lengths, cap=4).take(0.0)) == [10, 10, 11, 12]
    assert lengths_of(queue_of(lengths, cap=4).take(AGE_S)) == [10, 11, 90, 95]


def test_a_text_over_the_budget_goes_alone() -> None:
    queue = queue_of([300, 1, 1])
    assert lengths_of(queue.take(0.0)) == [300]
    assert lengths_of(queue.take(0.0)) == [1, 1]


def test_one_that_left_is_not_taken() -> None:
    queue = queue_of([5, 6])
    assert queue.remove("0")
    assert not queue.remove("0")
    assert lengths_of(queue.take(0.0)) == [6]


def test_background_texts_have_the_steps_for_which_no_other_waits() -> None:
    queue = TextQueue(EngineLimits(0, 4, 100))
    for name, is_background in (("b0", True), ("o", False), ("b1", True)):
        queue.add(WaitingText(name, [1], 0, 0.0, is_background=is_background))
    assert [text.request_id for text in queue.take(0.0)] == ["o"]
    assert queue.counts == (0, 2)
    assert queue.remove("b1")
    assert [text.request_id for text in queue.take(0.0)] == ["b0"]
    assert queue.take(0.0) == []
