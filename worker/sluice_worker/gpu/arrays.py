"""A decode step's batch as arrays. Pure: rows in, numpy out."""

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..sampler import Draw, row_seed
from ..sizing import blocks_for
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
    `draw_arrays`. A token id of -1 is what row `source` of the step before sampled; a block of -1
    is none. lengths [size], 0 for padding; shares [NUM_SHARES, size], as `draw_arrays` has them;
    tables [num_rows, num_pages], 0 behind a sequence's own pages.
    """

    fields: Int64s
    lengths: Int32s
    shares: Float32s
    tables: Int32s


def aligned_rows(num_rows: int) -> int:
    """`num_rows` or a few more, so that kernels find each field of a buffer as well aligned."""
    return -(-num_rows // ROUND_ROWS) * ROUND_ROWS


def draw_arrays(draws: Seq[Draw], size: int) -> tuple[Float32s, Int64s]:
    """Temperatures, top-p and min-p [NUM_SHARES, size], and top-k and seeds [2, size]; padded with
    draws of the likeliest."""
    shares = np.zeros((NUM_SHARES, size), dtype=np.float32)
    numbers = np.zeros((2, size), dtype=np.int64)
    for at, draw in enumerate(draws):
        temperature = 0.0 if draw.is_greedy else draw.temperature
        shares[:, at] = temperature, draw.top_p, draw.min_p
        numbers[:, at] = draw.top_k, row_seed(draw.seed, draw.index)
    return shares, numbers


def decode_arrays(rows: Seq[Row], size: int, block_size: int) -> DecodeArrays:
    """`rows` padded to `size`."""
    fields = np.zeros((NUM_FIELDS, size), dtype=np.int64)
    fields[3] = -1
    lengths = np.zeros(size, dtype=np.int32)
    shares, fields[5:] = draw_arrays([row.draw for row in rows], size)
    num_pages = [blocks_for(row.position + 1, block_size) for row in rows]
    tables = np.zeros((len(rows), max(num_pages)), dtype=np.int32)
    for at, (row, used) in enumerate(zip(rows, num_pages, strict=True)):
        position = row.position
        token = row.sequence.token_ids[position] if row.source < 0 else -1
        fields[:5, at] = token, max(row.source, 0), position, row.block, position % block_size
        lengths[at] = position + 1
        tables[at, :used] = row.sequence.block_ids[:used]
    return DecodeArrays(fields, lengths, shares, tables)
