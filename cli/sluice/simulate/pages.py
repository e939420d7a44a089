"""The twin of the worker's block pool that counts blocks instead of naming them.

Blocks of a prompt's shared prefix are known one by one, as (parent, names, index), so that they are
found, chained and given up as in `sluice_worker.blocks`. A sequence's own blocks are a run: they
are only ever found by the same sequence, after a preemption, and given up from their end.
"""

from collections import OrderedDict
from dataclasses import dataclass, field

from .trace import Request

Key = tuple[object, object, int]
"""(parent key, names, index) of a shared block; ("run", its number, 0) of a run of own blocks."""


@dataclass(slots=True, eq=False)
class Holding:
    """The blocks of one sequence: `num` in all, of which the first are of the shared prefix.

    `shared`: keys of the leading prefix blocks that are sealed, None where another block holds
    that content. `parent`: key of the last sealed prefix block. `run`: of its own sealed blocks.
    """

    request: Request
    num: int = 0
    shared: list[Key | None] = field(default_factory=list)
    parent: object = None
    run: Key = ("run", 0, 0)
    run_parent: object = None


class Pages:
    """`num_total` blocks of `size` tokens."""

    def __init__(self, num_total: int, size: int, *, caching: bool = True) -> None:
        self.num_total, self.size, self.caching = num_total, size, caching
        self.num_free = num_total
        self.num_cached = 0
        self._cached: OrderedDict[Key, int] = OrderedDict()  # unused, oldest first
        self._refs: dict[Key, tuple[object, int]] = {}  # shared block -> (its identity, users)
        self._next = 1

    @property
    def available(self) -> int:
        """Blocks that `take` can give."""
        return self.num_free + self.num_cached

    def prefix_blocks(self, request: Request) -> int:
        """Full blocks of the shared part of a prompt."""
        return request.prefix_tokens // self.size

    def match(self, holding: Holding, num_tokens: int) -> list[Key]:
        """Shared blocks that hold the start of a sequence of `num_tokens`; the last token is left
        out. Asking changes nothing."""
        request, found = holding.request, list[Key]()
        if not (self.caching and request.prefix):
            return found
        parent: object = None
        for index in range(min(self.prefix_blocks(request), (num_tokens - 1) // self.size)):
            key = self._key(request, parent, index)
            if key not in self._refs:
                break
            found.append(key)
            parent = self._refs[key][0]
        return found

    def _key(self, request: Request, parent: object, index: int) -> Key:
        unit, start = request.prefix_unit, index * self.size
        names = request.prefix[start // unit : (start + self.size - 1) // unit + 1]
        return (parent, names, index)

    def own_match(self, holding: Holding, matched: list[Key]) -> int:
        """Blocks of its own that a preempted sequence finds again behind `matched`."""
        parent = self._refs[matched[-1]][0] if matched else None
        if len(matched) < self.prefix_blocks(holding.request) or parent != holding.run_parent:
            return 0
        return self._cached.get(holding.run, 0)

    def recompute_tokens(self, holding: Holding, tokens: int, computed: int) -> int:
        """Computed tokens that would be lost; as in `sluice_worker.preemption`."""
        own, kept = set(holding.shared), 0
        for key in self.match(holding, tokens):
            if self._refs[key][1] == (key in own):
                break
            kept += self.size
        return max(computed - kept, 0)

    def frees_a_block(self, holding: Holding, num: int) -> bool:
        """Whether one of the `num` blocks that a sequence has by now is nobody else's."""
        if num > len(holding.shared):
            return True
        return any(key is None or self._refs[key][1] == 1 for key in holding.shared)

    def can_take(self, matched: list[Key], own: int, num_new: int) -> bool:
        """Whether `start` with these would find enough blocks."""
        idle = sum(1 for key in matched if not self._refs[key][1])
        return num_new + idle + own <= self.available

    def start(self, holding: Holding, matched: list[Key], own: int, num_blocks: int) -> None:
        """Give a sequence `num_blocks`, those among them that were matched."""
        self._acquire(matched)
        if own:
            self.num_cached -= self._cached.pop(holding.run)
        else:
            holding.run = ("run", self._next, 0)
            self._next += 1
        holding.shared = list(matched)
        holding.parent = self._refs[matched[-1]][0] if matched else None
        holding.num = num_blocks
        self.take(num_blocks - len(matched) - own)

    def _acquire(self, keys: list[Key]) -> None:
        """One more user of each shared block."""
        for key in keys:
            identity, users = self._refs[key]
            if not users:
                del self._cached[key]
                self.num_cached -= 1
            self._refs[key] = (identity, users + 1)

    def find_more(self, holding: Holding, num_tokens: int) -> int:
        """Shared blocks that were sealed since `start`, in the place of own ones; how many."""
        found = self.match(holding, num_tokens)[len(holding.shared) :]
        self._acquire(found)
        if found:
            holding.parent = self._refs[found[-1]][0]
        holding.shared += found
        self.num_free += len(found)
        return len(found)

    def is_shared(self, one: Holding, other: Holding, index: int) -> bool:
        """Whether two prompts have the same tokens up to the end of block `index`."""
        requests = (one.request, other.request)
        if not self.caching or index >= min(map(self.prefix_blocks, requests)):
            return False
        end = (index + 1) * self.size
        first, second = (r.prefix[: -(-end // r.prefix_unit)] for r in requests)
        return first == second

    def take(self, count: int) -> None:
        """`count` blocks: free ones first, then the oldest cached."""
        if count <= self.num_free:
            self.num_free -= count
            return
        count -= self.num_free
        self.num_free = 0
        self.num_cached -= count
        while count:
            key, held = next(iter(self._cached.items()))
            given = min(held, count)
            count -= given
            if given < held:
                self._cached[key] = held - given
            else:
                del self._cached[key]
                self._refs.pop(key, None)

    def seal(self, holding: Holding, num_computed: int) -> None:
        """Make the prefix blocks that are full findable, unless they are already."""
        request = holding.request
        if not (self.caching and request.prefix):
            return
        full = min(self.prefix_blocks(request), num_computed // self.size)
        for index in range(len(holding.shared), full):
            key = self._key(request, holding.parent, index)
            if key in self._refs:
                holding.shared.append(None)
            else:
                self._refs[key] = (self._next, 1)
                self._next += 1
                holding.shared.append(key)
            holding.parent = self._refs[key][0]

    def release(self, holding: Holding, num_sealed: int) -> None:
        """Take all blocks back, the last first; `num_sealed` tokens of them are to be trusted."""
        prefix = self.prefix_blocks(holding.request) if self.caching else 0
        own = max(num_sealed // self.size - prefix, 0) if self.caching else 0
        self.num_free += holding.num - len(holding.shared) - own
        if own:
            self._cached[holding.run] = own
            self.num_cached += own
            holding.run_parent = holding.parent
        for key in reversed(holding.shared):
            if key is None:
                self.num_free += 1
                continue
            identity, users = self._refs[key]
            self._refs[key] = (identity, users - 1)
            if users == 1:
                self._cached[key] = 1
                self.num_cached += 1
        holding.num, holding.shared = 0, []
