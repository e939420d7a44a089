"""The engine as the frontend sees it: a queue here, and a server behind a URL."""

import asyncio
import itertools
import math
import time
from collections.abc import Callable, Iterable
from functools import partial

from sluice_core.errors import SluiceError
from sluice_core.ordering import Pace
from sluice_core.port import EngineFacts, EngineLimits, EngineLoad, Manner
from sluice_core.work import Work
from sluice_frontend.evidence.ledger import Ledger
from sluice_frontend.evidence.open_tick import OpenTick
from sluice_frontend.evidence.recorder import Recorder

from ..count.outside import OutsideModel
from ..engine.inner import SglangKey
from ..engine.load import ServerLoad
from ..request.asked import Asked
from .flight import Books, Flight
from .progress import Progress
from .queue import Queue

KV_PARTS = 1000
"""Foreign engines tell the used share of their KV cache, not blocks."""
MOST_TIMERS = 1024
"""Sequences of one request that are timed: a list of inputs may be very long."""
FULL_KV = 0.95


class GateBackend:
    """A `Backend` of the frontend: open flights, by the ids of their sequences."""

    def __init__(self, limits: EngineLimits, ledger: Ledger) -> None:
        self.facts: EngineFacts | None = None
        self.is_away = True
        self.closed = asyncio.Event()
        self.queue = Queue(limits, partial(_pace, ledger.recorder))
        self.outside = OutsideModel()
        self.load = ServerLoad()
        self.progress = Progress(lambda: self.flights)
        self._busy_since_s = math.inf
        self.on_limits: list[Callable[[EngineLimits], None]] = []
        self.num_inner = 0
        self.sglang: SglangKey | None = None
        self.books = Books(ledger, cap=limits.cap)
        self._ledger, self._recorder = ledger, ledger.recorder
        self._flights: dict[str, Flight] = {}
        self._ids = itertools.count(1)

    @property
    def num_open(self) -> int:
        return len(self._flights)

    @property
    def manner(self) -> Manner:
        """By `sluice_vllm` inside, SGLang's own key, or this queue alone."""
        holds_cap = bool(self.num_inner) or (self.sglang is not None and self.sglang.is_set)
        return Manner(
            cap_is="live" if holds_cap else "gate",
            gaps_from=self.books.gaps_from,
            chunk_is="live" if self.num_inner else "fixed",
        )

    # -- requests

    def open(self, asked: Asked, work: Work, arrival_s: float) -> Flight:
        """Let a request in, to the queue."""
        loop, recorder, now_s = asyncio.get_running_loop(), self._recorder, time.monotonic()
        sequences = ((num, another) for num in work.prompts for another in range(work.n))
        timers = [
            recorder.arrive(
                str(next(self._ids)), arrival_s, now_s, num, work.deadlines.ttft_ms,
                work.priority, is_another=another > 0, client=work.client,
                is_background=work.is_background,
            )
            for num, another in itertools.islice(sequences, MOST_TIMERS)
        ]  # fmt: skip
        for timer in timers:
            timer.group = timers[0].group
        flight = Flight(asked, work, arrival_s, timers, loop.create_future(), loop.create_future())
        self._flights |= dict.fromkeys((timer.request_id for timer in timers), flight)
        self.queue.add(flight)
        self.pump()
        return flight

    def token(
        self, flight: Flight, index: int, now_s: float, num: int = 1, *, is_drafted: bool
    ) -> None:
        """Book `num` tokens of one of its sequences, handed over together."""
        tick, books = _tick(self._recorder, flight), self.books
        tick.generated_tokens += num
        tick.decodes += num
        before = books.num_prefilling
        gap_s = books.token(flight, index, now_s, is_drafted=is_drafted)
        flight.timers[index].num_tokens += num - 1
        if gap_s is not None:
            self.outside.gap(1e3 * gap_s, books.running, now_s)
        elif books.num_prefilling < before and flight.admitted_s is not None:
            tick.prefill_tokens += flight.prompt_tokens
            if len(flight.work.prompts) == 1:
                prefill_ms = 1e3 * (now_s - flight.admitted_s)
                self.outside.prefill(prefill_ms, flight.prompt_tokens, books.running - 1, now_s)

    def finish(self, flight: Flight, num_tokens: int | None, now_s: float) -> None:
        """Book a whole answer; `num_tokens`: of all sequences together, if reported."""
        self.progress.stepped(now_s)
        tick, is_unseen = _tick(self._recorder, flight), not flight.first_seen
        if is_unseen:
            tick.generated_tokens += num_tokens or 0
        if is_unseen or not flight.work.is_stream:
            tick.prefill_tokens += flight.prompt_tokens
        for timer in flight.timers:
            if is_unseen:
                timer.num_tokens = (num_tokens or 0) // flight.num_sequences
            self._ledger.finish(timer, "stop", 0, computed_s=now_s, now_s=now_s)
        self._over(flight)

    def failed(self, flight: Flight, kind: str) -> None:
        """Book that the engine failed, or cut its answer; `kind` as in `Failures`."""
        for timer in flight.timers:
            self._ledger.engine_failed(timer, kind)
        self._over(flight)

    def leave(self, flight: Flight, error: SluiceError | None = None) -> None:
        """Book any other end: its client left, or `error`. An ended one is ignored."""
        if flight.is_over:
            return
        now_s, ledger = time.monotonic(), self._ledger
        for timer in flight.timers:
            if error is None:
                ledger.leave(timer, now_s)
            else:
                ledger.fail(timer, error, now_s, has_begun=flight.has_head)
        self._over(flight)

    def requeue(self, flight: Flight) -> None:
        """Let a flight wait again that was recalled and has left the engine."""
        self.books.num_prefilling -= flight.is_prefilling
        self.queue.leave(flight)
        flight.begin_again(asyncio.get_running_loop().create_future())
        self.queue.add(flight)
        self.pump()

    def _over(self, flight: Flight) -> None:
        if flight.is_prefilling:
            self.books.num_prefilling -= 1
        flight.is_over = True
        for timer in flight.timers:
            del self._flights[timer.request_id]
        if flight.admitted_s is None:
            self.queue.remove(flight)
        else:
            self.queue.leave(flight)
        self.pump()

    def pump(self) -> None:
        """Give free places to those whose turn it is, while the engine is there."""
        recorder, now_s = self._recorder, time.monotonic()
        taken = [] if self.is_away else self.queue.take()
        for flight in taken:
            flight.admitted_s = now_s
            recorder.admit((timer.request_id for timer in flight.timers), now_s)
            self.books.num_prefilling += flight.is_prefilling
            if not flight.work.is_stream:
                for timer in flight.timers:
                    recorder.unseen(timer)
            if not flight.turn.done():
                flight.turn.set_result(None)
        self.see()

    # -- what the engine and this queue hold

    def see(self) -> None:
        """Tell the evidence the state of now."""
        recorder, running, waiting = self._recorder, self.queue.running, self.queue.waiting
        cap, behind = self.queue.limits.cap, self.queue.background
        self.books.running, self.books.cap = running + behind.running, cap
        in_cap = min(running, cap) if self.queue.ahead else running
        held = int(self.load.waiting or 0)
        recorder.engine.see(
            EngineLoad(
                running=in_cap,
                waiting_cap=waiting + running - in_cap,
                waiting_kv=held,
                used_blocks=round(KV_PARTS * min(self.load.kv_usage or 0.0, 1.0)),
                num_blocks=KV_PARTS,
                num_preemptions=int(self.load.preemptions or 0),
                background_running=behind.running,
                background_waiting=behind.waiting,
            )
        )
        tick, now_s = recorder.ticks.open, time.monotonic()
        tick.max_running = max(tick.max_running, in_cap)
        if not self.num_inner:  # which tells the time of its steps
            tick.busy_s += max(0.0, now_s - self._busy_since_s)
        self._busy_since_s = now_s if running else math.inf
        recorder.ticks.settle(in_cap)

    def loaded(self, load: ServerLoad) -> None:
        """Read the engine's own metrics. Those that are prefilled now may wait for its memory."""
        has_lack = bool(load.waiting) or (load.kv_usage or 0.0) > FULL_KV
        has_lack = has_lack or (load.preemptions or 0.0) > (self.load.preemptions or 0.0)
        self.load = load
        if has_lack and not self.queue.ahead:
            for flight in self.flights:
                flight.met_lack = flight.met_lack or flight.is_prefilling
        self.see()

    @property
    def flights(self) -> Iterable[Flight]:
        """The open ones."""
        return dict.fromkeys(self._flights.values())

    # -- backend.Backend

    def fail(self, request_id: str, error: SluiceError) -> None:
        """End the whole request of a sequence. Its place is free once the engine's connection is
        closed."""
        flight = self._flights.get(request_id)
        if flight is not None:
            flight.end(error)

    def drop(self, request_id: str, error: SluiceError) -> None:
        """The same, unless it has gone to the engine."""
        flight = self._flights.get(request_id)
        if flight is not None and flight.admitted_s is None:
            flight.end(error)

    def fail_all(self, error: SluiceError) -> None:
        for flight in self.flights:
            flight.end(error)

    def fail_waiting(self, error: SluiceError) -> None:
        """End those that have not gone to the engine."""
        for flight in self.flights:
            if flight.admitted_s is None:
                flight.end(error)

    def configure(self, limits: EngineLimits) -> None:
        """Put new limits in force."""
        self.queue.limits = limits
        for tell in self.on_limits:
            tell(limits)
        self.pump()

    async def check_integrity(self) -> str | None:
        """None: the engine's memory is its own."""
        return None


def _tick(recorder: Recorder, flight: Flight) -> OpenTick:
    """Where its tokens are counted: for the background nowhere."""
    return OpenTick() if flight.work.is_background else recorder.ticks.open


def _pace(recorder: Recorder, cap: int, num_free: int) -> Pace:
    model, service_s = recorder.engine.step_model, recorder.recent.service_s() or 0.0
    return Pace(model.d / 1e3 if model else 0.0, service_s / cap, num_free)
