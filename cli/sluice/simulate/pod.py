"""One worker in virtual time: its own scheduler, block pool, recorder and step fit.

The rest of the engine and the API process is modelled here. It hands over the requests that came
between two steps, refuses and sheds, and books each step when its time is over. No model runs: a
step takes the time that the service's parameters and their noise give.
"""

from collections import deque
from math import inf
from typing import ClassVar, NamedTuple

from sluice_core.contract import MemoryReport, RuntimeConfig, Slo, StepModel, Waiting
from sluice_core.law import Law
from sluice_core.model.sizing import blocks_for
from sluice_core.port import EngineLimits, EngineLoad, EngineStep
from sluice_core.steptime import REFIT_S, StepRecord, StepTimes
from sluice_core.wire import Submit, packed
from sluice_core.work import TOKEN_BYTES, Deadlines
from sluice_frontend.evidence.requests import RequestTimer
from sluice_frontend.serving.bounds import is_full, unreachable
from sluice_frontend.serving.forecast import Forecast
from sluice_operator.tuner import PodView
from sluice_worker.scheduling.blocks import BlockPool
from sluice_worker.scheduling.scheduler import Scheduler
from sluice_worker.scheduling.sequence import Sequence
from sluice_worker.scheduling.step import BookedToken, Step

from .delays import Delays
from .noise import Noise
from .params import Params
from .profile import profile, profile_records
from .recording import Recording, Totals
from .trace import Request

BEAT_S = 0.1
"""Seconds between two searches of the worker for hopeless requests."""
FIRST_SHARED = 1 << 30
"""First token id of shared prefixes, one for each name; ids below are of requests, one for each."""


class SimulatedEnd(NamedTuple):
    """The end of a request. `first_s`, the time of its first token, is infinite without one."""

    t_s: float
    first_s: float
    last_s: float
    num_tokens: int
    num_gaps_over: int


class UnderWay(NamedTuple):
    """A step that has begun. `ends_s`: when its tokens are booked and the next one begins."""

    step: Step
    started_s: float
    step_ms: float
    ends_s: float


