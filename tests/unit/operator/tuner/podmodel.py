"""A model of one worker: queue, cap, KV memory, steps, and the ticks that it reports.

No clock of its own and no I/O. A pod admits from its FIFO queue below its cap and while KV memory
lasts, runs one step after another (all decodes, then one chunk of prefill sized for the inter-token
target), and closes a `contract.Tick` every 2 s. Times are seconds, step parameters milliseconds.
"""

import heapq
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from math import ceil, exp, inf, log, sqrt
from random import Random

from sluice_core.contract import (
    SKETCH_GAMMA,
    TICK_RING,
    Causes,
    Evidence,
    FirstTokens,
    Lengths,
    MemoryReport,
    Requests,
    RuntimeConfig,
    Slo,
    StepModel,
    Tick,
    TokenGaps,
    Waiting,
)
from sluice_operator.tuner.types import PodView, Targets

LOG_GAMMA = log(SKETCH_GAMMA)


@dataclass(frozen=True, slots=True)
class Shape:
    """What a pod is made of. step_ms = a + b * decodes + c * kv_tokens + d * prefill_tokens.

    `noise`: sigma of the step time's log-normal factor. A step stalls for `stall_ms` with chance
    `stall_chance`, as a CPU quota does. `reports_model`: whether evidence carries the step model.
    `slow_when_busy`: factor on steps at a quarter of the cap and above, which the reported model
    does not know: a CPU quota.
    """

    a: float
    b: float
    c: float
    d: float
    kv_tokens: int = 100_000
    ceiling: int = 64
    max_num_batched_tokens: int = 2048
    min_chunk_tokens: int = 16
    max_num_queued: int = 1024
    noise: float = 0.05
    stall_ms: float = 0.0
    stall_chance: float = 0.0
    cold_start_s: float = 20.0
    reports_model: bool = True
    slow_when_busy: float = 1.0


@dataclass(frozen=True, slots=True)
class Request:
    """One line of a trace. `cached_tokens`: what the prefix cache gives of its prompt."""

    t_s: float
    prompt_tokens: int
    max_tokens: int
    cached_tokens: int = 0


@dataclass(slots=True)
class Job:
    """A request in a pod. `counted`: whether it is already booked as over its first-token
    target."""

    request: Request
    arrived_s: float
    counted: bool = False
    admitted_s: float = 0.0
    waited_for_kv: bool = False
    to_prefill: int = 0
    first_token_s: float = 0.0
    slow_steps_before: int = 0


@dataclass(slots=True)
class Samples:
    """Counts of one kind in the open tick."""

    n: int = 0
    over: int = 0
    sketch: dict[int, int] = field(default_factory=dict)

    def add(self, value_ms: float, target_ms: float | None, count: int = 1) -> bool:
        """Book `count` values; whether they are over."""
        is_over = target_ms is not None and value_ms > target_ms
        self.n += count
        self.over += count * is_over
        self.note(value_ms, count)
        return is_over

    def note(self, value_ms: float, count: int = 1) -> None:
        """Put values into the sketch alone: they were counted before."""
        bucket = ceil(log(max(value_ms, 1e-3)) / LOG_GAMMA)
        self.sketch[bucket] = self.sketch.get(bucket, 0) + count


@dataclass(slots=True)
class OpenTick:
    """What a pod counts until the tick is closed."""

    ttft: Samples = field(default_factory=Samples)
    itl: Samples = field(default_factory=Samples)
    e2e: Samples = field(default_factory=Samples)
    by: dict[str, int] = field(default_factory=lambda: dict.fromkeys(Causes.__struct_fields__, 0))
    over_after_over: int = 0
    n_at_cap: int = 0
    over_at_cap: int = 0
    arrivals: int = 0
    refused: int = 0
    finished: int = 0
    good: int = 0
    smooth: int = 0
    steps: int = 0
    decodes: int = 0
    prefill_tokens: int = 0
    generated_tokens: int = 0
    busy_s: float = 0.0
    throttled_s: float = 0.0
    max_running: int = 0
    settled: bool = True


@dataclass(frozen=True, slots=True)
class Step:
    """A step under way."""

    duration_ms: float
    stalled_ms: float
    chunks: tuple[tuple[Job, int], ...]


