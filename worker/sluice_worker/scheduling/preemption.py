"""Whom to preempt when the KV blocks run out: the sequence that is cheapest to compute again. Pure.

The oldest that runs is never chosen, so it runs to its end whatever the others do. Running and
waiting sequences are both kept in order of arrival, so every request gets there in time.
"""

from collections.abc import Sequence as Seq
from itertools import takewhile

from .blocks import BlockPool
from .sequence import Sequence


def recompute_tokens(sequence: Sequence, pool: BlockPool) -> int:
    """Computed tokens of `sequence` that would be lost if it gave its blocks back now.

    Blocks of its prefix that others use as well stay, and would be found again. Those that only the
    prefix cache would keep are not counted on: they are what the next allocations take.
    """
    shared = takewhile(lambda block: pool.num_owners(block) > 1, sequence.block_ids)
    kept = sum(1 for _ in shared) * pool.block_size
    return max(sequence.num_computed_tokens - kept, 0)


def choose_victim(running: Seq[Sequence], pool: BlockPool) -> Sequence:
    """The cheapest of `running`, oldest first, but that one; of equals the newest.

    Whoever would free no block, because all of its blocks are shared, is taken only last.
    """
    candidates = running[1:]
    useful = [sequence for sequence in candidates if _frees_a_block(sequence, pool)]
    return min(
        useful or candidates,
        key=lambda sequence: (recompute_tokens(sequence, pool), -sequence.order),
    )


def _frees_a_block(sequence: Sequence, pool: BlockPool) -> bool:
    # From the end: shared blocks are those of a common beginning.
    return any(pool.num_owners(block) == 1 for block in reversed(sequence.block_ids))
