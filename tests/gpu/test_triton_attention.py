"""Paged attention in Triton against attention written out in torch, on scattered pages."""

import pytest
import torch
from sluice_kernels.triton.attend import reference
from sluice_kernels.triton.decode import choose_splits, decode
from sluice_kernels.triton.prefill import cut_tiles, prefill, tile_tokens

from .paged import DEVICE, Heads, close, on_device, paged_cache, queries

DTYPES = [torch.float32, torch.float16] + [torch.bfloat16] * torch.cuda.is_available()
GROUPED = Heads(num_heads=8, num_kv_heads=2, dim=16, page=16)
SEVEN = Heads(num_heads=7, num_kv_heads=1, dim=24, page=8)  # no power of two
SINGLE = Heads(num_heads=2, num_kv_heads=2, dim=64, page=64)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads", [GROUPED, SEVEN, SINGLE])
@pytest.mark.parametrize(("lengths", "num_splits"), [([1, 0, 64, 65], 1), ([3, 0, 200], 4)])
def test_decode_equals_attention_written_out(
    heads: Heads, lengths: list[int], num_splits: int, dtype: torch.dtype
) -> None:
    check_decode(heads, lengths, num_splits, dtype, None, None)


@pytest.mark.parametrize("num_splits", [1, 4])
@pytest.mark.parametrize(("window", "softcap"), [(70, None), (None, 1.5), (9, 0.7)])
def test_decode_honours_windows_and_caps(
    window: int | None, softcap: float | None, num_splits: int
) -> None:
    check_decode(GROUPED, [9, 10, 70, 200], num_splits, torch.float32, window, softcap)


def check_decode(
    heads: Heads,
    lengths: list[int],
    num_splits: int,
    dtype: torch.dtype,
    window: int | None,
    softcap: float | None,
) -> None:
    cache, tables = paged_cache(heads, lengths, dtype)
    query, scale = queries(heads, len(lengths), dtype), heads.dim**-0.5
    found = decode(
        query, on_device(lengths, torch.int32), cache, tables, scale, window, softcap,
        num_splits=num_splits,
    )  # fmt: skip
    for row, length in enumerate(lengths):
        expected = torch.zeros_like(query[row])
        if length:
            given = (cache, tables[row], length - 1, scale, window, softcap)
            expected = reference(query[row : row + 1], *given)[0]
        close(found[row], expected.flatten())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads", [GROUPED, SEVEN, SINGLE])
def test_prefill_equals_attention_written_out(heads: Heads, dtype: torch.dtype) -> None:
    check_prefill(heads, [(0, 1), (0, 70), (3, 40), (64, 2), (130, 33)], dtype, None, None)


@pytest.mark.parametrize(("window", "softcap"), [(70, None), (None, 1.5), (9, 0.7)])
def test_prefill_honours_windows_and_caps(window: int | None, softcap: float | None) -> None:
    check_prefill(GROUPED, [(0, 75), (128, 65)], torch.float32, window, softcap)


def check_prefill(
    heads: Heads,
    spans: list[tuple[int, int]],
    dtype: torch.dtype,
    window: int | None,
    softcap: float | None,
) -> None:
    """Chunks (start, count) behind two rows of something else, which stay untouched."""
    cache, tables = paged_cache(heads, [start + count for start, count in spans], dtype)
    begins = [2 + sum(count for _, count in spans[:n]) for n in range(len(spans) + 1)]
    query, scale = queries(heads, begins[-1], dtype), heads.dim**-0.5
    chunks = [(n, begins[n], *span) for n, span in enumerate(spans)]
    tiles = on_device(
        cut_tiles(chunks, tile_tokens(heads.num_heads // heads.num_kv_heads, cache)), torch.int32
    )
    found = prefill(query, tiles, cache, tables, scale, window, softcap)
    for row, first, start, count in chunks:
        part = query[first : first + count]
        expected = reference(part, cache, tables[row], start, scale, window, softcap)
        close(found[first : first + count], expected.flatten(1))


def test_tiles_cover_each_chunk_once_and_the_longest_past_comes_first() -> None:
    tiles = cut_tiles([(0, 5, 100, 33), (1, 38, 0, 16)], 16).tolist()
    assert tiles == [[0, 37, 132, 1], [0, 21, 116, 16], [0, 5, 100, 16], [1, 38, 0, 16]]
    assert cut_tiles([], 16).shape == (0, 4)


def test_splits_fill_the_processors_and_no_more() -> None:
    assert [choose_splits(n, 8, 132) for n in (1, 8, 32, 256)] == [32, 16, 4, 1]


def test_a_query_that_is_no_row_of_heads_is_refused() -> None:
    cache, tables = paged_cache(GROUPED, [4], torch.float32)
    query = torch.zeros(1, 16, 8, device=DEVICE).transpose(1, 2)
    with pytest.raises(ValueError, match="heads must be contiguous"):
        decode(query, on_device([4], torch.int32), cache, tables, 1.0)