class Pod:
    """One worker. `patch`, `receive`, `begin_step`, `end_step`, `close_tick` are all that
    happens."""

    def __init__(
        self, name: str, shape: Shape, targets: Targets, cap: int, epoch: int, seed: int
    ) -> None:
        self.name, self.shape, self.targets = name, shape, targets
        self.cap, self.epoch = cap, epoch
        self.random = Random(seed)
        self.slowness = 1.0
        self.terminating = False
        self.deaf = self.silent = False  # misses what is sent to it; answers nothing at all
        self.last_said: PodView | None = None
        self.ready_s: float | None = None
        self.waiting: deque[Job] = deque()
        self.prefilling: deque[Job] = deque()
        self.decoding: list[tuple[int, int, Job]] = []
        self.num_steps = self.num_slow_steps = self.num_admitted = 0
        self.kv_reserved = self.kv_used = 0
        self.step: Step | None = None
        self.last_step_was_slow = False
        self.draining_to_cap = False
        self.tick, self.ticks = OpenTick(), deque[Tick](maxlen=TICK_RING)
        self.total_finished = self.total_good = self.total_smooth = self.total_arrivals = 0
        self.tokens_finished = self.squares_finished = 0

    @property
    def running(self) -> int:
        """Sequences admitted and not finished."""
        return len(self.prefilling) + len(self.decoding)

    @property
    def is_idle(self) -> bool:
        """Whether nothing runs or waits."""
        return not (self.running or self.waiting)

    def patch(self, cap: int, epoch: int) -> None:
        """Change the cap live; the excess drains, and the tick is not settled."""
        if self.deaf or self.silent:
            return
        self.cap, self.epoch = cap, epoch
        self.tick.settled = False
        self.draining_to_cap = self.running > cap

    def receive(self, request: Request, now: float) -> None:
        """Queue a request, or refuse it when the queue is full."""
        self.tick.arrivals += 1
        self.total_arrivals += 1
        if len(self.waiting) >= self.shape.max_num_queued:
            self._drop(Job(request, now), now)
        else:
            self.waiting.append(Job(request, now))

    def _drop(self, sequence: Job, now: float) -> None:
        self.tick.refused += 1
        if not sequence.counted:
            self.tick.ttft.n += 1
            self.tick.ttft.over += 1

    def begin_step(self, now: float) -> float | None:
        """Admit and start a step; its end, or None when there is nothing to run."""
        if self.step is not None:
            return None
        self._admit(now)
        if not self.running:
            return None
        chunks = tuple(self._chunks())
        prefill = sum(tokens for _, tokens in chunks)
        mean_ms = self._mean_ms(len(self.decoding), prefill) * self.slowness
        if 4 * self.running >= self.cap:
            mean_ms *= self.shape.slow_when_busy
        stalls = self.random.random() < self.shape.stall_chance
        stall_ms = self.shape.stall_ms if stalls else 0.0
        noise = exp(self.random.gauss(0, self.shape.noise))
        self.step = Step(mean_ms * noise + stall_ms, stall_ms, chunks)
        self.tick.max_running = max(self.tick.max_running, self.running)
        return now + self.step.duration_ms / 1000

    def _mean_ms(self, decodes: int, prefill_tokens: int) -> float:
        shape = self.shape
        return shape.a + shape.b * decodes + shape.c * self.kv_used + shape.d * prefill_tokens

    def _admit(self, now: float) -> None:
        while self.waiting and self.running < self.cap:
            head = self.waiting[0]
            late_ms = (now - head.arrived_s) * 1000
            if self.targets.overload == "Shed" and late_ms > (self.targets.ttft_ms or 1e9):
                self._drop(self.waiting.popleft(), now)
                continue
            if self.kv_reserved + self._kv_needed(head) > self.shape.kv_tokens:
                head.waited_for_kv = True
                return
            self.waiting.popleft()
            self.kv_reserved += self._kv_needed(head)
            self.kv_used += head.request.cached_tokens
            head.admitted_s = now
            head.to_prefill = max(1, head.request.prompt_tokens - head.request.cached_tokens)
            self.prefilling.append(head)

    def _kv_needed(self, sequence: Job) -> int:
        return sequence.request.prompt_tokens + sequence.request.max_tokens

    def _chunks(self) -> Iterable[tuple[Job, int]]:
        """The prefill of this step: as much as keeps its P99.9 within the inter-token target."""
        budget = self.shape.max_num_batched_tokens - len(self.decoding)
        if self.targets.itl_ms is not None and self.decoding:
            tail = exp(3.09 * self.shape.noise)
            spare_ms = self.targets.itl_ms / tail - self._mean_ms(len(self.decoding), 0)
            fits = int(spare_ms / self.shape.d) if self.shape.d else budget
            budget = min(budget, max(fits, self.shape.min_chunk_tokens))
        for sequence in self.prefilling:
            if budget <= 0:
                return
            tokens = min(budget, sequence.to_prefill)
            budget -= tokens
            yield sequence, tokens

    def end_step(self, now: float) -> None:
        """Hand out the step's tokens."""
        step, self.step = self.step, None
        if step is None:
            return
        decodes = len(self.decoding)
        self._book_step(step, decodes)
        self.num_steps += 1
        self.kv_used += decodes + sum(tokens for _, tokens in step.chunks)
        while self.decoding and self.decoding[0][0] <= self.num_steps:
            self._finish(heapq.heappop(self.decoding)[2], now)
        for sequence, tokens in step.chunks:
            sequence.to_prefill -= tokens
        while self.prefilling and self.prefilling[0].to_prefill <= 0:
            self._first_token(self.prefilling.popleft(), now)
        if self.draining_to_cap and self.running <= self.cap:
            self.draining_to_cap = False

    def _book_step(self, step: Step, decodes: int) -> None:
        tick, target_ms = self.tick, self.targets.itl_ms
        at_cap = self.running >= 0.9 * self.cap
        is_slow = bool(decodes) and tick.itl.add(step.duration_ms, target_ms, decodes)
        tick.over_after_over += decodes * (is_slow and self.last_step_was_slow)
        tick.n_at_cap += decodes * at_cap
        tick.over_at_cap += decodes * (at_cap and is_slow)
        self.num_slow_steps += is_slow
        self.last_step_was_slow = is_slow
        tick.steps += 1
        tick.decodes += decodes
        tick.generated_tokens += decodes
        tick.prefill_tokens += sum(tokens for _, tokens in step.chunks)
        tick.busy_s += step.duration_ms / 1000
        tick.throttled_s += step.stalled_ms / 1000

    def _first_token(self, sequence: Job, now: float) -> None:
        sequence.first_token_s = now
        self.tick.generated_tokens += 1
        ttft_ms = (now - sequence.arrived_s) * 1000
        if sequence.counted:
            self.tick.ttft.note(ttft_ms)
        elif self.tick.ttft.add(ttft_ms, self.targets.ttft_ms):
            self._book_miss(sequence, now)
        sequence.slow_steps_before = self.num_slow_steps
        self.num_admitted += 1
        left = sequence.request.max_tokens - 1
        if left <= 0:
            self._finish(sequence, now)
        else:
            heapq.heappush(self.decoding, (self.num_steps + left, self.num_admitted, sequence))

    def _book_miss(self, sequence: Job, now: float) -> None:
        """To the largest part of the time: the wait or the prefill."""
        sequence.counted = True
        admitted_s = sequence.admitted_s or now
        waited_s, prefill_s = admitted_s - sequence.arrived_s, now - admitted_s
        wait = "kv" if sequence.waited_for_kv else "cap"
        self.tick.by[wait if waited_s >= prefill_s else "prefill"] += 1

    def _finish(self, sequence: Job, now: float) -> None:
        request, tick = sequence.request, self.tick
        self.kv_reserved -= self._kv_needed(sequence)
        self.kv_used -= request.prompt_tokens + request.max_tokens - 1
        whole_ms = (now - sequence.arrived_s) * 1000
        tick.e2e.add(whole_ms, self.targets.e2e_ms)
        tick.finished += 1
        self.tokens_finished += request.max_tokens + request.prompt_tokens
        self.squares_finished += (request.max_tokens + request.prompt_tokens) ** 2
        gaps = max(1, request.max_tokens - 1)
        first_ms = (sequence.first_token_s - sequence.arrived_s) * 1000
        in_time = first_ms <= (self.targets.ttft_ms or inf) and whole_ms <= (
            self.targets.e2e_ms or inf
        )
        mean_gap_ms = (now - sequence.first_token_s) * 1000 / gaps
        slow = self.num_slow_steps - sequence.slow_steps_before
        good = in_time and mean_gap_ms <= (self.targets.itl_ms or 1e12)
        smooth = in_time and slow <= gaps // 100
        tick.good += good
        tick.smooth += smooth
        self.total_finished += 1
        self.total_good += good
        self.total_smooth += smooth

    def close_tick(self, now: float, seq: int) -> None:
        """Close the open tick; who waits past the target by now is booked as over, once."""
        if self.targets.ttft_ms is not None:
            for sequence in self.waiting:
                if sequence.counted:
                    continue
                if (now - sequence.arrived_s) * 1000 <= self.targets.ttft_ms:
                    break
                self.tick.ttft.n += 1
                self.tick.ttft.over += 1
                sequence.waited_for_kv |= self.waiting[0].waited_for_kv
                self._book_miss(sequence, now)
        tick, self.tick = self.tick, OpenTick(settled=not self.draining_to_cap)
        self.ticks.append(self._closed(tick, now, seq))

    def _closed(self, tick: OpenTick, now: float, seq: int) -> Tick:
        return Tick(
            seq=seq,
            t_s=now,
            epoch=self.epoch,
            boot_id=self.name,
            settled=tick.settled and not self.draining_to_cap,
            cap=self.cap,
            arrivals=tick.arrivals,
            refused=tick.refused,
            finished=tick.finished,
            good=tick.good,
            smooth=tick.smooth,
            ttft=FirstTokens(tick.ttft.n, tick.ttft.over, Causes(**tick.by), tick.ttft.sketch),
            itl=TokenGaps(
                tick.itl.n,
                tick.itl.over,
                tick.over_after_over,
                tick.n_at_cap,
                tick.over_at_cap,
                tick.itl.sketch,
            ),
            e2e=Requests(tick.e2e.n, tick.e2e.over, tick.e2e.sketch),
            steps=tick.steps,
            decodes=tick.decodes,
            prefill_tokens=tick.prefill_tokens,
            generated_tokens=tick.generated_tokens,
            busy_s=tick.busy_s,
            throttled_s=tick.throttled_s,
            running=self.running,
            max_running=tick.max_running,
            waiting=self._waiting(),
        )

    def _waiting(self) -> Waiting:
        """All wait for what the head waits for: below the cap, KV memory or just a step's end."""
        num = len(self.waiting)
        if num and self.running < self.cap:
            return Waiting(0, num if self.waiting[0].waited_for_kv else 0)
        return Waiting(num, 0)

    def view(self, now: float) -> PodView:
        """What the operator sees of this pod: of a silent one, what it last said."""
        ready = self.ready_s is not None and now >= self.ready_s
        if not ready:
            return PodView(self.name, ready, self.terminating, None, None, None)
        if self.last_said is None or not self.silent:
            self.last_said = PodView(
                self.name, ready, self.terminating, self._evidence(), self._config(), self.ready_s
            )
        return replace(self.last_said, terminating=self.terminating)

    def _evidence(self) -> Evidence:
        shape, slow = self.shape, self.slowness
        mean_stall_ms = shape.stall_chance * shape.stall_ms
        model = StepModel(
            shape.a * slow + mean_stall_ms,
            shape.b * slow,
            shape.c * slow,
            shape.d * slow,
            self.num_steps,
            self._residual(),
        )
        return Evidence(
            boot_id=self.name,
            started_s=self.ready_s or 0.0,
            ticks=list(self.ticks),
            lengths=self._lengths(),
            memory=MemoryReport({}, {}, shape.kv_tokens),
            step_model=model if shape.reports_model else None,
        )

    def _lengths(self) -> Lengths:
        if not (n := self.total_finished):
            return Lengths(0.0, 0.0, 0)
        mean = self.tokens_finished / n
        return Lengths(mean, sqrt(max(0.0, self.squares_finished / n - mean**2)), n)

    def _residual(self) -> float:
        """P99 of measured over predicted step time, as a worker would measure it."""
        if self.shape.stall_chance > 0.01:
            typical_ms = self._mean_ms(max(1, len(self.decoding)), 0)
            return 1 + self.shape.stall_ms / typical_ms
        return exp(2.326 * self.shape.noise)

    def _config(self) -> RuntimeConfig:
        targets = self.targets
        return RuntimeConfig(
            epoch=self.epoch,
            cap=self.cap,
            max_num_batched_tokens=self.shape.max_num_batched_tokens,
            slo=Slo(targets.ttft_ms, targets.itl_ms, targets.e2e_ms),
            overload=targets.overload,
            ceiling=self.shape.ceiling,
            running=self.running,
            waiting=self._waiting(),
            boot_id=self.name,
        )
