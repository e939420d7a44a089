"""What the pods of all objects may take of one operator together, and each object's part of it.

Any image may stand for a worker's, and never answer, or say as much as it is let. So an object may
take as much as is left free beside it: of n that take all they can, each has a part of n + 1, and
one such part is there for whoever comes next (the dynamic threshold of Choudhury and Hahne, 1998).
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

MAX_OPEN = 64
"""Exchanges of one object at once, also where nobody else has any."""
MAX_PROVEN = 192
MAX_UNPROVEN = 64
"""Exchanges at once with pods that answered at the last look, and with all others."""
PROVEN_BYTES = 48 << 20
UNPROVEN_BYTES = 32 << 20
"""Of answers that are being read; the latter may be whole rings, four at their largest."""
MAX_WAIT_S = 10.0
"""For a turn: the pass of an object waits as long."""
ROOM_BYTES = 1 << 30
"""For the evidence of all objects, where nobody limits the operator's memory."""
ROOM_SHARE = 1 / 3
"""... and of its limit: with the largest of answers 450 of 1,024 MiB (measured, as not all that it
takes is counted), beside 90 of the operator's own, 80 in flight and 380 of four hubs."""


@dataclass(slots=True)
class _Taken:
    """What one object has now."""

    num_open: int = 0
    num_bytes: int = 0


@dataclass(frozen=True, slots=True)
class _Turn:
    """One that waits; `begun` once it may begin, or once nobody waits for it any more."""

    num_bytes: int
    begun: asyncio.Future[None]


class Exchanges:
    """Turns of exchanges with pods. Each takes a connection, and room for its largest answer."""

    def __init__(self, max_open: int, max_bytes: int) -> None:
        self._free = _Taken(max_open, max_bytes)
        self._taken: dict[object, _Taken] = {}
        self._waiting: dict[object, deque[_Turn]] = {}

    @asynccontextmanager
    async def turn(self, owner: object, num_bytes: int) -> AsyncIterator[None]:
        """While it is `owner`'s turn to read so many bytes. TimeoutError after `MAX_WAIT_S`."""
        begun: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(owner, deque()).append(_Turn(num_bytes, begun))
        self._begin()
        try:
            async with asyncio.timeout(MAX_WAIT_S):
                await begun
            yield
        finally:
            if begun.done() and not begun.cancelled():
                self._take(owner, -1, -num_bytes)
            self._begin()

    def _take(self, owner: object, num: int, num_bytes: int) -> None:
        taken = self._taken.setdefault(owner, _Taken())
        for part, sign in ((taken, 1), (self._free, -1)):
            part.num_open += sign * num
            part.num_bytes += sign * num_bytes
        if not taken.num_open:
            del self._taken[owner]

    def _begin(self) -> None:
        """Let all begin that may, those first whose object waits for longest; who lacks bytes that
        nobody has is waited for."""
        for owner, waiting in list(self._waiting.items()) if self._free.num_open else ():
            if waiting[0].num_bytes > self._free.num_bytes or not self._free.num_open:
                break
            while waiting and (waiting[0].begun.done() or self._may_begin(owner, waiting[0])):
                turn = waiting.popleft()
                if not turn.begun.done():
                    self._take(owner, 1, turn.num_bytes)
                    turn.begun.set_result(None)
                    # Whoever has had a turn stands behind the others.
                    self._waiting[owner] = self._waiting.pop(owner)
            if not waiting:
                del self._waiting[owner]

    def _may_begin(self, owner: object, turn: _Turn) -> bool:
        taken, free = self._taken.get(owner, _Taken()), self._free
        may_open = taken.num_open < min(free.num_open, MAX_OPEN)
        return may_open and taken.num_bytes + turn.num_bytes <= free.num_bytes


class Room:
    """Bytes that all objects may hold together. Where they would hold more, those that hold most
    have as much as each other, and the others all that they have."""

    def __init__(self, max_bytes: int = ROOM_BYTES) -> None:
        self._max_bytes, self._num_bytes = max_bytes, 0
        self._held: dict[object, int] = {}

    def share(self, owner: object, wanted: int) -> int:
        """How much of `wanted` the owner may hold now; it counts as held."""
        self._hold(owner, wanted)
        if self._num_bytes > self._max_bytes:
            self._hold(owner, min(wanted, level(self._held.values(), self._max_bytes)))
        return self._held[owner]

    def leave(self, owner: object) -> None:
        """It holds nothing any more."""
        self._num_bytes -= self._held.pop(owner, 0)

    def _hold(self, owner: object, num_bytes: int) -> None:
        self._num_bytes += num_bytes - self._held.get(owner, 0)
        self._held[owner] = num_bytes


def level(amounts: Iterable[int], most: int) -> int:
    """The largest bound of each of `amounts` with which they add up to `most` at most; `most` where
    they do without one."""
    ordered = sorted(amounts)
    for index, amount in enumerate(ordered):
        part = most // (len(ordered) - index)
        if amount > part:
            return part
        most -= amount
    return most + sum(ordered)


@dataclass(frozen=True, slots=True)
class Shares:
    """What the objects of one operator share. Pods that do not answer wait for each other only."""

    proven: Exchanges = field(default_factory=lambda: Exchanges(MAX_PROVEN, PROVEN_BYTES))
    unproven: Exchanges = field(default_factory=lambda: Exchanges(MAX_UNPROVEN, UNPROVEN_BYTES))
    room: Room = field(default_factory=Room)
