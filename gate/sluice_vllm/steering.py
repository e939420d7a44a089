"""What each step of vLLM's scheduler may do: its cap, order, tokens and held prompts. Pure.

The tokens are divided by `sluice_core.law`. vLLM serves its running requests in their order, then
those that wait. So decodes come first, each with its drafts, then prompts that are let go, then the
others. A held prompt stays among them with its place and its blocks: asked how many of its tokens
to compute, `trim` stops before its last one.
"""

from collections import deque
from collections.abc import Sequence
from itertools import chain, islice
from typing import Any, NamedTuple

from sluice_core.contract import StepModel
from sluice_core.law import Division, Law, Prompt, StepLoad
from sluice_core.port import EngineLimits
from sluice_core.steptime import MIN_JUDGED, REFIT_S, StepRecord, StepTimes

from .gaps import GapBook
from .order import DeadlineOrder, due_s

KV_FULL = 0.95
"""Share of KV cache in use from which on requests below the cap count as waiting for it, and nobody
is held."""


class RunningWork(NamedTuple):
    """vLLM's running requests: those that decode, their KV tokens, and those with a prompt left."""

    decodes: Sequence[Any]
    kv_tokens: int
    chunks: Sequence[Any]

    @classmethod
    def of(cls, running: Sequence[Any]) -> "RunningWork":
        """Tell them apart."""
        decodes = [request for request in running if not request.is_prefill_chunk]
        kv_tokens = sum(request.num_computed_tokens for request in decodes)
        return cls(decodes, kv_tokens, [r for r in running if r.is_prefill_chunk])


class Begun(NamedTuple):
    """What a step computes. Drafts count as prefill, whose work they are. `is_long`: as in
    `Division`."""

    decodes: int
    kv_tokens: int
    prefill: int
    is_long: bool

    @classmethod
    def of(cls, output: Any, scheduler: Any, *, is_long: bool) -> "Begun":
        """Count it, of vLLM's `output`."""
        per_decode, numbers = 1 + scheduler.num_spec_tokens, output.num_scheduled_tokens
        decodes = sum(num_tokens <= per_decode for num_tokens in numbers.values())
        kv_tokens = sum(scheduler.requests[name].num_computed_tokens for name in numbers)
        return cls(decodes, kv_tokens, output.total_num_scheduled_tokens - decodes, is_long)


