"""A decode step's batch as arrays. Pure: rows in, numpy out."""

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..sampler import row_seed
from ..sizing import blocks_for
from .rows import Row

Int64s = NDArray[np.int64]
Int32s = NDArray[np.int32]
NUM_FIELDS = 6


@dataclass(frozen=True, slots=True)
class DecodeArrays:
    """One token for each row.

    fields [NUM_FIELDS, size]: token ids, sources, positions, blocks, slots, seeds. A token id of -1
    is what row `source` of the step before sampled; a block of -1 is none. lengths [size], 0 for
    padding; temperatures [size]; tables [num_rows, num_pages], 0 behind a sequence's own pages.
    """

    fields: Int64s
    lengths: Int32s
    temperatures: NDArray[np.float32]
    tables: Int32s


def decode_arrays(rows: Seq[Row], size: int, block_size: int) -> DecodeArrays:
    """`rows` padded to `size`."""
    fields = np.zeros((NUM_FIELDS, size), dtype=np.int64)
    fields[3] = -1
    lengths = np.zeros(size, dtype=np.int32)
    temperatures = np.zeros(size, dtype=np.float32)
    num_pages = [blocks_for(row.position + 1, block_size) for row in rows]
    tables = np.zeros((len(rows), max(num_pages)), dtype=np.int32)
    for at, (row, used) in enumerate(zip(rows, num_pages, strict=True)):
        position, draw = row.position, row.draw
        token = row.sequence.token_ids[position] if row.source < 0 else -1
        place = position, row.block, position % block_size
        fields[:, at] = token, max(row.source, 0), *place, row_seed(draw.seed, draw.index)
        lengths[at] = position + 1
        temperatures[at] = 0.0 if draw.is_greedy else draw.temperature
        tables[at, :used] = row.sequence.block_ids[:used]
    return DecodeArrays(fields, lengths, temperatures, tables)
