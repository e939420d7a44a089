"""One worker in virtual time: the twin of its scheduler, around the real evidence and step fit.

All sequences that decode get one token in each step, so a step costs the same however many there
are: when a sequence ends and when it needs its next block is known as it begins to decode.
Follows `sluice_worker.scheduler` and `engine`, names included; a test holds the two together.
"""

from bisect import insort
from collections import deque
from itertools import count
from math import inf

from sluice_worker.contract import AT_CAP_SHARE, MIN_CHUNK_TOKENS
from sluice_worker.deadlines import Deadlines
from sluice_worker.server.admission import is_full, unreachable
from sluice_worker.server.forecast import Forecast
from sluice_worker.sizing import blocks_for
from sluice_worker.steptime import StepRecord
from sluice_worker.wire import FirstToken

from .job import Job, Outcome, Step
from .pages import Holding, Pages
from .scraped import REFIT_S, Scraped
from .trace import Request

BEAT_S = 0.1
"""How often the worker looks for hopeless requests."""


class Pod(Scraped):
    """Steps one by one, around the worker's own recorder and step fit."""

    num_refused = num_preemptions = 0

    def _prepare(self, start_s: float) -> None:
        params = self.params
        self.pages = Pages(
            params.kv_tokens // params.block_size,
            params.block_size,
            caching=params.prefix_caching,
        )
        self.done: list[Job] = []
        self.num_steps = 1
        self.now = self.last_end = start_s
        self.step: Step | None = None
        self.inbox: list[Job] = []
        self.waiting: deque[Job] = deque()
        self.running: dict[int, Job] = {}
        self.prefilling: list[Job] = []
        self.num_decoding = 0
        self.kv_tokens = 0
        self._ends: dict[int, list[Job]] = {}
        self._growing = [0] * params.block_size
        self._joined: list[Job] = []
        self._num_slow = 0
        self._last_was_slow = False
        self._orders = count()
        self._ids = count()
        self._open: dict[str, Job] = {}
        self._blocked_by = ""
        self._clocks = (0.0, 0.0)
        self._clock_at = start_s
        self._refitted_at = self._shed_at = start_s

    @property
    def is_idle(self) -> bool:
        return not self._open

    def outcomes(self) -> tuple[list[Outcome], list[Outcome]]:
        return [_outcome(job) for job in self.done], [_outcome(j) for j in self._open.values()]

    # From outside

    def run(self, until_s: float, arrivals: deque[Request]) -> None:
        while True:
            if self.step is None:
                if not (self.running or self.waiting or self.inbox):
                    if not arrivals or arrivals[0].t_s > until_s:
                        break
                    self.now = max(self.now, arrivals[0].t_s)
                    self._receive(arrivals.popleft())
                    continue
                self._begin(self.now)
                continue
            ends_s = self.step.ends_s
            while arrivals and arrivals[0].t_s <= min(ends_s, until_s):
                self._receive(arrivals.popleft())
            if ends_s > until_s:
                break
            self._end(self.step)
        self._advance(until_s)

    def patch(self, cap: int, epoch: int, now_s: float) -> None:
        self._advance(now_s)
        self.cap, self.epoch = cap, epoch
        self.recorder.configure(epoch, cap, self.slo)

    def _receive(self, request: Request) -> None:
        now_s, params = request.t_s, self.params
        self._advance(now_s)
        total = blocks_for(request.prompt_tokens + request.max_tokens, params.block_size)
        num_open, state = len(self._open), self.recorder.snapshot
        if total > self.pages.num_total or is_full(
            1, num_open, self.cap, state, params.max_num_queued
        ):
            self.recorder.refuse()
            self.num_refused += 1
            return
        if params.overload == "Shed" and self._refuse_if_late(request):
            return
        flight = self.recorder.arrive(str(next(self._ids)), now_s, now_s, request.prompt_tokens)
        job = Job(request, flight, Holding(request), request.prompt_tokens)
        self._open[flight.request_id] = job
        self.inbox.append(job)

    def _refuse_if_late(self, request: Request) -> bool:
        """Whether it is refused on arrival, because it would be shed later."""
        state, recorder = self.recorder.snapshot, self.recorder
        forecast = Forecast(
            num_open=len(self._open),
            num_running=state.running,
            num_waiting=state.waiting_cap + state.waiting_kv,
            cap=self.cap,
            service_s=recorder.service_s(),
            step_model=recorder.step_model,
            kv_per_seq=0.0,  # of no consequence to the wait
        )
        prefill_ms = recorder.prefill_ms(request.prompt_tokens, request.t_s)
        problem = unreachable(
            Deadlines(), self.slo.ttft_ms, forecast, 1, age_ms=0.0, prefill_ms=prefill_ms
        )
        if problem is None:
            return False
        recorder.refuse_for_deadline(1e3 * forecast.wait_s(1), prefill_ms)
        self.num_refused += 1
        return True

    def _advance(self, now_s: float) -> None:
        if self.recorder.is_due(now_s):
            self.recorder.advance(now_s, now_s, 0.0)

    # A step

    def _begin(self, now_s: float) -> None:
        self._advance_clocks(now_s)
        for job in self.inbox:
            job.queued_at, job.order = self._clocks, next(self._orders)
            self.waiting.append(job)
        self.inbox.clear()
        if self.params.overload == "Shed" and now_s >= self._shed_at:
            self._shed(now_s)
        before = self.num_preemptions
        singles = [job for job in self.prefilling if job.tokens - job.computed == 1]
        if self.num_decoding:
            self._grow()
        if self.num_preemptions > before:
            singles = [job for job in singles if job.holding.num]
        elif self.waiting:
            self._admit()
        self._blocked_by = "cap" if len(self.running) >= self.cap else "kv" if self.waiting else ""
        chunks = [(job, 1) for job in singles]
        kv_tokens = self.kv_tokens + sum(job.tokens for job in singles)
        if len(self.prefilling) > len(singles):
            budget = self._prefill_budget(self.num_decoding + len(singles), kv_tokens)
            chunks += self._chunks(singles, budget)
        if not (chunks or self.num_decoding):
            return
        self.step = self._as_step(now_s, chunks)

    def _as_step(self, now_s: float, chunks: list[tuple[Job, int]]) -> Step:
        decodes, kv_tokens, prefill = self.num_decoding, self.kv_tokens, 0
        for job, num_tokens in chunks:
            kv_tokens += job.computed + num_tokens
            if num_tokens == 1:
                decodes += 1
            else:
                prefill += num_tokens
        mean_ms = self.params.step_ms(decodes, kv_tokens, prefill)
        step_ms = mean_ms * self.noise.factor(now_s)
        num_running = len(self.running)
        at_cap = num_running >= AT_CAP_SHARE * self.cap
        return Step(
            now_s,
            now_s + (step_ms + self.params.between_ms) / 1e3,
            step_ms,
            self.epoch,
            decodes,
            kv_tokens,
            prefill,
            num_running,
            at_cap,
            chunks,
        )

    def _end(self, step: Step) -> None:
        now_s = step.ends_s
        self._advance(now_s)
        self._advance_clocks(now_s)
        self.now, self.step = now_s, None
        num_tokens = self.num_decoding
        joined, self._joined = self._joined, []
        if num_tokens:
            self._book_decodes(step, joined)
        for job, num_computed in step.chunks:
            job.computed += num_computed
            if job.computed == job.tokens:
                num_tokens += 1
                self._sample(job, step, now_s)
        self.last_end = now_s
        self.num_steps += 1
        self._learn(step)
        waits = len(self.waiting)
        by_cap, by_kv = (0, waits) if self._blocked_by == "kv" else (waits, 0)
        after = len(self.running), by_cap, by_kv
        self.recorder.stepped(step, num_tokens, after, is_slow=self.times.is_slow)

    def _book_decodes(self, step: Step, joined: list[Job]) -> None:
        """One more token for each that decodes; those that have all of theirs leave."""
        newcomers = [job for job in joined if job.is_decoding]
        after_over = sum(job.flight.last_was_over for job in newcomers)
        if self._last_was_slow:
            after_over += self.num_decoding - len(newcomers)
        gap_s = step.ends_s - self.last_end
        self._last_was_slow = self.recorder.gaps(
            self.num_decoding, gap_s, at_cap=step.at_cap, after_over=after_over
        )
        self._num_slow += self._last_was_slow
        self.kv_tokens += self.num_decoding
        for job in sorted(self._ends.pop(self.num_steps, ()), key=lambda job: job.order):
            if job.ends_at == self.num_steps and job.is_decoding:
                self._leave_decoding(job, self.num_steps + 1)
                job.flight.last_s = step.ends_s
                self._finish(job, step.ends_s)

    def _sample(self, job: Job, step: Step, now_s: float) -> None:
        job.trusted = job.computed
        self.pages.seal(job.holding, job.computed)
        job.tokens += 1
        job.generated += 1
        if job.generated == 1:
            prefill_s = now_s - job.request.t_s - (job.wait_cap_s + job.wait_kv_s)
            parts = FirstToken(job.wait_cap_s, job.wait_kv_s, prefill_s, job.cached_tokens)
            self.recorder.first_token(job.flight, now_s, parts)
        else:
            self.recorder.next_token(job.flight, now_s, at_cap=step.at_cap)
        self.prefilling.remove(job)
        if job.generated == job.request.max_tokens:
            self._finish(job, now_s)
        else:
            self._join(job)

    def _join(self, job: Job) -> None:
        """From the next step on it decodes."""
        self.num_decoding += 1
        self.kv_tokens += job.tokens
        job.is_decoding, job.joined_at = True, self.num_steps
        job.base = job.tokens - self.num_steps - 1
        job.ends_at = self.num_steps + job.request.max_tokens - job.generated
        self._ends.setdefault(job.ends_at, []).append(job)
        job.slow_before = self._num_slow
        self._joined.append(job)
        job.first_growth = job.holding.num * self.pages.size - job.base + 1
        self._growing[job.first_growth % self.pages.size] += 1

    def _leave_decoding(self, job: Job, next_step: int) -> None:
        """It has had its token of the step before `next_step`."""
        job.is_decoding = False
        self.num_decoding -= 1
        tokens = job.base + next_step
        self.kv_tokens -= tokens
        job.generated += tokens - job.tokens
        job.tokens = tokens
        job.computed = job.trusted = tokens - 1
        size, grown_for = self.pages.size, next_step - 1 - job.first_growth
        self._growing[job.first_growth % size] -= 1
        job.holding.num += grown_for // size + 1
        flight = job.flight
        flight.num_tokens = job.generated
        flight.num_gaps = job.generated - 1
        flight.num_gaps_over += self._num_slow - job.slow_before
        if next_step - 1 > job.joined_at:
            flight.last_was_over = self._last_was_slow

    def _finish(self, job: Job, now_s: float) -> None:
        self.recorder.finish(job.flight, now_s)
        del self.running[job.order]
        self.pages.release(job.holding, job.trusted)
        del self._open[job.flight.request_id]
        self.done.append(job)

    # Who continues, who may start

    def _grow(self) -> None:
        """A block for each that has filled its last one, at the cheapest's expense.

        A sequence needs one every `size` steps, so they are counted by the step modulo that.
        """
        phase = self.num_steps % self.pages.size
        growing = self._growing[phase]
        if growing <= self.pages.available:
            self.pages.take(growing)
            return
        grown: set[int] = set()
        for job in list(self.running.values()):
            if job.is_decoding and job.first_growth % self.pages.size == phase:
                while job.is_decoding and not self.pages.available:
                    self._preempt(self._victim(grown), grown)
                if job.is_decoding:
                    self.pages.take(1)
                    grown.add(job.order)

    def _victim(self, grown: set[int]) -> Job:
        """Who is cheapest to compute again; as in `sluice_worker.preemption`."""
        candidates = list(self.running.values())[1:]
        useful = [job for job in candidates if self._frees_a_block(job, grown)]
        return min(useful or candidates, key=lambda job: (self._recompute_tokens(job), -job.order))

    def _frees_a_block(self, job: Job, grown: set[int]) -> bool:
        num = job.holding.num + (job.order in grown)
        if job.is_decoding:
            num += (self.num_steps - 1 - job.first_growth) // self.pages.size + 1
        return self.pages.frees_a_block(job.holding, num)

    def _recompute_tokens(self, job: Job) -> int:
        if not job.is_decoding:
            return self.pages.recompute_tokens(job.holding, job.tokens, job.computed)
        tokens = job.base + self.num_steps
        return self.pages.recompute_tokens(job.holding, tokens, tokens - 1)

    def _preempt(self, victim: Job, grown: set[int]) -> None:
        del self.running[victim.order]
        self.num_preemptions += 1
        if victim.is_decoding:
            self._leave_decoding(victim, self.num_steps)
            victim.holding.num += victim.order in grown
            victim.flight.last_s = self.last_end
        else:
            self.prefilling.remove(victim)
        self.pages.release(victim.holding, victim.trusted)
        victim.computed = victim.trusted = 0
        victim.num_preemptions += 1
        victim.queued_at = self._clocks
        before = sum(1 for other in self.waiting if other.order < victim.order)
        self.waiting.insert(before, victim)

    def _admit(self) -> None:
        while self.waiting and len(self.running) < self.cap:
            job, pages = self.waiting[0], self.pages
            matched = pages.match(job.holding, job.tokens)
            own = pages.own_match(job.holding, matched)
            total = blocks_for(job.tokens, pages.size)
            margin = max(1, pages.num_total // 100) if self.running else 0
            num_new = total - len(matched) - own
            if not pages.can_take(matched, own, num_new + margin):
                return
            self.waiting.popleft()
            pages.start(job.holding, matched, own, total)
            job.computed = job.trusted = (len(matched) + own) * pages.size
            job.wait_cap_s += self._clocks[0] - job.queued_at[0]
            job.wait_kv_s += self._clocks[1] - job.queued_at[1]
            if not job.num_preemptions:
                job.cached_tokens = job.computed
            self._start(job)

    def _start(self, job: Job) -> None:
        """Running ones are kept in order of arrival."""
        is_newest = not self.running or job.order > next(reversed(self.running))
        self.running[job.order] = job
        if not is_newest:
            self.running = dict(sorted(self.running.items()))
        insort(self.prefilling, job, key=lambda other: other.order)

    def _prefill_budget(self, decodes: int, kv_tokens: int) -> int:
        left = max(self.params.max_num_batched_tokens - decodes, 1)
        fits = self.times.chunk_limit(self.slo.itl_ms, decodes, kv_tokens)
        return min(left, max(fits, MIN_CHUNK_TOKENS))

    def _chunks(self, served: list[Job], budget: int) -> list[tuple[Job, int]]:
        chunks, ending = [], list[Job]()
        for job in self.prefilling:
            if budget <= 0:
                break
            if job in served:
                continue
            self._find_more(job)
            if any(self._will_find(job, other) for other in ending):
                continue
            num_tokens = min(job.tokens - job.computed, budget)
            budget -= num_tokens
            if job.computed + num_tokens == job.tokens:
                ending.append(job)
            chunks.append((job, num_tokens))
        return chunks

    def _has_begun(self, job: Job) -> bool:
        return job.computed != len(job.holding.shared) * self.pages.size

    def _find_more(self, job: Job) -> None:
        if self._has_begun(job):
            return
        num_found = self.pages.find_more(job.holding, job.tokens) * self.pages.size
        job.computed = job.trusted = job.computed + num_found
        if not job.num_preemptions:
            job.cached_tokens += num_found

    def _will_find(self, job: Job, other: Job) -> bool:
        if self._has_begun(job) or job.computed + self.pages.size >= job.tokens:
            return False
        return self.pages.is_shared(job.holding, other.holding, len(job.holding.shared))

    def _shed(self, now_s: float) -> None:
        self._shed_at = now_s + BEAT_S
        for flight in self.recorder.hopeless(now_s, self.slo.ttft_ms):
            job = self._open[flight.request_id]
            if job in self.waiting and not job.num_preemptions:
                self.recorder.drop(flight, now_s, by_server=True, refused=True)
                self.waiting.remove(job)
                del self._open[flight.request_id]
                self.num_refused += 1

    # What it learns

    def _advance_clocks(self, now_s: float) -> None:
        elapsed, (cap_s, kv_s) = now_s - self._clock_at, self._clocks
        self._clock_at = now_s
        if self._blocked_by == "cap":
            self._clocks = (cap_s + elapsed, kv_s)
        elif self._blocked_by == "kv":
            self._clocks = (cap_s, kv_s + elapsed)

    def _learn(self, step: Step) -> None:
        self.times.add(
            StepRecord(
                step.ends_s,
                step.num_decodes,
                step.num_kv_tokens,
                step.num_prefill_tokens,
                step.step_ms,
            )
        )
        if step.ends_s - self._refitted_at >= REFIT_S:
            self._refitted_at = step.ends_s
            self.recorder.step_model = self.times.refit(step.ends_s)


def _outcome(job: Job) -> Outcome:
    flight = job.flight
    first_s = inf if flight.first_s is None else flight.first_s
    return Outcome(job.request.t_s, first_s, flight.last_s, flight.num_tokens, flight.num_gaps_over)
