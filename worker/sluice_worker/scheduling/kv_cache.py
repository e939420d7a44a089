"""The KV blocks of sequences: room for tokens, hits of the prefix cache, blocks to clear.
Pure.
"""

from collections.abc import Iterable
from collections.abc import Sequence as Seq

from sluice_core.model.sizing import blocks_for

from .blocks import BlockPool
from .sequence import Sequence
from .step import Counters


class KvCache:
    """Gives sequences blocks of `pool` and takes them back.

    `num_ahead`: slots that a sequence gets behind its tokens; during decoding only if some are
    free. `most_drafts`: most tokens of a draft.
    """

    def __init__(
        self, pool: BlockPool, counters: Counters, *, num_ahead: int = 0, most_drafts: int = 0
    ) -> None:
        self.pool = pool
        self.num_ahead = num_ahead
        self._counters = counters
        # Slots behind the computed tokens that a step may write: drafts, and a step ahead.
        self._num_behind = num_ahead + most_drafts
        self._dirty: list[int] = []

    # From the queue, and back

    def find(self, sequence: Sequence) -> list[int]:
        """The cached blocks of its first tokens; none if it needs logits of them."""
        sequence.matched_at = self.pool.version
        if sequence.needs_prompt_scores:
            return []
        return self.pool.match(sequence.token_ids, sequence.request.cache_salt)

    def num_lacking(self, sequence: Sequence, matched: Seq[int], margin: int) -> int:
        """Missing blocks to start `sequence` and keep `margin` free; none if 0 or less."""
        num_new = self._num_blocks(sequence) - len(matched)
        return self.pool.num_lacking(matched, num_new + margin)

    def start(self, sequence: Sequence, matched: list[int]) -> int:
        """Give it the blocks of all its tokens; returns the number of cached tokens."""
        self.pool.acquire(matched)
        num_new = self._num_blocks(sequence) - len(matched)
        sequence.block_ids = matched + self.pool.allocate(num_new)
        num_cached = self._adopt(sequence, matched)
        if self.pool.prefix_caching and not sequence.needs_prompt_scores:
            self._count_found(sequence, num_cached, sequence.num_tokens)
        self._counters.preempted_tokens += max(sequence.num_lost_tokens - num_cached, 0)
        sequence.num_lost_tokens = 0
        return num_cached

    def free(self, sequence: Sequence) -> None:
        """Take all its blocks; if it runs again, it starts from what the prefix cache kept."""
        if sequence.num_computed_tokens > sequence.num_trusted_tokens:
            end = blocks_for(sequence.num_computed_tokens + self._num_behind, self.pool.block_size)
            self._dirty += sequence.block_ids[sequence.num_sealed_blocks : end]
        self.pool.release(sequence.block_ids)
        sequence.block_ids = []
        sequence.num_computed_tokens = sequence.num_trusted_tokens = 0
        sequence.num_sealed_blocks = sequence.sealed_key = 0

    def _num_blocks(self, sequence: Sequence) -> int:
        return blocks_for(sequence.num_tokens + self.num_ahead, self.pool.block_size)

    # While it runs

    def extend(self, sequence: Sequence) -> bool:
        """Room for its next token, and for slots ahead if blocks are free; False without room."""
        lacking = self._num_blocks(sequence) - len(sequence.block_ids)
        if lacking <= 0:
            return True
        if lacking <= self.pool.num_available:
            sequence.block_ids += self.pool.allocate(lacking)
            return True
        size, num_tokens = self.pool.block_size, sequence.num_tokens
        while len(sequence.block_ids) * size < num_tokens and self.pool.num_available:
            sequence.block_ids += self.pool.allocate(1)
        return len(sequence.block_ids) * size >= num_tokens

    def extend_for_drafts(self, sequence: Sequence, num_drafts: int) -> bool:
        """True if free blocks give a draft room behind its tokens: a guess preempts nothing."""
        lacking = blocks_for(sequence.num_tokens + num_drafts, self.pool.block_size)
        lacking -= len(sequence.block_ids)
        if lacking > self.pool.num_available:
            return False
        sequence.block_ids += self.pool.allocate(lacking)
        return True

    def roll_back(self, sequence: Sequence) -> None:
        """Take back the blocks of rejected drafts."""
        kept = blocks_for(sequence.num_tokens, self.pool.block_size)
        self.pool.release(sequence.block_ids[kept:])
        del sequence.block_ids[kept:]

    def rounding_waste(self, running: Iterable[Sequence]) -> float:
        """Share of the used KV slots behind the last tokens of `running`: pages are whole."""
        size = self.pool.block_size
        wasted = sum(-sequence.num_tokens % size for sequence in running)
        return wasted / max(self.pool.num_used * size, 1)

    # After steps have written

    def cache_block(self, sequence: Sequence) -> None:
        """Make full blocks findable; only after they gave finite logits."""
        if not self.pool.prefix_caching:
            return
        size = self.pool.block_size
        for index in range(sequence.num_sealed_blocks, sequence.num_computed_tokens // size):
            parent = sequence.sealed_key or sequence.request.cache_salt
            tokens = tuple(sequence.token_ids[index * size : (index + 1) * size])
            sequence.sealed_key = self.pool.cache_block(sequence.block_ids[index], parent, tokens)
            sequence.num_sealed_blocks += 1

    def forget(self, sequence: Sequence) -> None:
        """Trust none of its blocks, not even those that earlier steps found sound."""
        self._dirty += self.pool.forget(sequence.block_ids)
        sequence.num_trusted_tokens = sequence.num_computed_tokens

    def take_dirty(self) -> list[int]:
        """Freed blocks that never gave finite logits, each returned once: clear them.

        A masked slot is still multiplied by zero, and zero times NaN would reach its next owner.
        """
        dirty, self._dirty = self._dirty, []
        return dirty

    # Prefixes of others

    def extend_from_cache(self, sequence: Sequence) -> None:
        """Give a sequence that has not begun the blocks that others have cached meanwhile."""
        if sequence.matched_at == self.pool.version or self._has_begun(sequence):
            return
        matched, known = self.find(sequence), sequence.num_sealed_blocks
        num = len(matched)
        if num <= known:
            return
        self.pool.acquire(matched[known:])
        self.pool.release(sequence.block_ids[known:num])
        sequence.block_ids[known:num] = matched[known:]
        num_found = self._adopt(sequence, matched)
        if not sequence.num_preemptions:
            sequence.cached_tokens += num_found
        self._count_found(sequence, num_found)

    def will_find(self, sequence: Sequence, other: Sequence) -> bool:
        """True if the prefill of `other` puts the next block of `sequence` into the cache, and
        `sequence` has computed nothing yet."""
        start = sequence.num_computed_tokens
        end = start + self.pool.block_size
        # The next block first: in a burst with a common prefix this one differs.
        return (
            self.pool.prefix_caching
            and end < sequence.num_tokens
            and end <= other.num_tokens
            and sequence.request.cache_salt == other.request.cache_salt
            and sequence.token_ids[start:end] == other.token_ids[start:end]
            and sequence.token_ids[:start] == other.token_ids[:start]
            and not self._has_begun(sequence)
        )

    def _adopt(self, sequence: Sequence, matched: list[int]) -> int:
        """Count `matched` as computed; returns the number of additional tokens."""
        size, known = self.pool.block_size, sequence.num_sealed_blocks
        sequence.num_computed_tokens = sequence.num_trusted_tokens = len(matched) * size
        sequence.num_sealed_blocks = len(matched)
        if matched:
            sequence.sealed_key = self.pool.key_of(matched[-1])
        return (len(matched) - known) * size

    def _has_begun(self, sequence: Sequence) -> bool:
        """True if it has computed anything itself since its admission, or has to."""
        found = sequence.num_sealed_blocks * self.pool.block_size
        return sequence.num_computed_tokens != found or sequence.needs_prompt_scores

    def _count_found(self, sequence: Sequence, num_found: int, num_sought: int = 0) -> None:
        """Count tokens found and sought in the cache; not for preempted sequences, which find their
        own."""
        if not sequence.num_preemptions:
            self._counters.prefix_hits += num_found
            self._counters.prefix_queries += num_sought
