"""The pool of KV blocks: reference counts, and the prefix cache over full blocks.

Every block has exactly one of three states. Free: it holds nothing. Cached: unused, but full and
findable by its content. Used: referenced by sequences. The oldest cached blocks are evicted first.

A full block is found by (its parent's key, its tokens), chained from the salt. Python hashes that
tuple and compares it whole, so equal hashes never confuse two contents.
"""

from collections import Counter, OrderedDict
from collections.abc import Iterable
from collections.abc import Sequence as Seq

Content = tuple[int | str, tuple[int, ...]]
"""Content of a full block: the key of the block before it (or the salt), and its tokens."""


class OutOfBlocks(RuntimeError):
    """More blocks were taken than `num_available`: the caller did not check first."""


class BlockPool:
    """`num_total` blocks of `block_size` tokens."""

    def __init__(self, num_total: int, block_size: int, *, prefix_caching: bool = True) -> None:
        self.num_total = num_total
        self.block_size = block_size
        self.prefix_caching = prefix_caching
        self._free = list(range(num_total - 1, -1, -1))
        self._refs = [0] * num_total
        self._cached: OrderedDict[int, None] = OrderedDict()  # unused, oldest first
        self._content: dict[int, Content] = {}
        self._key: dict[int, int] = {}  # block -> key of its content
        self._found: dict[Content, int] = {}
        self._next_key = 1
        self.first_unused = 0
        """No block from this one on was ever given out."""
        self.version = 0
        """Times that a block became idle or findable; each reduces a lack by at most one block."""

    @property
    def num_cached(self) -> int:
        return len(self._cached)

    @property
    def num_used(self) -> int:
        return self.num_total - len(self._free) - len(self._cached)

    @property
    def num_available(self) -> int:
        """Blocks that `allocate` can give."""
        return len(self._free) + len(self._cached)

    def match(self, token_ids: Seq[int], salt: str) -> list[int]:
        """Cached blocks that hold the longest prefix of `token_ids`. Changes nothing.

        At least one token is left out: its logits are needed, and logits are not cached.
        """
        matched: list[int] = []
        if not self.prefix_caching:
            return matched
        parent: int | str = salt
        for start in range(0, len(token_ids) - self.block_size, self.block_size):
            content = (parent, tuple(token_ids[start : start + self.block_size]))
            block = self._found.get(content)
            if block is None:
                break
            matched.append(block)
            parent = self._key[block]
        return matched

    def num_lacking(self, matched: Seq[int], num_new: int) -> int:
        """Blocks that `acquire(matched)` and then `allocate(num_new)` lack; none if 0 or less."""
        idle = sum(1 for block in matched if self._refs[block] == 0)
        return num_new + idle - self.num_available

    def acquire(self, blocks: Iterable[int]) -> None:
        """Add a reference to each of `blocks`, which are cached or used."""
        for block in blocks:
            if self._refs[block] == 0:
                del self._cached[block]
            self._refs[block] += 1

    def allocate(self, count: int) -> list[int]:
        """`count` blocks with one reference each: free ones first, then the oldest cached."""
        if count > self.num_available:
            raise OutOfBlocks(f"{count} blocks asked for, {self.num_available} available")
        blocks = [self._free.pop() if self._free else self._evict() for _ in range(count)]
        for block in blocks:
            self._refs[block] = 1
        self.first_unused = max(self.first_unused, 1 + max(blocks, default=-1))
        return blocks

    def _evict(self) -> int:
        block, _ = self._cached.popitem(last=False)
        self._unseal(block)
        return block

    def _unseal(self, block: int) -> None:
        del self._found[self._content.pop(block)]
        del self._key[block]

    def forget(self, blocks: Seq[int]) -> list[int]:
        """Make blocks of only this owner unfindable, and return them; shared blocks stay."""
        owned = [block for block in blocks if self._refs[block] == 1]
        for block in owned:
            if block in self._key:
                self._unseal(block)
        return owned

    def cache_block(self, block: int, parent: int | str, tokens: tuple[int, ...]) -> int:
        """Make a full, used block findable; returns the key that its successor is chained to.

        If another block already holds the same content, that one stays findable.
        """
        content = (parent, tokens)
        holder = self._found.setdefault(content, block)
        if holder == block and block not in self._key:
            self._content[block] = content
            self._key[block] = self._next_key
            self._next_key += 1
            self.version += 1
        return self._key[holder]

    def num_owners(self, block: int) -> int:
        """Sequences that use `block`."""
        return self._refs[block]

    def key_of(self, block: int) -> int:
        """Key of a sealed block."""
        return self._key[block]

    def release(self, blocks: Seq[int]) -> None:
        """Drop one reference to each of a sequence's blocks, given in order.

        The last goes first, so that a chain is evicted from its end and never loses its middle.
        """
        for block in reversed(blocks):
            self._refs[block] -= 1
            if self._refs[block] == 0:
                self.version += 1
                if block in self._key:
                    self._cached[block] = None
                else:
                    self._free.append(block)

    def check_integrity(self, owners: Iterable[Seq[int]]) -> str | None:
        """The first invariant that does not hold, or None. `owners`: every sequence's blocks."""
        held = Counter(block for blocks in owners for block in blocks)
        for block, refs in enumerate(self._refs):
            if refs != held[block]:
                return f"block {block} has {refs} references, but {held[block]} owners"
        used = sum(1 for refs in self._refs if refs)
        if len(self._free) + len(self._cached) + used != self.num_total:
            return (
                f"{len(self._free)} free + {len(self._cached)} cached + {used} used blocks "
                f"are not {self.num_total}"
            )
        idle = Counter(self._free) + Counter(self._cached.keys())
        if any(count > 1 or self._refs[block] for block, count in idle.items()):
            return "a block is free or cached twice, or while it is used"
        if any(self._found.get(content) != block for block, content in self._content.items()):
            return "a cached content does not lead to its block"
        if self._cached.keys() - self._key.keys() or self._key.keys() != self._content.keys():
            return "a cached block has no content"
        return None
