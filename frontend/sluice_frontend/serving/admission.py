"""Decides whether a request may run now: `Admission.admit`, of any work in front of any engine."""

import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import NamedTuple

from sluice_core.errors import (
    DeadlineUnreachable,
    Draining,
    EngineDied,
    ModelNotFound,
    NotReady,
    QueueFull,
    RequestError,
    SluiceError,
    TooManyOpen,
)
from sluice_core.port import EngineFacts
from sluice_core.work import TOKEN_BYTES, Deadlines, Work, is_background

from ..config import ServerConfig
from ..evidence.open_tick import Cause
from ..evidence.requests import RequestTimer
from ..http.bodies import too_many
from ..http.clients import has_too_many
from .bounds import check_priority, is_full, num_waiting, unreachable
from .forecast import forecast_for, forecast_of, retry_after_s
from .runtime import Runtime

MAX_ON_THEIR_WAY = 64
"""HTTP requests beyond running and waiting ones: they are still received or still sent."""
QUEUE_SHARE = 32
"""Divisor: this part of the memory is for waiting prompts, packed in both processes."""
MOST_BOOKED = 1024
"""Sequences of one refused request that are counted."""


class Full(NamedTuple):
    """Why the queue is full: in words, the `limit`'s name and value, and how much more was asked.

    `cause`: as in `Recorder.refuse`.
    """

    sentence: str
    limit: str
    most: int
    num_new: int
    cause: Cause | None = None

    @property
    def is_tokens(self) -> bool:
        """True if it is a bound of prompt tokens, else of sequences."""
        return self.limit == "max_num_queued_tokens"


def max_open(config: ServerConfig, ceiling: int) -> int:
    """Open requests of a lone client: those that run, wait, and are received or sent."""
    return ceiling + config.max_num_queued_reqs + MAX_ON_THEIR_WAY


def most_background(config: ServerConfig, ceiling: int) -> int:
    """Open background sequences of all clients: the others keep half of the queue."""
    return ceiling + config.max_num_queued_reqs // 2


