"""A decode step's batch as arrays. Pure: rows in, numpy out."""

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from sluice_core.model.sizing import blocks_for

from ..sampler import Draw, row_seed
from .rows import Row

Int64s = NDArray[np.int64]
Int32s = NDArray[np.int32]
Float32s = NDArray[np.float32]
NUM_FIELDS, NUM_SHARES = 7, 3
ROUND_ROWS = 16


@dataclass(frozen=True, slots=True)
class DecodeArrays:
    """One token for each row.

    fields [NUM_FIELDS, size]: token ids, sources, positions, blocks, slots, and the two of
    `draw_arrays`. Token id -1: the token that row `source` of the last step sampled. Block -1: no
    block. lengths [size], 0 for padding. shares [NUM_SHARES, size], from `draw_arrays`. tables
    [num_rows, num_pages], 0 behind a sequence's own pages. All are views of the bytes `packed`,
    at the slices that `spans` gives.
    """

    packed: NDArray[np.uint8]
    fields: Int64s
    lengths: Int32s
    shares: Float32s
    tables: Int32s


def spans(places: int) -> tuple[slice, slice, slice, slice]:
    """The slices of fields, lengths, shares and tables in a step's bytes, with room for `places`
    rows."""
    fields = 8 * NUM_FIELDS * places
    lengths = fields + 4 * places
    shares = lengths + 4 * NUM_SHARES * places
    return slice(0, fields), slice(fields, lengths), slice(lengths, shares), slice(shares, None)


def aligned_rows(num_rows: int) -> int:
    """`num_rows`, rounded up a little so that each field of a buffer is equally well aligned."""
    return -(-num_rows // ROUND_ROWS) * ROUND_ROWS


def draw_arrays(draws: Seq[Draw], size: int) -> tuple[Float32s, Int64s]:
    """Temperatures, top-p and min-p [NUM_SHARES, size], and top-k and seeds [2, size]. Padding
    draws the likeliest token, which needs no seed."""
    shares = np.zeros((NUM_SHARES, size), dtype=np.float32)
    numbers = np.zeros((2, size), dtype=np.int64)
    _fill(shares, numbers, draws)
    return shares, numbers


def decode_arrays(rows: Seq[Row], size: int, places: int, block_size: int) -> DecodeArrays:
    """`rows` padded to `size`, in arrays that have room for `places`."""
    num_pages = [blocks_for(row.position + 1, block_size) for row in rows]
    in_fields, in_lengths, in_shares, in_tables = spans(places)
    packed = np.zeros(in_tables.start + 4 * len(rows) * max(num_pages), dtype=np.uint8)
    fields = packed[in_fields].view(np.int64).reshape(NUM_FIELDS, places)
    lengths = packed[in_lengths].view(np.int32)
    shares = packed[in_shares].view(np.float32).reshape(NUM_SHARES, places)
    tables = packed[in_tables].view(np.int32).reshape(len(rows), -1)
    fields[3] = -1
    fields[:5, : len(rows)] = np.array([_place(row, block_size) for row in rows]).T
    lengths[: len(rows)] = fields[2, : len(rows)] + 1
    _fill(shares, fields[5:], [row.draw for row in rows])
    for at, (row, used) in enumerate(zip(rows, num_pages, strict=True)):
        tables[at, :used] = row.sequence.block_ids[:used]
    return DecodeArrays(packed, fields[:, :size], lengths[:size], shares[:, :size], tables)


def _place(row: Row, block_size: int) -> tuple[int, int, int, int, int]:
    """Token id, source, position, block and slot."""
    position = row.position
    token = row.sequence.token_ids[position] if row.source < 0 else -1
    return token, max(row.source, 0), position, row.block, position % block_size


def _fill(shares: Float32s, numbers: Int64s, draws: Seq[Draw]) -> None:
    """Write `draws` into the first columns."""
    temperatures = [0.0 if draw.is_greedy else draw.temperature for draw in draws]
    pairs = list(zip(temperatures, draws, strict=True))
    columns = slice(len(draws))
    found = [(temperature, draw.top_p, draw.min_p) for temperature, draw in pairs]
    shares[:, columns] = np.array(found, dtype=np.float32).T
    seeds = [row_seed(draw.seed, draw.index) if temperature else 0 for temperature, draw in pairs]
    numbers[0, columns], numbers[1, columns] = [draw.top_k for draw in draws], seeds
