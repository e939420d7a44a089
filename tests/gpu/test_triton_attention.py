"""Paged attention in Triton against attention written out in torch, on scattered pages."""

from collections.abc import Callable

import pytest
import torch
from gpu.paged import DEVICE, Heads, close, on_device, paged_cache, queries
from sluice_kernels.triton import decode as decode_module
from sluice_kernels.triton.attend import reference
from sluice_kernels.triton.decode import Splits, choose_splits, decode
from sluice_kernels.triton.prefill import cut_tiles, prefill, tile_tokens
from sluice_kernels.triton.texts import cut_texts, rows_per_tile, text_attention
from sluice_kernels.triton.texts import reference as texts_reference
from torch import Tensor

DTYPES = [torch.float32, torch.float16] + [torch.bfloat16] * torch.cuda.is_available()
GROUPED = Heads(num_heads=8, num_kv_heads=2, dim=16, page=16)
SEVEN = Heads(num_heads=7, num_kv_heads=1, dim=24, page=8)  # no power of two
SINGLE = Heads(num_heads=2, num_kv_heads=2, dim=64, page=64)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads", [GROUPED, SEVEN, SINGLE])
@pytest.mark.parametrize(
    ("lengths", "splits"),
    [
        ([1, 0, 64, 65], Splits(1, 1)),
        ([3, 0, 200], Splits(4, 1)),
        ([520, 64, 65, 0, 130, 129], Splits(8, 2)),  # two blocks each, but for the last
        ([700, 30], Splits(2, 16)),
    ],
)
def test_decode_equals_attention_written_out(
    heads: Heads, lengths: list[int], splits: Splits, dtype: torch.dtype
) -> None:
    check_decode(heads, lengths, splits, dtype, None, None)


@pytest.mark.parametrize("splits", [Splits(1, 1), Splits(4, 1), Splits(8, 2)])
@pytest.mark.parametrize(("window", "softcap"), [(70, None), (None, 1.5), (9, 0.7)])
def test_decode_honours_windows_and_caps(
    window: int | None, softcap: float | None, splits: Splits
) -> None:
    check_decode(GROUPED, [9, 10, 70, 200, 330], splits, torch.float32, window, softcap)


def check_decode(
    heads: Heads,
    lengths: list[int],
    splits: Splits,
    dtype: torch.dtype,
    window: int | None,
    softcap: float | None,
) -> None:
    cache, tables = paged_cache(heads, lengths, dtype)
    query, scale = queries(heads, len(lengths), dtype), heads.dim**-0.5
    found = decode(
        query, on_device(lengths, torch.int32), cache, tables, scale, window, softcap,
        splits=splits,
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


def test_splits_fill_the_processors_and_a_long_context_has_eight_in_any_batch() -> None:
    found = [choose_splits(n, 8, 132) for n in (1, 8, 16, 32, 64, 256)]
    numbers = [(32, 1), (16, 1), (8, 2), (8, 4), (8, 8), (8, 16)]
    assert found == [Splits(*both) for both in numbers]


def test_beside_short_contexts_a_long_one_is_read_by_eight_programs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What a split finds, it writes; those that the length does not need write nothing."""
    written: list[int] = []

    class Joined:
        def __getitem__(self, grid: tuple[int]) -> Callable[..., None]:
            def note(parts: Tensor, sums: Tensor, *_: object, **constants: object) -> None:
                written.extend((~sums[:, 0].isnan()).view(-1, 8).sum(1).tolist())

            return note

    lengths, heads = [1, 1024, 1025, 32768], Heads(num_heads=1, num_kv_heads=1, dim=16, page=16)
    cache, tables = paged_cache(heads, lengths, torch.float32)
    given = on_device(lengths, torch.int32), cache, tables, 0.25
    monkeypatch.setattr(decode_module, "_join", Joined())
    torch.use_deterministic_algorithms(True)  # fills what is not written with NaN
    try:
        decode(queries(heads, 4, torch.float32), *given, splits=choose_splits(128, 8, 132))
    finally:
        torch.use_deterministic_algorithms(False)
    assert written == [1, 1, 2, 8]


def test_a_query_that_is_no_row_of_heads_is_refused() -> None:
    cache, tables = paged_cache(GROUPED, [4], torch.float32)
    query = torch.zeros(1, 16, 8, device=DEVICE).transpose(1, 2)
    with pytest.raises(ValueError, match="heads must be contiguous"):
        decode(query, on_device([4], torch.int32), cache, tables, 1.0, splits=Splits(1, 1))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("window", "is_causal"), [(None, False), (5, False), (40, False), (None, True)]
)
def test_texts_behind_each_other_see_themselves_alone(
    window: int | None, is_causal: bool, dtype: torch.dtype
) -> None:
    lengths, num_heads, dim = [1, 2, 33, 64, 65, 150], 3, 24
    offsets = torch.tensor([0, *lengths]).cumsum(0)
    torch.manual_seed(0)
    qkv = torch.randn(sum(lengths), 3, num_heads, dim).to(DEVICE, dtype)
    tiles = cut_texts(offsets.tolist(), rows_per_tile(qkv.element_size()))
    found = text_attention(qkv, torch.from_numpy(tiles).to(DEVICE), window, is_causal=is_causal)
    for start, length in zip(offsets.tolist(), lengths, strict=False):
        part = slice(start, start + length)
        close(found[part], texts_reference(qkv[part], window, is_causal=is_causal))