class Admission:
    """Books a refusal as an arrival unless the fault is the request's own.

    `max_queued_tokens`: waiting prompt tokens for which there is memory.
    """

    def __init__(self, runtime: Runtime, memory_bytes: int) -> None:
        self._runtime = runtime
        self.max_queued_tokens = memory_bytes // (2 * TOKEN_BYTES * QUEUE_SHARE)

    def admit(self, work: Work, arrival_s: float) -> None:
        """Ask for places for `work`. Raises Unavailable, RequestError, QueueFull and
        DeadlineUnreachable."""
        ceiling = self.check_open(is_background=work.is_background).ceiling
        check_priority(work.priority, self._runtime.live.policy)
        if work.is_exact:  # an estimate refuses nothing for good
            self._check_ever(work, ceiling)
        if work.is_background:
            self._check_background(work, ceiling)
            return
        self._check_queue(work)
        if work.deadlines != Deadlines() or self._runtime.live.shed_ms is not None:
            self._check_deadlines(work, arrival_s, time.monotonic())

    def check_open(self, *, is_background: bool = False) -> EngineFacts:
        """The engine's limits; raises Unavailable, which is booked, if no request is taken now."""
        runtime, facts = self._runtime, self._runtime.backend.facts
        problem: SluiceError
        if runtime.is_closed:
            problem = Draining("this server has shut down", retry_after_s=1)
        elif runtime.backend.closed.is_set():
            death = runtime.engine_liveness.death or "the engine process ended"
            problem = EngineDied(death, retry_after_s=1)
        elif facts is None:
            phase, percent = runtime.engine_liveness.phase, runtime.engine_liveness.percent
            text = f"the model is being loaded: {phase} ({percent} %)"
            problem = NotReady(text, retry_after_s=5)
        else:
            return facts
        raise self.refused(problem, is_background=is_background)

    def refused(self, problem: SluiceError, *, is_background: bool = False) -> SluiceError:
        """`problem`, with which no request is taken now; it is booked."""
        if not is_background:
            self._runtime.recorder.refuse("outside")
        self._runtime.stats.reject(problem.code)
        return problem

    def check_model(self, asked: str | None) -> None:
        """Raise ModelNotFound if `asked` is given and is not the served model."""
        name = self._runtime.model_name
        if asked and asked != name:
            raise ModelNotFound(
                f"the model {asked!r} does not exist; this server has {name!r}", param="model"
            )

    def check_room(self, num_open: int, num_own: int, is_background: bool) -> None:
        """Refuse an HTTP request before its body is read, if others are more than can ever run and
        wait: `num_open` of all clients, `num_own` of its own."""
        flags = self._runtime.config
        most = max_open(flags, 0)
        if not has_too_many(num_own + 1, num_open + 1, most):
            return
        ceiling = self.check_open(is_background=is_background).ceiling
        if has_too_many(num_own + 1, num_open + 1, most + ceiling):
            most = flags.max_num_queued_reqs
            sentence = (
                f"{num_open} requests are open already, {num_own} of them this client's, and "
                f"max_num_queued_reqs is {most}"
            )
            if is_background:
                raise TooManyOpen(sentence, retry_after_s=1)
            raise self._refused(TooManyOpen, Full(sentence, "max_num_queued_reqs", most, 1), 1)

    def refusal_of(self, headers: Mapping[str, str]) -> Callable[[str], TooManyOpen]:
        """What refuses a request with these headers while its body arrives."""
        return partial(self._refuse_body, is_background=is_background(headers))

    def _refuse_body(self, sentence: str, *, is_background: bool) -> TooManyOpen:
        """The refusal of a request; it is booked."""
        if not is_background:
            self._runtime.recorder.refuse("outside")  # it waits for no engine
        self._runtime.stats.reject("large_bodies")
        return too_many(sentence)

    def _check_ever(self, work: Work, ceiling: int) -> None:
        """Raise for what may never run and wait here."""
        most, most_tokens = self._runtime.config.max_num_queued_reqs, self.max_queued_tokens
        if work.num_sequences > ceiling + most:
            raise RequestError(
                f"{work.num_sequences} sequences are more than may ever run ({ceiling}) and wait "
                f"({most}) together; send fewer prompts or a smaller n",
                param="n",
            )
        if work.num_tokens > most_tokens:
            raise RequestError(
                f"{work.num_tokens} prompt tokens, all choices together, are more than may ever "
                f"wait in this server's memory ({most_tokens}); send fewer prompts or a smaller n",
                param="n",
            )

    def _check_queue(self, work: Work) -> None:
        """Raise if the queue is full, and `work`'s client has its part of it.

        Else the newest requests of the clients that hold more than theirs go: they only wait.
        """
        full = self._full(work)
        if full is None:
            return
        holding = self._holding(full)
        part = full.most // len(holding.keys() | {work.client})
        if not _has_room(holding, work.client, full, part):
            raise self._refused(QueueFull, full, work.num_sequences)
        while self._full(work) is not None:
            if not (victims := self._victims(full, work.client, part)):
                return
            self._runtime.recorder.requests.give_up(victims)
            error = QueueFull(
                "the queue is full, and other clients need their part of it; the newest of this "
                f"client's waiting requests was dropped; {full.limit} is {full.most}",
                retry_after_s=self._retry_after_s(len(victims)),
            )
            for timer in victims:
                self._runtime.backend.drop(timer.request_id, error)
            self._runtime.stats.reject(full.limit)

    def _check_background(self, work: Work, ceiling: int) -> None:
        """Raise if others of the background hold their part of what may be open here."""
        runtime = self._runtime
        held = runtime.recorder.requests.background.values()
        most, most_tokens = most_background(runtime.config, ceiling), self.max_queued_tokens // 2
        num_tokens = sum(timer.num_prompt_tokens for timer in held) + work.num_tokens
        if held and (len(held) + work.num_sequences > most or num_tokens > most_tokens):
            runtime.stats.reject("background")
            sentence = (
                f"{len(held)} background requests are open already; the engine's {ceiling} and "
                f"half of max_num_queued_reqs ({most - ceiling}) may be, "
                f"with {most_tokens} prompt tokens"
            )
            raise QueueFull(sentence, retry_after_s=1)

    def _holding(self, full: Full) -> dict[str, int]:
        """What each client has of that which is full."""
        held = self._runtime.recorder.requests.held.items()
        each = ((name, h.num_tokens if full.is_tokens else h.num_waiting) for name, h in held)
        return {name: num for name, num in each if num}

    def _victims(self, full: Full, client: str, part: int) -> list[RequestTimer]:
        """The newest waiting request of the client that holds most, and more than its `part`."""
        holding = self._holding(full)
        for name in sorted(holding, key=holding.__getitem__, reverse=True):
            if holding[name] <= part:
                break
            if name != client and (victims := self._runtime.recorder.requests.newest_waiting(name)):
                return victims
        return []

    def _full(self, work: Work) -> Full | None:
        """The bound of the queue that `work` would break, if any."""
        runtime, most_tokens = self._runtime, self.max_queued_tokens
        flags, num_open, recorder = runtime.config, runtime.num_open, runtime.recorder
        state, cap = recorder.engine.load, runtime.live.cap
        num_tokens, most, num_gone = (
            recorder.requests.num_pending_tokens,
            flags.max_num_queued_reqs,
            recorder.requests.num_given_up,
        )
        num_new, num_new_tokens = work.num_sequences, work.num_tokens
        if num_open and is_full(num_new, num_open, cap, state, most + num_gone):
            waiting = num_waiting(num_open, cap, state) - num_gone
            sentence = f"{waiting} requests wait already, and max_num_queued_reqs is {most}"
            return Full(sentence, "max_num_queued_reqs", most, num_new)
        limit = flags.max_num_queued_tokens
        if 0 < limit <= num_tokens:
            bound = f"max_num_queued_tokens is {limit}"
        elif num_tokens + num_new_tokens > most_tokens:
            limit = most_tokens
            bound = f"this server's memory is for {most_tokens}, these {num_new_tokens} included"
        else:
            return None
        sentence = f"{num_tokens} prompt tokens wait or are computed already, and {bound}"
        cause: Cause | None = None if state.waiting else "prefill"  # of all that are computed
        return Full(sentence, "max_num_queued_tokens", limit, num_new_tokens, cause)

    def _refused(self, kind: type[QueueFull], full: Full, num_new: int) -> QueueFull:
        """The refusal of `num_new` sequences; it is booked."""
        runtime = self._runtime
        for _ in range(min(num_new, MOST_BOOKED)):
            runtime.recorder.refuse(full.cause)
        runtime.stats.reject(full.limit)
        return kind(full.sentence, retry_after_s=self._retry_after_s(num_new))

    def _retry_after_s(self, num_new: int) -> int:
        runtime = self._runtime
        forecast = forecast_of(runtime.recorder, runtime.live, runtime.num_open)
        return retry_after_s(forecast.wait_s(num_new))

    def _check_deadlines(self, work: Work, arrival_s: float, now_s: float) -> None:
        """Raise for a request that would miss its deadline."""
        runtime = self._runtime
        recorder, live = runtime.recorder, runtime.live
        num_new, age_ms = work.num_sequences, 1e3 * (now_s - arrival_s)
        forecast = forecast_for(
            recorder, live, runtime.num_open, work, arrival_s=arrival_s, now_s=now_s
        )
        prefill_ms = recorder.engine.prefill_ms(max(work.prompts), now_s)
        problem = unreachable(
            work.deadlines, live.shed_ms, forecast, num_new, age_ms=age_ms, prefill_ms=prefill_ms
        )
        if problem is not None:
            sentence, retry_s = problem
            wait_ms = 1e3 * forecast.place_s(num_new)
            rest_ms = 1e3 * forecast.wait_s(num_new) - wait_ms + age_ms + prefill_ms
            for _ in range(min(num_new, MOST_BOOKED)):
                recorder.refuse_for_deadline(wait_ms, rest_ms)
            runtime.stats.reject("deadline")
            raise DeadlineUnreachable(sentence, retry_after_s=retry_after_s(retry_s))


def _has_room(holding: Mapping[str, int], client: str, full: Full, part: int) -> bool:
    """True if a full queue takes a request of `client`: it has less than its `part` beside others.

    If it has nothing there, any one request will do; one that is larger than all of the queue even
    beside nobody.
    """
    own, has_others = holding.get(client, 0), bool(holding.keys() - {client})
    if not own:
        return full.most > 0 and (has_others or full.num_new > full.most)
    return has_others and own + full.num_new <= part
