"""How decodes of different lengths share a padded gather."""

from hypothesis import given
from hypothesis import strategies as st
from sluice_kernels.plain import split


@given(pages=st.lists(st.integers(1, 300), max_size=64).map(sorted), max_pages=st.integers(1, 2000))
def test_groups_cover_all_and_padding_is_bounded(pages: list[int], max_pages: int) -> None:
    groups = split(pages, max_pages)
    assert [row for begin, end in groups for row in range(begin, end)] == list(range(len(pages)))
    for begin, end in groups:
        longest = pages[end - 1]
        assert longest <= 2 * pages[begin] + 2
        assert end - begin == 1 or longest * (end - begin) <= max_pages


def test_similar_lengths_share_one_group() -> None:
    assert split([1, 1, 2, 3, 4], 1000) == [(0, 5)]
    assert split([1, 1, 9, 10], 1000) == [(0, 2), (2, 4)]
    assert split([], 10) == []
