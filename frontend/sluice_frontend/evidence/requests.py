"""Requests under way: their clocks, and what each client has here. Pure."""

from collections.abc import Iterable
from dataclasses import dataclass, field


@dataclass(slots=True)
class RequestGroup:
    """A client's request, of one sequence or several. `has_begun`: one of them was admitted;
    `is_given_up`: it was told to go while it waited."""

    has_begun: bool = False
    is_given_up: bool = False


@dataclass(slots=True)
class Held:
    """What a client has here: sequences that wait, and prompt tokens without a first one yet."""

    num_waiting: int = 0
    num_tokens: int = 0


@dataclass(slots=True, eq=False)
class RequestTimer:
    """The clock of one request from arrival to end; times in seconds, gaps in milliseconds.

    `ttft_ms`: the request's own deadline, which decides when it is dropped, not what is over.
    `priority`, `is_another`: as in `wire.Submit`. `client`: whose share it takes. `is_background`:
    no target counts it. `admitted_s`: start of its first step. `decided`: its first token has been
    counted, on time or over; `e2e_decided`: its end has. `is_unseen`: its first token is not
    expected to be seen. `group`: shared with the sequences answered together with it.
    """

    request_id: str
    arrival_s: float
    submitted_s: float
    num_prompt_tokens: int
    ttft_ms: float | None = None
    priority: int = 0
    is_another: bool = False
    client: str = ""
    is_background: bool = False
    admitted_s: float | None = None
    decided: bool = False
    e2e_decided: bool = False
    is_unseen: bool = False
    held_first: bool = False
    first_s: float | None = None
    last_s: float = 0.0
    num_tokens: int = 0
    num_gaps: int = 0
    num_gaps_over: int = 0
    queue_s: float = 0.0
    last_was_over: bool = False
    group: RequestGroup = field(default_factory=RequestGroup)

    @property
    def mean_gap_ms(self) -> float:
        """Mean gap between its tokens; 0 with fewer than two."""
        if self.first_s is None or self.num_tokens < 2:
            return 0.0
        return (self.last_s - self.first_s) * 1e3 / (self.num_tokens - 1)


class OpenRequests:
    """Requests that have not ended, oldest first: all (`open`), those that were not admitted
    (`waiting`), and those without a first token (`pending`). Those of the background are only in
    `background`.

    `num_pending_tokens`: of prompts without a first token, cached ones included. `held`: by client,
    of those that wait or are pending. `num_given_up`: told to go and not ended yet.
    """

    def __init__(self) -> None:
        self.open: dict[str, RequestTimer] = {}
        self.waiting: dict[str, RequestTimer] = {}
        self.pending: dict[str, RequestTimer] = {}
        self.background: dict[str, RequestTimer] = {}
        self.num_pending_tokens = 0
        self.held: dict[str, Held] = {}
        self.num_given_up = 0

    def add(self, timer: RequestTimer) -> None:
        """Take a request that has just come."""
        name = timer.request_id
        if timer.is_background:
            self.background[name] = timer
            return
        self.open[name] = self.waiting[name] = self.pending[name] = timer
        self._count(timer, 1, timer.num_prompt_tokens)

    def admit(self, request_id: str) -> RequestTimer | None:
        """Let a request begin; None if it did not wait."""
        timer = self.waiting.pop(request_id, None)
        if timer is not None:
            self._count(timer, -1, 0)
        return timer

    def leave(self, timer: RequestTimer, *, has_ended: bool = False) -> None:
        """Count a request no more as waiting or pending, nor as open once it `has_ended`."""
        if has_ended and self.open.pop(timer.request_id, None) is not None:
            self.num_given_up -= timer.group.is_given_up
        waited = self.waiting.pop(timer.request_id, None) is not None
        pended = self.pending.pop(timer.request_id, None) is not None
        if waited or pended:
            self._count(timer, -waited, -pended * timer.num_prompt_tokens)

    def give_up(self, timers: Iterable[RequestTimer]) -> None:
        """Let these leave the queue for another client's: they do not count as waiting."""
        for timer in timers:
            timer.group.is_given_up = True
            self.num_given_up += 1
            self.leave(timer)

    def newest_waiting(self, client: str) -> list[RequestTimer]:
        """The sequences of the newest request of `client` that has not begun, but not of its only
        one."""
        own = [timer for timer in self.waiting.values() if timer.client == client]
        newest = next((timer for timer in reversed(own) if not timer.group.has_begun), None)
        timers = [timer for timer in own if newest and timer.group is newest.group]
        return timers if len(timers) < len(own) else []

    def _count(self, timer: RequestTimer, num_waiting: int, num_tokens: int) -> None:
        held = self.held.setdefault(timer.client, Held())
        held.num_waiting += num_waiting
        held.num_tokens += num_tokens
        self.num_pending_tokens += num_tokens
        if not held.num_waiting and not held.num_tokens:
            del self.held[timer.client]
