"""The worker's own scheduler, block pool and recorder in virtual time: what the twin must equal."""

from collections import deque
from dataclasses import dataclass, field

from sluice.simulate.noise import Noise
from sluice.simulate.params import Params
from sluice.simulate.profile import profile, profile_records
from sluice.simulate.scraped import REFIT_S
from sluice.simulate.trace import Request
from sluice_worker.blocks import BlockPool
from sluice_worker.contract import Slo, Tick
from sluice_worker.evidence import Flight, Recorder
from sluice_worker.scheduler import Scheduler
from sluice_worker.sequence import Sequence
from sluice_worker.step import Outcome, Step
from sluice_worker.steptime import StepRecord
from sluice_worker.wire import Limits, Snapshot, StepReport, Submit, TokenOut, packed


def tokens_of(request: Request, number: int) -> list[int]:
    """A prompt: what it shares, then tokens of its own."""
    unit = request.prefix_unit
    shared = [
        hash((request.prefix[i // unit], i)) % (1 << 30) + (1 << 30)
        for i in range(request.prefix_tokens)
    ]
    own = range(request.prompt_tokens - len(shared))
    return shared + [((number + 1) * 1_000_000 + i) % (1 << 30) for i in own]


@dataclass
class RealPod:
    """As `sluice.simulate.pod.Pod`, made of the worker's own parts; slower by far."""

    params: Params
    slo: Slo
    cap: int
    seed: int = 0
    now: float = 0.0
    ended: dict[str, tuple[float, float, int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        params = self.params
        self.noise = Noise(params, self.seed)
        self.times = profile(profile_records(params, self.seed))
        self.pool = BlockPool(
            params.kv_tokens // params.block_size,
            params.block_size,
            prefix_caching=params.prefix_caching,
        )
        self.scheduler = Scheduler(
            self.pool, self._limits(1), max_model_len=1 << 30, vocab_size=1 << 31
        )
        self.recorder = Recorder("pod-1", 0.0, 0.0)
        self.recorder.start(1, self.cap, self.slo)
        self.recorder.step_model = self.times.model
        self.flights: dict[str, Flight] = {}
        self.inbox: list[Sequence] = []
        self.under_way: tuple[Step, float, float, float] | None = None
        self.num_steps = self.num_tokens = self.num_arrived = 0
        self.refitted_at = 0.0

    def _limits(self, epoch: int) -> Limits:
        return Limits(epoch, self.cap, self.params.max_num_batched_tokens, self.slo.itl_ms)

    def patch(self, cap: int, epoch: int, now_s: float) -> None:
        self._advance(now_s)
        self.cap = cap
        self.scheduler.limits = self._limits(epoch)
        self.recorder.configure(epoch, cap, self.slo)

    def run(self, until_s: float, arrivals: deque[Request]) -> None:
        while True:
            if self.under_way is None:
                if not (self.scheduler.has_work or self.inbox):
                    if not arrivals or arrivals[0].t_s > until_s:
                        break
                    self.now = max(self.now, arrivals[0].t_s)
                    self._receive(arrivals.popleft())
                    continue
                self._begin()
                continue
            ends_s = self.under_way[-1]
            while arrivals and arrivals[0].t_s <= min(ends_s, until_s):
                self._receive(arrivals.popleft())
            if ends_s > until_s:
                break
            self._end(*self.under_way)
        self._advance(until_s)

    def _receive(self, request: Request) -> None:
        self._advance(request.t_s)
        name = str(self.num_arrived)
        prompt = tokens_of(request, self.num_arrived)
        self.num_arrived += 1
        submit = Submit(name, packed(prompt), request.max_tokens, 0.0, 0, True, [], 0, request.t_s)
        if self.scheduler.can_admit(submit) is not None:
            self.recorder.refuse()
            return
        self.flights[name] = self.recorder.arrive(name, request.t_s, request.t_s, len(prompt))
        self.inbox.append(Sequence(submit, 0))

    def _advance(self, now_s: float) -> None:
        if self.recorder.is_due(now_s):
            self.recorder.advance(now_s, now_s, 0.0)

    def _begin(self) -> None:
        for sequence in self.inbox:
            self.scheduler.add(sequence, self.now)
        self.inbox.clear()
        step = self.scheduler.schedule(self.now, self._chunk_limit)
        assert step.works
        self.num_steps += 1
        factor = self.noise.factor(self.now)
        mean = self.params.step_ms(step.num_decodes, step.num_kv_tokens, step.num_prefill_tokens)
        step_ms = mean * factor
        ends_s = self.now + (step_ms + self.params.between_ms) / 1e3
        self.under_way = (step, self.now, step_ms, ends_s)

    def _chunk_limit(self, decodes: int, kv_tokens: int) -> int:
        return self.times.chunk_limit(self.slo.itl_ms, decodes, kv_tokens)

    def _end(self, step: Step, started_s: float, step_ms: float, now_s: float) -> None:
        self._advance(now_s)
        self.now, self.under_way = now_s, None
        sampled = [self._next_token() for work in step.works if work.samples]
        outcomes = self.scheduler.commit(step, sampled, now_s)
        assert self.scheduler.check_integrity() is None
        for outcome in outcomes:
            self._book(outcome, step, now_s)
        model = self._learn(step, step_ms, now_s)
        self.recorder.step(self._report(step, outcomes, started_s, step_ms / 1e3, model))

    def _next_token(self) -> int:
        self.num_tokens += 1
        return self.num_tokens + (1 << 60)

    def _book(self, outcome: Outcome, step: Step, now_s: float) -> None:
        sequence = outcome.sequence
        flight = self.flights[sequence.request_id]
        if flight.first_s is None:
            self.recorder.first_token(flight, now_s, sequence.time_spent(now_s))
        else:
            self.recorder.next_token(flight, now_s, at_cap=step.at_cap)
        if outcome.finish_reason is not None:
            self.recorder.finish(flight, now_s)
            self.ended[sequence.request_id] = (flight.first_s or 0.0, now_s, flight.num_gaps_over)

    def _learn(self, step: Step, step_ms: float, now_s: float) -> object:
        kinds = (step.num_decodes, step.num_kv_tokens, step.num_prefill_tokens)
        self.times.add(StepRecord(now_s, *kinds, step_ms))
        if now_s - self.refitted_at < REFIT_S:
            return None
        self.refitted_at = now_s
        return self.times.refit(now_s)

    def _report(
        self, step: Step, outcomes: list[Outcome], started_s: float, step_s: float, model: object
    ) -> StepReport:
        scheduler = self.scheduler
        state = Snapshot(
            len(scheduler.running), scheduler.waiting_cap, scheduler.waiting_kv, 0, 0, 0, 0, 0, 0, 0
        )
        return StepReport(
            tokens=[TokenOut("", 0, None, None)] * len(outcomes),
            epoch=step.limits.epoch,
            started_s=started_s,
            step_s=step_s,
            num_decodes=step.num_decodes,
            num_kv_tokens=step.num_kv_tokens,
            num_prefill_tokens=step.num_prefill_tokens,
            num_running=step.num_running,
            at_cap=step.at_cap,
            is_slow=self.times.is_slow,
            snapshot=state,
            step_model=self.times.model if model is not None else None,
        )

    def ticks(self) -> list[Tick]:
        """All closed ticks."""
        return self.recorder.evidence(0).ticks
