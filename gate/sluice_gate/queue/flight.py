"""One client's request, from its arrival to the end of its answer: its clocks and its outcome.

*Pure* but for the future that tells its turn. Each of its sequences has a timer of its own.
"""

import asyncio
from dataclasses import dataclass, field

from sluice_core.contract import AT_CAP_SHARE, GapsFrom
from sluice_core.errors import SluiceError
from sluice_core.port import FirstParts
from sluice_core.work import Work
from sluice_frontend.evidence.ledger import Ledger
from sluice_frontend.evidence.requests import RequestTimer

from ..request.asked import Asked

EACH_SHARE = 0.05
"""Tokens that may have no chunk of their own, as parts of one character."""


@dataclass(slots=True, eq=False)
class Flight:
    """A request. `turn`: set when it may go to the engine,
    or to the error that ends it. `stop`: set when it must end although it has gone there.

    `timers`: one for each of its sequences, up to the backend's bound. `met_lack`: the engine told
    of a lack of memory while its prompt was computed. `has_head`: the head of the engine's answer
    came. `has_answered`: a piece of its body did. `is_held_up`: a piece waits for its client to
    read. `recall`: set when a background request must leave the engine, and wait again.
    """

    asked: Asked
    work: Work
    arrival_s: float
    timers: list[RequestTimer]
    turn: asyncio.Future[None]
    stop: asyncio.Future[None]
    recall: asyncio.Event = field(default_factory=asyncio.Event)
    admitted_s: float | None = None
    met_lack: bool = False
    has_head: bool = False
    is_over: bool = False
    has_answered: bool = False
    is_held_up: bool = False
    first_seen: set[int] = field(default_factory=set)

    @property
    def num_sequences(self) -> int:
        """Places that it takes."""
        return self.work.num_sequences

    @property
    def prompt_tokens(self) -> int:
        """To compute; those of one prompt are computed once."""
        return sum(self.work.prompts)

    @property
    def is_prefilling(self) -> bool:
        """True between its admission and its first token, if that can be seen."""
        is_under_way = self.admitted_s is not None and not self.is_over
        return is_under_way and self.work.is_stream and not self.first_seen

    def begin_again(self, turn: asyncio.Future[None]) -> None:
        """Let a recalled flight wait for another turn."""
        self.turn, self.recall = turn, asyncio.Event()
        self.admitted_s, self.has_answered = None, False

    def end(self, error: SluiceError) -> None:
        """End it with `error`, wherever it is."""
        for future in (self.turn, self.stop):
            if not future.done():
                future.set_exception(error)
                future.exception()  # it may have no reader any more


@dataclass(slots=True)
class Books:
    """Counts the tokens of answers. `running`, `cap`: as of now, told by the gate.

    `prefill_ended_s`: the last moment at which a prompt was known to be computed. `has_law`: the
    engine sizes its steps by the law, and told the end of its last long one (`long_ended_s`).
    `num_seen`,
    `num_told`: tokens of late by chunks, and by the engine's own count.
    """

    ledger: Ledger
    running: int = 0
    cap: int = 1
    num_prefilling: int = 0
    prefill_ended_s: float = -1.0
    has_law: bool = False
    long_ended_s: float = -1.0
    num_seen: int = 0
    num_told: int = 0

    @property
    def at_cap(self) -> bool:
        return self.running >= AT_CAP_SHARE * self.cap

    def token(self, flight: Flight, index: int, now_s: float, *, is_drafted: bool) -> float | None:
        """A token of the sequence `index`; its gap in seconds, None for a first one."""
        timer = flight.timers[index]
        is_first = timer.first_s is None
        before_s = timer.last_s
        first = self._parts(flight, timer, now_s) if is_first else None
        in_prefill = self.num_prefilling > 0 or self.prefill_ended_s > before_s
        if self.has_law:
            in_prefill = self.long_ended_s > before_s
        self.ledger.token(
            timer,
            first,
            at_cap=self.at_cap,
            is_drafted=is_drafted,
            now_s=now_s,
            in_prefill=in_prefill,
        )
        if is_first and flight.is_prefilling:
            self.num_prefilling -= 1
            self.prefill_ended_s = now_s
        if is_first:
            flight.first_seen.add(index)
            return None
        return None if is_drafted or in_prefill else now_s - before_s

    def _parts(self, flight: Flight, timer: RequestTimer, now_s: float) -> FirstParts:
        """Its wait here is for the cap; the engine's part is prefill, or a lack of memory."""
        admitted_s = flight.admitted_s or timer.submitted_s
        wait_s, engine_s = max(0.0, admitted_s - timer.submitted_s), now_s - admitted_s
        kv_s = engine_s if flight.met_lack else 0.0
        return FirstParts(wait_s, kv_s, engine_s - kv_s)

    def streamed(self, flight: Flight, usage: tuple[int, int] | None) -> None:
        """Book the end of a streamed answer; `usage`: as the engine reports it."""
        if usage is not None:
            seen = sum(timer.num_tokens for timer in flight.timers)
            self.num_seen = self.num_seen // 2 + seen
            self.num_told = self.num_told // 2 + usage[1]

    @property
    def gaps_from(self) -> GapsFrom:
        """tokens: where the engine told how many there are, chunks brought one each."""
        is_each = abs(self.num_seen - self.num_told) <= EACH_SHARE * self.num_told
        return "tokens" if self.num_told and is_each else "chunks"
