"""Estimated tokens stay within what engines can do, whatever was told."""

import math

from hypothesis import given
from hypothesis import strategies as st
from sluice_gate.request.estimate import TokenSize

TOLD = st.integers(-(2**63), 2**63)


@given(st.lists(st.tuples(st.integers(0, 1 << 22), TOLD), max_size=9), st.integers(0, 1 << 26))
def test_no_text_has_more_than_two_tokens_a_byte_or_less_than_a_sixteenth(
    told: list[tuple[int, int]], num_bytes: int
) -> None:
    size = TokenSize()
    for each in told:
        size.learn(*each)
    assert num_bytes // 16 <= size.tokens(num_bytes) <= max(1, 2 * num_bytes)


def test_chats_of_few_counted_bytes_and_many_tokens_make_no_text_too_long() -> None:
    size = TokenSize()
    for _ in range(5):
        size.learn(30, 12_000)  # a hundred tools
    assert size.tokens(40_000) <= 80_000
    for _ in range(50):
        size.learn(40_000, 10_000)
    assert 9_500 < size.tokens(40_000) < 10_500


def test_what_was_told_lately_counts_most() -> None:
    size = TokenSize()
    for _ in range(100):
        size.learn(8_000, 1_000)
    for _ in range(400):
        size.learn(3_000, 1_000)
    assert 950 < size.tokens(3_000) < 1_050


def test_what_is_no_number_teaches_nothing_that_lasts() -> None:
    size = TokenSize()
    size.learn(100, math.nan)  # type: ignore[arg-type]
    assert size.tokens(100) > 0
