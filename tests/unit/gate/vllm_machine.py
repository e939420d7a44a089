"""The made vLLM serves requests in virtual time; its steps cost what measured ones did."""

import random
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from sluice_core.contract import SMOOTH_SHARE
from sluice_core.port import EngineLimits
from sluice_core.steptime import StepRecord
from sluice_vllm.steering import Begun, Steering
from unit.gate.made_vllm import Request, Scheduler

EMPTY_MS = 1.0
MOST_EMPTY = 1000
"""Empty steps after which a run counts as hung."""


@dataclass(frozen=True, slots=True)
class Cost:
    """Milliseconds of a step. `noise`: standard deviation of its share; hiccups take `hiccup_ms`
    more in one step of `hiccup_every`."""

    step_ms: float = 25.0
    decode_ms: float = 1.0
    kv_ms: float = 0.0003
    prompt_ms: float = 0.28
    noise: float = 0.05
    hiccup_ms: float = 0.0
    hiccup_every: int = 500

    def of(self, decodes: int, kv_tokens: int, prompt: int, rng: random.Random) -> float:
        plain = self.decode_ms * decodes + self.kv_ms * kv_tokens + self.prompt_ms * prompt
        hiccup = self.hiccup_ms * (rng.randrange(self.hiccup_every) == 0)
        return (self.step_ms + plain) * max(rng.gauss(1.0, self.noise), 0.1) + hiccup


@dataclass(slots=True)
class Answer:
    """When its tokens came."""

    request: Request
    tokens_s: list[float] = field(default_factory=list)

    @property
    def first_s(self) -> float:
        return self.tokens_s[0] - self.request.arrival_time

    @property
    def gaps_ms(self) -> list[float]:
        pairs = zip(self.tokens_s, self.tokens_s[1:], strict=False)
        return [1e3 * (later - sooner) for sooner, later in pairs]

    def is_good(self, limits: EngineLimits) -> bool:
        """Its first token in time, and its mean gap within the target."""
        assert limits.ttft_ms is not None
        assert limits.itl_ms is not None
        mean = sum(self.gaps_ms) / max(len(self.gaps_ms), 1)
        return 1e3 * self.first_s <= limits.ttft_ms and mean <= limits.itl_ms

    def is_smooth(self, limits: EngineLimits) -> bool:
        """Its first token in time, and hardly a gap over the target."""
        assert limits.ttft_ms is not None
        late = sum(gap > (limits.itl_ms or 0.0) for gap in self.gaps_ms)
        in_time = 1e3 * self.first_s <= limits.ttft_ms
        return in_time and late <= int(SMOOTH_SHARE * len(self.gaps_ms))


@dataclass(slots=True)
class _UnderWay:
    output: Any
    begun: Begun
    started_s: float
    ends_s: float


class Machine:
    """Serves requests with `steering`, or as vLLM comes; up to `at_once` steps are under way.

    `stalls_ms`: by the number of a step. `aborts`: how many requests leave while they are held.
    """

    def __init__(
        self, scheduler: Scheduler, steering: Steering | None, cost: Cost, *, at_once: int = 1
    ) -> None:
        self.scheduler, self.steering = scheduler, steering
        self._cost, self._at_once = cost, at_once
        self._rng = random.Random(7)
        self._under_way = deque[_UnderWay]()
        self._free_s = self._ended_s = 0.0
        self.now_s, self.num_steps, self.num_held = 0.0, 0, 0
        self.answers: dict[str, Answer] = {}
        self.stalls_ms: dict[int, float] = {}
        self.aborts = 0
        self.aborted: set[str] = set()
        if steering is not None:
            scheduler.trim = steering.trim

    def serve(self, requests: Iterable[Request]) -> "Machine":
        """All to their ends, in the order in which they come."""
        coming = deque(requests)
        while coming or self.scheduler.requests or self._under_way:
            if not self.scheduler.requests and not self._under_way:
                self.now_s = max(self.now_s, coming[0].arrival_time)
            while coming and coming[0].arrival_time <= self.now_s:
                self.scheduler.come(coming.popleft())
            self.step()
        return self

    def step(self) -> None:
        """Begin a step if one may, and end the oldest if no other may begin."""
        num_free = self._at_once - len(self._under_way)
        if num_free and self.scheduler.requests and self._begin() and num_free > 1:
            return
        self._end()
        assert self.scheduler.num_empty < MOST_EMPTY, "it spins"

    def _begin(self) -> bool:
        if self.steering is not None:
            self.steering.prepare(self.now_s)
        output = self.scheduler.schedule()
        if self.steering is not None:
            begun = self.steering.scheduled(output, self.now_s)
            self.num_held += bool(self.steering.division.held)
        else:
            begun = Begun.of(output, self.scheduler, is_long=False)
        work = begun.decodes, begun.kv_tokens, begun.prefill
        ms = self._cost.of(*work, self._rng) + self.stalls_ms.get(self.num_steps, 0.0)
        if not output.total_num_scheduled_tokens:
            ms = EMPTY_MS
        self._free_s = max(self._free_s, self.now_s) + ms / 1e3
        self._under_way.append(_UnderWay(output, begun, self.now_s, self._free_s))
        self.num_steps += 1
        self._abort()
        return bool(output.total_num_scheduled_tokens)

    def _abort(self) -> None:
        held = self.steering.division.held if self.steering else ()
        running = (request for request in self.scheduler.running if request.request_id in held)
        leaving = next(running, None) if len(self.aborted) < self.aborts else None
        if leaving is not None:
            self.aborted.add(leaving.request_id)
            self.scheduler.abort(leaving)

    def _end(self) -> None:
        step = self._under_way.popleft()
        self.now_s = max(self.now_s, step.ends_s)
        for name in step.output.sampled:
            if (request := self.scheduler.requests.get(name)) is not None:
                self.answers.setdefault(name, Answer(request)).tokens_s.append(self.now_s)
        self.scheduler.end(step.output)
        if self.steering is not None:
            self.steering.ended(step.output, self.now_s)
            if step.output.total_num_scheduled_tokens:
                self._learn(step, self.steering)
        self._ended_s = self.now_s

    def _learn(self, step: _UnderWay, steering: Steering) -> None:
        step_ms = 1e3 * (self.now_s - max(step.started_s, self._ended_s))
        work = step.begun.decodes, step.begun.kv_tokens, step.begun.prefill
        steering.learn(StepRecord(self.now_s, *work, step_ms))