class SimulatedPod:
    """A worker, step by step. `run` makes time pass, `patch` changes its cap. `is_profiled`: its
    start-up profile predicts the first cap; else that is the ceiling. `keeps_gaps`: the target of
    gaps sizes its chunks."""

    is_profiled: ClassVar[bool] = True
    keeps_gaps: ClassVar[bool] = True

    def __init__(
        self,
        name: str,
        params: Params,
        slo: Slo,
        cap: int,
        epoch: int,
        start_s: float = 0.0,
        created_s: float = 0.0,
        seed: int = 0,
    ) -> None:
        self.name, self.params, self.ready_s, self.created_s = name, params, start_s, created_s
        self.cap, self.epoch, self.slo = cap, epoch, slo
        self.noise, self.delays = Noise(params, seed), Delays(params, seed)
        self.profiled = profile_records(params, seed)
        self.times = profile(params, self.profiled) if self.is_profiled else StepTimes()
        self.law = Law(self.times)
        self.terminating = False
        self.recorder = Recording(name, start_s, start_s)
        self.recorder.ticks.start(epoch, cap, slo)
        self.recorder.engine.step_model = self.times.model
        num_blocks, caching = params.kv_tokens // params.block_size, params.prefix_caching
        self.recorder.engine.memory = MemoryReport({}, {}, num_blocks * params.block_size)
        self.pool = BlockPool(num_blocks, params.block_size, prefix_caching=caching)
        self.scheduler = Scheduler(
            self.pool, self._limits(), max_model_len=params.kv_tokens, vocab_size=2 * FIRST_SHARED
        )
        self.now = self._refitted_s = self._shed_s = start_s
        self.under_way: UnderWay | None = None
        self.inbox: list[Sequence] = []
        self.open: dict[str, RequestTimer] = {}
        self.done: list[RequestTimer] = []
        self._num_let_in = self.num_refused = 0
        self._shared: dict[str | int, int] = {}  # name of a prefix -> the token that fills it

    def _limits(self) -> EngineLimits:
        itl_ms = self.slo.itl_ms if self.keeps_gaps else None
        return EngineLimits(
            self.epoch, self.cap, self.params.max_num_batched_tokens, itl_ms,
            self.slo.ttft_ms, self.params.order,
            self.params.hold_share,
        )  # fmt: skip

    @property
    def is_idle(self) -> bool:
        """True if nothing runs or waits."""
        return not self.open

    @property
    def num_preemptions(self) -> int:
        """Number of times that a sequence had to give its blocks back."""
        return self.scheduler.counters.num_preemptions

    @property
    def totals(self) -> Totals:
        """Sums over all closed ticks."""
        return self.recorder.totals

    def outcomes(self) -> tuple[list[SimulatedEnd], list[SimulatedEnd]]:
        """Requests that ended, in that order, and those that are still open."""
        return [_outcome(f) for f in self.done], [_outcome(f) for f in self.open.values()]

    # From outside

    def run(self, until_s: float, arrivals: deque[Request]) -> None:
        """Let everything happen up to `until_s`, including the first of `arrivals`."""
        while True:
            if self.under_way is None:
                if not (self.scheduler.has_work or self.inbox):
                    if not arrivals or arrivals[0].t_s > until_s:
                        break
                    self.now = max(self.now, arrivals[0].t_s)
                    self._receive(arrivals.popleft())
                    continue
                self._begin(self.now)
                continue
            ends_s = self.under_way.ends_s
            while arrivals and arrivals[0].t_s <= min(ends_s, until_s):
                self._receive(arrivals.popleft())
            if ends_s > until_s:
                break
            self._end(*self.under_way)
        self._advance(until_s)

    def patch(self, cap: int, epoch: int, now_s: float) -> None:
        """Set a new cap, from the next step on; the excess drains."""
        self._advance(now_s)
        self.cap, self.epoch = cap, epoch
        self.scheduler.limits = self._limits()
        self.recorder.ticks.configure(epoch, cap, self.slo)

    def view(self, now_s: float) -> PodView:
        if now_s < self.ready_s:
            return PodView(self.name, False, False, None, None, self.created_s)
        recorder = self.recorder
        state = recorder.engine.load
        config = RuntimeConfig(
            epoch=self.epoch,
            cap=self.cap,
            max_num_batched_tokens=self.params.max_num_batched_tokens,
            slo=self.slo,
            overload=self.params.overload,
            scheduling_policy=self.params.order,
            ceiling=self.params.ceiling,
            running=state.running,
            waiting=Waiting(state.waiting_cap, state.waiting_kv),
            boot_id=self.name,
        )
        ready, evidence = not self.terminating, recorder.evidence(0)
        return PodView(self.name, ready, self.terminating, evidence, config, self.created_s, now_s)

    def _advance(self, now_s: float) -> None:
        if self.recorder.ticks.is_due(now_s):
            self.recorder.advance(now_s, now_s, 0.0)

    def _receive(self, request: Request) -> None:
        self._advance(request.t_s)
        params, num_open = self.params, len(self.open)
        total = blocks_for(request.prompt_tokens + request.max_tokens, params.block_size)
        if total > self.pool.num_total or is_full(
            1, num_open, self.cap, self.recorder.engine.load, params.max_num_queued
        ):
            self.recorder.refuse()
            self.num_refused += 1
        elif params.overload != "Shed" or not self._refuse_if_late(request):
            self._let_in(request)

    def _refuse_if_late(self, request: Request) -> bool:
        """True if it is refused on arrival, because it would be shed later."""
        state, recorder = self.recorder.engine.load, self.recorder
        forecast = Forecast(
            num_open=len(self.open),
            num_running=state.running,
            num_waiting=state.waiting,
            cap=self.cap,
            service_s=recorder.recent.service_s(),
            step_model=recorder.engine.step_model,
            kv_per_seq=0.0,  # without effect on the wait
        )
        prefill_ms = recorder.engine.prefill_ms(request.prompt_tokens, request.t_s)
        problem = unreachable(
            Deadlines(), self.slo.ttft_ms, forecast, 1, age_ms=0.0, prefill_ms=prefill_ms
        )
        if problem is None:
            return False
        recorder.refuse_for_deadline(1e3 * forecast.wait_s(1), prefill_ms)
        self.num_refused += 1
        return True

    def _let_in(self, request: Request) -> None:
        number, now_s = self._num_let_in, request.t_s
        self._num_let_in += 1
        prompt, name = _prompt(request, number, self._shared), str(number)
        submit = Submit(
            name, prompt, request.max_tokens, 0.0, number, True, [], 0, now_s, arrived_s=now_s
        )
        self.open[name] = self.recorder.arrive(name, now_s, now_s, request.prompt_tokens)
        self.inbox.append(Sequence(submit, number))

    # A step

    def _begin(self, now_s: float) -> None:
        for sequence in self.inbox:
            self.scheduler.add(sequence, now_s)
        self.inbox.clear()
        if self.params.overload == "Shed" and now_s >= self._shed_s:
            self._shed(now_s)
        step = self.scheduler.schedule(now_s, self.law)
        if not step.works:  # for example if all were shed
            return
        kinds = step.num_decodes, step.num_kv_tokens, step.num_prefill_tokens
        step_ms = self.noise.step_ms(self.params.step_ms(*kinds), now_s)
        step_ms += self.delays.ms(step.num_decodes, step.num_prefill_tokens, step_ms, now_s)
        ends_s = now_s + (step_ms + self.params.between_ms) / 1e3
        self.under_way = UnderWay(step, now_s, step_ms, ends_s)

    def _shed(self, now_s: float) -> None:
        self._shed_s = now_s + BEAT_S
        for timer in self.recorder.hopeless(now_s, self.slo.ttft_ms):
            if self.scheduler.abort(timer.request_id, if_waiting=True):
                self.recorder.drop(timer, now_s, by_server=True, refused=True)
                del self.open[timer.request_id]
                self.num_refused += 1

    def _end(self, step: Step, started_s: float, step_ms: float, now_s: float) -> None:
        self._advance(now_s)
        self.now, self.under_way = now_s, None
        sampled = [work.sequence.seed for work in step.works if work.samples]
        for outcome in self.scheduler.commit(step, sampled, now_s):
            self._book(outcome, step, now_s)
        model = self._learn(step, step_ms, now_s)
        waiting = self.scheduler.num_waiting_for("cap"), self.scheduler.num_waiting_for("kv")
        self.recorder.engine.see(EngineLoad(len(self.scheduler.running), *waiting))
        self.recorder.engine.step(
            EngineStep(
                epoch=step.limits.epoch,
                started_s=started_s,
                step_s=step_ms / 1e3,
                num_decodes=step.num_decodes,
                num_prefill_tokens=step.num_prefill_tokens,
                num_running=step.num_running,
                num_tokens=len(sampled),
                step_model=model,
                is_slow=self.times.is_slow,
            )
        )
        self.recorder.admit(step.admitted, started_s)

    def _book(self, outcome: BookedToken, step: Step, now_s: float) -> None:
        sequence = outcome.sequence
        timer = self.open[sequence.request_id]
        if timer.first_s is None:
            self.recorder.first_token(timer, now_s, sequence.time_spent(now_s))
        else:
            self.recorder.next_token(timer, now_s, at_cap=step.at_cap, in_prefill=step.is_long)
        if outcome.finish_reason is not None:
            self.recorder.finish(timer, now_s)
            self.done.append(self.open.pop(sequence.request_id))

    def _learn(self, step: Step, step_ms: float, now_s: float) -> StepModel | None:
        """A new step model, if it is time for one."""
        kinds = step.num_decodes, step.num_kv_tokens, step.num_prefill_tokens
        self.times.add(StepRecord(now_s, *kinds, step_ms))
        if now_s - self._refitted_s < REFIT_S:
            return None
        self._refitted_s = now_s
        return self.times.refit(now_s)


def _outcome(timer: RequestTimer) -> SimulatedEnd:
    first_s = inf if timer.first_s is None else timer.first_s
    return SimulatedEnd(
        timer.arrival_s, first_s, timer.last_s, timer.num_tokens, timer.num_gaps_over
    )


def _prompt(request: Request, number: int, shared: dict[str | int, int]) -> bytes:
    """The shared prefixes, then the request's own token, which also fills its output.

    `shared`: the token that fills each prefix; new prefixes are added.
    """
    num_shared, unit = request.prefix_tokens, min(request.prefix_unit, request.prompt_tokens)
    prefixes = b"".join(
        packed([shared.setdefault(name, FIRST_SHARED + len(shared))]) * unit
        for name in request.prefix
    )
    own = packed([number]) * (request.prompt_tokens - num_shared)
    return prefixes[: num_shared * TOKEN_BYTES] + own
