"""The choice of a sequence to preempt when KV blocks run out: the cheapest to recompute. Pure.

The oldest running sequence is never chosen, so it always runs to its end. Running and waiting
sequences are both in order of arrival, so every request becomes the oldest in time.
"""

from collections.abc import Sequence as Seq
from itertools import takewhile

from .blocks import BlockPool
from .sequence import Sequence


def recompute_tokens(sequence: Sequence, pool: BlockPool) -> int:
    """Computed tokens of `sequence` that would be lost if it gave its blocks back now.

    Blocks of its prefix that others also use stay, and would be found again. Blocks that only the
    prefix cache would keep count as lost: the next allocations take them.
    """
    shared = takewhile(lambda block: pool.num_owners(block) > 1, sequence.block_ids)
    kept = sum(1 for _ in shared) * pool.block_size
    return max(sequence.num_computed_tokens - kept, 0)


def choose_victim(running: Seq[Sequence], pool: BlockPool) -> Sequence:
    """The cheapest of `running` (oldest first) except the oldest; among equals the newest.

    A sequence whose blocks are all shared would free none, so it is chosen only last.
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
