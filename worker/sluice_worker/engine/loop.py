"""The step loop's body: requests in, reports out. Knows neither sockets nor files."""

import random
import time
from collections.abc import Callable, Iterator

from msgspec import structs
from sluice_core.contract import StepModel
from sluice_core.law import Law
from sluice_core.port import EngineLimits, EngineLoad, SpeculationTotals
from sluice_core.steptime import REFIT_S, StepRecord, StepTimes
from sluice_core.wire import Abort, Finished, PromptScores, StepReport, Submit, TokenOut

from ..execution.runner import Runner
from ..scheduling.scheduler import Scheduler
from ..scheduling.sequence import Sequence
from ..scheduling.speculation import few_decodes
from ..scheduling.step import BookedToken, Step

UNLEARNT_S = 60.0
"""Seconds without other steps after which the model also learns from steps that score prompts."""
TOUCH_REST = 9.0
"""Rest after touching pages, as a multiple of its time: requests need the CPU quota."""
THROTTLED_SHARE = 0.05
"""Throttled share of the steps' time above which the CPU quota sets the pace."""


class Engine:
    """Scheduler, runner and step model of one worker. Single-threaded; `clock` is monotonic."""

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        times: StepTimes,
        clock: Callable[[], float] = time.monotonic,
        seed: int | None = None,
        throttled_s: Callable[[], float] = lambda: 0.0,
    ) -> None:
        """`seed`: for requests without a seed of their own; None: from the system's entropy.

        `throttled_s`: seconds that the CPU quota has throttled this process so far.
        """
        self._seeds = random.Random(seed)  # noqa: S311 - of samples, no secret
        self.scheduler = scheduler
        self.runner = runner
        self.times = times
        self._law = Law(times)
        self._clock = clock
        self.num_steps = 0
        self._refitted_at, self._learnt_at = 0.0, clock()
        self._throttled_s = throttled_s
        self._throttled_before_s = throttled_s()
        self._stepped_s = 0.0

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work

    def idle_s(self, now: float) -> float:
        """Seconds until a step can do anything: 0 with work, more for a static batch."""
        return max(self.scheduler.starts_at(now) - now, 0.0) if self.has_work else float("inf")

    def submit(self, request: Submit, now: float) -> Finished | None:
        """Queue a request, or say why it can never run."""
        refusal = self.scheduler.can_admit(request)
        if refusal is not None:
            return Finished(request.request_id, refusal, self.snapshot())
        seed = self._seeds.getrandbits(63) if request.seed is None else request.seed
        self.scheduler.add(Sequence(request, seed), now)
        return None

    def abort(self, message: Abort) -> Finished | None:
        """Free the request's blocks now; None if there is no such request."""
        if not self.scheduler.abort(message.request_id, if_waiting=message.if_waiting):
            return None
        return Finished(message.request_id, None, self.snapshot())

    def configure(self, limits: EngineLimits) -> None:
        """Put limits in force from the next step on. Lowering the cap ends no running sequence."""
        self.scheduler.limits = limits

    def step(self) -> tuple[StepReport | None, list[Finished]]:
        """One step: its report (None where nothing could run), and the requests that it failed."""
        started = self._clock()
        step = self.scheduler.schedule(
            started,
            self._law,
            self._growth,
            is_ahead=self.runner.is_ahead,
        )
        self.runner.clear(self.scheduler.cache.take_dirty())
        if not step.works:
            return None, []
        tokens = self.runner.execute(step.works, step.prefill_follows)
        outcomes = self.scheduler.commit(step, tokens, self._clock())
        ended = self._clock()  # before booking, which delays the next tokens
        self.num_steps += 1
        model = self._learn(step, started, ended)
        return self._report(step, outcomes, started, ended, model), self._failures(outcomes)

    def use_idle_time(self) -> float:
        """Prepare something while there is no work. Returns the seconds until more may be prepared;
        infinite if nothing is left."""
        # Throttling while idle comes from other processes and says nothing of the next steps.
        self._throttled_before_s, self._stepped_s = self._throttled_s(), 0.0
        if self.runner.use_idle_time():
            return 0.0
        started = self._clock()
        if not self.runner.touch_ahead(self.scheduler.pool.first_unused):
            return float("inf")
        return TOUCH_REST * (self._clock() - started)

    def check_integrity(self) -> str | None:
        """As the scheduler's."""
        return self.scheduler.check_integrity()

    def snapshot(self) -> EngineLoad:
        """Counts as of now."""
        scheduler, pool, counters = self.scheduler, self.scheduler.pool, self.scheduler.counters
        background_running, background_waiting = scheduler.background.counts
        return EngineLoad(
            running=len(scheduler.running) - background_running,
            waiting_cap=scheduler.num_waiting_for("cap"),
            waiting_kv=scheduler.num_waiting_for("kv"),
            used_blocks=pool.num_used,
            cached_blocks=pool.num_cached,
            num_blocks=pool.num_total,
            num_preemptions=counters.num_preemptions,
            preempted_tokens=counters.preempted_tokens,
            prefix_queries=counters.prefix_queries,
            prefix_hits=counters.prefix_hits,
            rounding_waste=scheduler.cache.rounding_waste(scheduler.running),
            speculation=self._speculation(),
            waiting_turn=scheduler.num_waiting_for("time"),
            background_running=background_running,
            background_waiting=background_waiting,
        )

    def _speculation(self) -> SpeculationTotals | None:
        counters = self.scheduler.counters
        if self.scheduler.drafts is None:
            return None
        return SpeculationTotals(
            counters.num_drafts, counters.draft_tokens, counters.accepted_by_position
        )

    def _growth(self, decodes: int, kv_tokens: int, drafted: int) -> float:
        model = self.times.model
        if model is None:
            return few_decodes(decodes, kv_tokens, drafted)
        plain = model.step_ms(decodes, kv_tokens, 0)
        grown = self.times.step_ms(model, decodes, kv_tokens, drafted)
        return grown / plain if plain > 0 else 1.0

    def _learn(self, step: Step, started: float, ended: float) -> StepModel | None:
        """Record the step; returns the model if it was refitted."""
        record = StepRecord(
            at_s=ended,
            num_decodes=step.num_decodes + step.num_padding,
            num_kv_tokens=step.num_kv_tokens,
            num_prefill_tokens=step.num_prefill_tokens + step.num_draft_tokens,
            step_ms=1000 * (ended - started),
        )
        if not step.scores_prompts or ended - self._learnt_at >= UNLEARNT_S:
            self._learnt_at = ended
            self.times.add(record)
        self._stepped_s += ended - started
        if ended - self._refitted_at < REFIT_S:
            return None
        self._refitted_at = ended
        return self.times.refit(ended, is_throttled=self._was_throttled())

    def _was_throttled(self) -> bool:
        """True if the CPU quota took a share of the steps since the last look."""
        throttled_s, stepped_s = self._throttled_s(), self._stepped_s
        share = (throttled_s - self._throttled_before_s) / stepped_s if stepped_s else 0.0
        self._throttled_before_s, self._stepped_s = throttled_s, 0.0
        return share > THROTTLED_SHARE

    def _report(
        self,
        step: Step,
        outcomes: list[BookedToken],
        started: float,
        ended: float,
        model: StepModel | None,
    ) -> StepReport:
        return StepReport(
            tokens=[_token(o, o.token_id, ended) for o in outcomes if o.token_id is not None],
            epoch=step.limits.epoch,
            started_s=started,
            step_s=ended - started,
            num_decodes=step.num_decodes,
            num_kv_tokens=step.num_kv_tokens,
            num_prefill_tokens=step.num_prefill_tokens,
            num_draft_tokens=step.num_draft_tokens,
            num_padding=step.num_padding,
            num_running=step.num_running,
            at_cap=step.at_cap,
            is_slow=self.times.is_slow,
            snapshot=self.snapshot(),
            step_model=model,
            prompts=[*_take_prompt_scores(step)],
            admitted=[*step.admitted],
            price_s=self.scheduler.price_s,
            is_long=step.is_long,
            background=structs.replace(
                step.background,
                tokens=sum(o.sequence.is_background for o in outcomes if o.token_id is not None),
            ),
        )

    def _failures(self, outcomes: list[BookedToken]) -> list[Finished]:
        sentence = (
            "no token can be sampled for this request: the model's output is not finite, or the "
            "request's own parameters exclude every token."
        )
        return [
            Finished(outcome.sequence.request_id, sentence, self.snapshot())
            for outcome in outcomes
            if outcome.token_id is None
        ]


def _take_prompt_scores(step: Step) -> Iterator[PromptScores]:
    """The scores of prompts that the step found, told once."""
    for work in step.works:
        sequence = work.sequence
        if sequence.prompt_scores is not None:
            yield PromptScores(sequence.request_id, sequence.prompt_scores)
            sequence.prompt_scores = None


def _token(outcome: BookedToken, token_id: int, now: float) -> TokenOut:
    """A token as it is sent; the first one has the parts of its request's time."""
    sequence = outcome.sequence
    return TokenOut(
        sequence.request_id,
        token_id,
        outcome.finish_reason,
        sequence.time_spent(now) if sequence.num_output_tokens == 1 else None,
        sequence.scores,
        sequence.num_preemptions,
    )