class Steering:
    """Sets the limits of each step of `scheduler`, vLLM's. `may_cut`: prompts may be computed in
    chunks of any size. `may_hold`: they may stop one token before their end."""

    def __init__(
        self, scheduler: Any, limits: EngineLimits, *, may_cut: bool, may_hold: bool
    ) -> None:
        self._scheduler, self._may_cut, self._may_hold = scheduler, may_cut, may_hold
        self._most_tokens: int = scheduler.max_num_scheduled_tokens
        self._last_tokens = max(getattr(scheduler, "num_prefill_lookahead", 1), 1)
        self._order, self._gaps = DeadlineOrder(limits), GapBook()
        self._refitted_s = 0.0
        self._is_stuck = False
        self._expected_s = deque[float]()  # of each step under way
        self._turned_s = 0.0  # when the oldest of them began
        self.limits = limits
        self.times = StepTimes()
        self.law = Law(self.times)
        self.division = Division(self._most_tokens)
        self.num_steps = 0

    def prepare(self, now_s: float) -> None:
        """Set the limits of the next step, which begins after those under way. `now_s`: Unix
        time."""
        now_s = max(now_s, self._turned_s + sum(self._expected_s))
        scheduler, limits = self._scheduler, self.limits
        scheduler.max_num_active_reqs = limits.cap
        work = RunningWork.of(scheduler.running)
        num_running, num_waiting = scheduler.get_request_counts()
        num_free = max(limits.cap - num_running, 0) if num_waiting else 0
        if num_free and self._has_order:
            self._order.limits = limits
            price_s = self.law.price_s(limits, len(work.decodes), work.kv_tokens)
            self._order.arrange(scheduler.waiting, now_s, price_s, num_free)
        self.division = Division(self._most_tokens)
        if self._may_cut and (work.chunks or num_waiting):
            self.division = self.law.divide(limits, self._load(work, num_free, now_s))
        ending = [r for r in work.chunks if self._is_ending(r)]
        if work.chunks:
            scheduler.running[:] = [*work.decodes, *ending, *self._others(work)]
        tokens = self._reserved(work) + self.division.chunk + len(ending) * (self._last_tokens - 1)
        scheduler.max_num_scheduled_tokens = min(tokens, self._most_tokens)

    def trim(self, request: Any, num_computed: int, num_new: int) -> int:
        """The tokens of a prompt that vLLM may compute, of `num_new`.

        One that waits starts even if only its end is left: none would end vLLM's look at the queue.
        A request for one token never decodes.
        """
        if request.request_id not in self.division.held or request.max_tokens <= 1:
            return num_new
        fewer: int = request.num_tokens - self._last_tokens - num_computed
        if fewer <= 0 and request.status.name != "RUNNING":
            return num_new
        return max(min(num_new, fewer), 0)

    def scheduled(self, output: Any, now_s: float) -> Begun:
        """vLLM scheduled `output`, which begins now or after those under way.

        If it left tokens and places though requests wait, these lack KV blocks, and held prompts
        have some. If it has no tokens at all, they have all. Then nobody is held in the next step.
        """
        scheduler, num_tokens = self._scheduler, output.total_num_scheduled_tokens
        num_running, num_waiting = scheduler.get_request_counts()
        has_room = num_running < scheduler.max_num_active_reqs
        is_left_over = num_tokens < scheduler.max_num_scheduled_tokens
        lacks_blocks = num_waiting > 0 and has_room and is_left_over
        self._is_stuck = lacks_blocks or (not num_tokens and bool(self.division.held))
        begun = Begun.of(output, scheduler, is_long=self.division.is_long)
        if not self._expected_s:
            self._turned_s = now_s
        self._expected_s.append(self._expected(begun))
        return begun

    def ended(self, output: Any, now_s: float) -> None:
        """Book the tokens of the oldest step under way, which ended at `now_s`, Unix time."""
        self._expected_s.popleft()
        self._turned_s = now_s
        ids, requests = output.num_scheduled_tokens, self._scheduler.requests
        self._gaps.book(ids, requests, now_s, self.limits)

    def learn(self, record: StepRecord) -> StepModel | None:
        """Remember a step; returns the model if it was fitted anew: after each of the first steps,
        then once a second. vLLM brings no profile."""
        self.num_steps += 1
        self.times.add(record)
        if self.num_steps > MIN_JUDGED and record.at_s - self._refitted_s < REFIT_S:
            return None
        self._refitted_s = record.at_s
        return self.times.refit(record.at_s)

    @property
    def _has_order(self) -> bool:
        """True if the order is ours: vLLM may have been started with one of its own."""
        return self.limits.policy == "deadline" and isinstance(self._scheduler.waiting, deque)

    def _expected(self, begun: Begun) -> float:
        """Seconds that it will take; 0 without work or a model."""
        model, times = self.times.model, self.times
        if model is None or not (begun.decodes or begun.prefill):
            return 0.0
        work = begun.decodes, begun.kv_tokens, begun.prefill
        return times.slowdown * times.step_ms(model, *work) / 1e3

    def _reserved(self, work: RunningWork) -> int:
        num_drafts: int = self._scheduler.num_spec_tokens
        return len(work.decodes) * (1 + num_drafts)

    def _load(self, work: RunningWork, num_free: int, now_s: float) -> StepLoad:
        scheduler = self._scheduler
        queue = chain(getattr(scheduler, "kv_holding_waiting", ()), scheduler.waiting)
        candidates = chain(work.chunks, islice(queue, num_free)) if self._has_order else ()
        is_full = scheduler.kv_cache_manager.usage >= KV_FULL
        return StepLoad(
            now_s=now_s,
            prompts=[self._prompt(r) for r in candidates if not r.num_output_tokens],
            num_decodes=len(work.decodes),
            num_reserved=self._reserved(work),
            kv_tokens=work.kv_tokens,
            decodes=(self._gaps.of(request.request_id) for request in work.decodes),
            may_hold=self._may_hold and not (self._is_stuck or is_full),
        )

    def _prompt(self, request: Any) -> Prompt:
        arrived_s, due = request.arrival_time, due_s(request, self.limits)
        name, left, num_tokens = request.request_id, self._left(request), request.num_tokens
        return Prompt(name, left, num_tokens, arrived_s, due, request.priority)

    def _left(self, request: Any) -> int:
        """Tokens of its prompt to compute. Those in which it must end are one to the law."""
        left: int = request.num_tokens - request.num_computed_tokens
        return max(left - self._last_tokens + 1, 1)

    def _is_ending(self, request: Any) -> bool:
        return self._left(request) <= 1 and request.request_id not in self.division.held

    def _others(self, work: RunningWork) -> list[Any]:
        """Held ones by deadline, then those that will be late, whose blocks vLLM takes first."""
        held, others = self.division.held, [r for r in work.chunks if not self._is_ending(r)]
        first = sorted((r for r in others if r.request_id in held), key=self._due_s)
        return first + [r for r in others if r.request_id not in held]

    def _due_s(self, request: Any) -> float:
        return due_s(request, self.limits)
