"""What a sequence has of the prefix cache, and what it gives to it. Pure."""

from .blocks import BlockPool
from .sequence import Sequence


def find(sequence: Sequence, pool: BlockPool) -> list[int]:
    """The cached blocks that its tokens begin with; none where it needs logits of them."""
    sequence.matched_at = pool.num_gains
    if sequence.needs_prompt_scores:
        return []
    return pool.match(sequence.token_ids, sequence.request.cache_salt)


def book(sequence: Sequence, pool: BlockPool, matched: list[int]) -> int:
    """Count what a sequence that has not begun has of the cache; tokens that are new in it."""
    size, known = pool.block_size, sequence.num_sealed_blocks
    sequence.num_computed_tokens = sequence.num_trusted_tokens = len(matched) * size
    sequence.num_sealed_blocks = len(matched)
    if matched:
        sequence.sealed_key = pool.key_of(matched[-1])
    return (len(matched) - known) * size


def take_more(sequence: Sequence, pool: BlockPool) -> int:
    """Give a sequence that has not begun what others put into the cache meanwhile; in tokens."""
    if sequence.matched_at == pool.num_gains or _has_begun(sequence, pool):
        return 0
    sequence.matched_at = pool.num_gains
    matched = pool.match(sequence.token_ids, sequence.request.cache_salt)
    known, num = sequence.num_sealed_blocks, len(matched)
    if num <= known:
        return 0
    pool.acquire(matched[known:])
    pool.release(sequence.block_ids[known:num])
    sequence.block_ids[known:num] = matched[known:]
    num_found = book(sequence, pool, matched)
    if not sequence.num_preemptions:
        sequence.cached_tokens += num_found
    return num_found


def will_find(sequence: Sequence, other: Sequence, pool: BlockPool) -> bool:
    """Whether the next block of a sequence that has not begun is in the cache once the prefill of
    `other` has ended."""
    start = sequence.num_computed_tokens
    end = start + pool.block_size
    # The next block first: of a burst with one prefix it is what differs.
    return (
        pool.prefix_caching
        and end < sequence.num_tokens
        and end <= other.num_tokens
        and sequence.request.cache_salt == other.request.cache_salt
        and sequence.token_ids[start:end] == other.token_ids[start:end]
        and sequence.token_ids[:start] == other.token_ids[:start]
        and not _has_begun(sequence, pool)
    )


def seal(sequence: Sequence, pool: BlockPool) -> None:
    """Make the blocks that are now full findable; only after finite logits came of them."""
    if not pool.prefix_caching:
        return
    size = pool.block_size
    for index in range(sequence.num_sealed_blocks, sequence.num_computed_tokens // size):
        parent = sequence.sealed_key or sequence.request.cache_salt
        tokens = tuple(sequence.token_ids[index * size : (index + 1) * size])
        sequence.sealed_key = pool.seal(sequence.block_ids[index], parent, tokens)
        sequence.num_sealed_blocks += 1


def _has_begun(sequence: Sequence, pool: BlockPool) -> bool:
    """Whether it has computed anything itself since it was admitted, or has to."""
    found = sequence.num_sealed_blocks * pool.block_size
    return sequence.num_computed_tokens != found or sequence.needs_prompt_scores
