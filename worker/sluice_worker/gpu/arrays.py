"""A step's batch as arrays. Pure: numpy in, numpy out."""

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..sampler import row_seed
from ..sizing import blocks_for
from ..step import Work
from .rows import Row

Int64s = NDArray[np.int64]
Int32s = NDArray[np.int32]
NUM_FIELDS = 5


@dataclass(frozen=True, slots=True)
class DecodeArrays:
    """One token for each row. fields [NUM_FIELDS, size]: token ids, sources, positions, slots,
    seeds. A token id of -1 is what row `source` of the step before sampled; a slot of -1 is none.
    lengths [size], 0 for padding; temperatures [size]; tables [num_rows, num_pages].
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
    for at, row in enumerate(rows):
        token = row.sequence.token_ids[row.position] if row.source < 0 else -1
        slot = row.block * block_size + row.position % block_size
        fields[:, at] = token, max(row.source, 0), row.position, slot, draw_seed(row)
        lengths[at] = row.position + 1
        temperatures[at] = draw_temperature(row)
    tables = block_tables(
        [row.sequence.block_ids for row in rows],
        [blocks_for(row.position + 1, block_size) for row in rows],
    )
    return DecodeArrays(fields, lengths, temperatures, tables)


def draw_seed(row: Row) -> int:
    """What the noise of a row's draw is made of."""
    return row_seed(row.draw.seed, row.draw.index)


def draw_temperature(row: Row) -> float:
    """0 where the likeliest is taken."""
    return 0.0 if row.draw.is_greedy else row.draw.temperature


@dataclass(frozen=True, slots=True)
class MixedArrays:
    """Decodes first, then chunks. Per token: token_ids, positions, slots.

    lengths [num_decodes]; tables [num_works, num_pages]; chunks: (table, first row, position,
    count) of each work behind the decodes; sampled: the rows whose logits are wanted.
    """

    token_ids: Int64s
    positions: Int64s
    slots: Int64s
    lengths: Int32s
    tables: Int32s
    chunks: tuple[tuple[int, int, int, int], ...]
    sampled: Int64s


def mixed_arrays(works: Seq[Work], block_size: int) -> MixedArrays:
    """The batch of `works`, which are sorted: those of one token first."""
    positions, slots, chunks, begin = [], [], [], 0
    sampled: list[int] = []
    for at, work in enumerate(works):
        own = np.arange(work.start, work.start + work.num_tokens, dtype=np.int64)
        blocks = np.array(work.sequence.block_ids, dtype=np.int64)
        positions.append(own)
        slots.append(blocks[own // block_size] * block_size + own % block_size)
        if work.num_tokens > 1:
            chunks.append((at, begin, work.start, work.num_tokens))
        begin += work.num_tokens
        sampled += range(begin - work.num_samples, begin)
    return MixedArrays(
        token_ids=np.array([t for work in works for t in work.token_ids], dtype=np.int64),
        positions=np.concatenate(positions),
        slots=np.concatenate(slots),
        lengths=np.array([w.start + 1 for w in works if w.num_tokens == 1], dtype=np.int32),
        tables=block_tables(
            [work.sequence.block_ids for work in works],
            [blocks_for(work.start + work.num_tokens, block_size) for work in works],
        ),
        chunks=tuple(chunks),
        sampled=np.array(sampled, dtype=np.int64),
    )


def block_tables(block_ids: Seq[Seq[int]], num_pages: Seq[int]) -> Int32s:
    """The first `num_pages` blocks of each sequence, [len(block_ids), the most]; 0 behind them."""
    tables = np.zeros((len(block_ids), max(num_pages)), dtype=np.int32)
    for table, blocks, used in zip(tables, block_ids, num_pages, strict=True):
        table[:used] = blocks[:used]
    return tables
