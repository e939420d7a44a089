"""A request's side of the evidence: all arrivals and all gaps, counted in closed ticks. Pure.

Every method gets the time (`now_s`: CLOCK_MONOTONIC seconds, the clock of `wire`). A request's
clock starts with the last byte of its body. It is read when bytes of a token are ready for its
socket. So HTTP, tokenising and a busy event loop count as waiting, and a slow client does not.
"""

import math
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice

from sluice_core.contract import SMOOTH_SHARE, Evidence
from sluice_core.port import FirstParts

from .engine_side import EngineSide
from .lengths import RecentRequests
from .open_tick import Cause
from .requests import OpenRequests, RequestTimer
from .ticks import Ticks


def largest_part(parts: FirstParts, ttft_s: float) -> Cause:
    """The cause of the largest part of a first token's time.

    All time outside the engine (HTTP, tokenising, a start still under way) is `outside`.
    """
    seconds: dict[Cause, float] = {
        "cap": parts.wait_cap_s,
        "kv": parts.wait_kv_s,
        "prefill": parts.prefill_s,
        "outside": ttft_s - parts.wait_cap_s - parts.wait_kv_s - parts.prefill_s,
    }
    return max(seconds, key=lambda cause: seconds[cause])


def _older(
    timers: Mapping[str, RequestTimer], now_s: float, limit_ms: float | None
) -> Iterator[RequestTimer]:
    """The requests that came more than `limit_ms` ago, oldest first."""
    for timer in timers.values():
        if limit_ms is None or (now_s - timer.arrival_s) * 1e3 <= limit_ms:
            return
        yield timer


def _is_out_of_reach(
    timer: RequestTimer, now_s: float, limit_ms: float | None, rest_ms: float
) -> bool:
    """True once less than `rest_ms` is left of `limit_ms` since its arrival."""
    if limit_ms is None:
        return False
    left_ms = limit_ms - (now_s - timer.arrival_s) * 1e3
    return left_ms <= 0 or left_ms < rest_ms


class Recorder:
    """Books each request once, into `ticks`. `recent`: requests that finished lately."""

    def __init__(self, boot_id: str, now_s: float, wall_s: float) -> None:
        self.started_s = wall_s
        self.ticks = Ticks(boot_id, now_s)
        self.engine = EngineSide(self.ticks)
        self.recent = RecentRequests()
        self.requests = OpenRequests()

    # -- the life of a request

    def arrive(
        self,
        request_id: str,
        arrival_s: float,
        now_s: float,
        num_prompt_tokens: int,
        ttft_ms: float | None = None,
        priority: int = 0,
        *,
        is_another: bool = False,
        client: str = "",
        is_background: bool = False,
    ) -> RequestTimer:
        """A request that goes to the engine; `arrival_s`: when the last byte of it was read."""
        timer = RequestTimer(
            request_id,
            arrival_s,
            now_s,
            num_prompt_tokens,
            ttft_ms,
            priority,
            is_another,
            client,
            is_background,
        )
        self.ticks.open.arrivals += not is_background
        self.requests.add(timer)
        return timer

    def refuse(self, cause: Cause | None = None) -> None:
        """Count a request that was answered 429 or 503 on arrival: it is over.

        `cause`: None for the lack that others wait for.
        """
        self.ticks.open.arrivals += 1
        self.ticks.open.refused += 1
        self.ticks.open.ttft.miss(cause or self.engine.waiting_cause)
        self._count_whole(is_over=True)

    def refuse_for_deadline(self, wait_ms: float, rest_ms: float) -> None:
        """Count a refused request that expected `wait_ms` for a place and `rest_ms` of work.

        It is over if it would have missed a target. Missing a shorter deadline of its own does not
        count: otherwise a header could scale the service.
        """
        self.ticks.open.arrivals += 1
        self.ticks.open.refused += 1
        ttft_ms, e2e_ms = self.ticks.slo.ttft_ms, self.ticks.slo.e2e_ms
        if ttft_ms is not None and wait_ms + rest_ms > ttft_ms:
            self.ticks.open.ttft.miss("prefill" if rest_ms > wait_ms else self.engine.waiting_cause)
        if e2e_ms is not None and wait_ms + rest_ms > e2e_ms:
            self._count_whole(is_over=True)

    def admit(self, request_ids: Iterable[str], step_start_s: float) -> None:
        """Note that these requests begin with a step that was scheduled at `step_start_s`."""
        for request_id in request_ids:
            timer = self.requests.admit(request_id)
            if timer is not None:  # else its client has left
                timer.admitted_s = max(timer.submitted_s, step_start_s)
                timer.group.has_begun = True

    def first_token(self, timer: RequestTimer, now_s: float, parts: FirstParts) -> float:
        """The first token was delivered; returns its time since arrival, in seconds."""
        self.requests.leave(timer)
        if timer.is_unseen:  # its request did not say that the answer is a stream
            timer.is_unseen = timer.decided = False
        ttft_s = now_s - timer.arrival_s
        self.engine.learn(timer.num_prompt_tokens, parts, ttft_s, now_s)
        timer.first_s = timer.last_s = now_s
        timer.num_tokens = 1
        target = self.ticks.slo.ttft_ms
        is_over = timer.decided or (target is not None and ttft_s * 1e3 > target)
        timer.held_first = not is_over
        self.ticks.open.ttft.note(ttft_s * 1e3)
        if not timer.decided:
            timer.decided = True
            if is_over:
                self.ticks.open.ttft.miss(largest_part(parts, ttft_s))
            else:
                self.ticks.open.ttft.n += 1
        return ttft_s

    def unseen(self, timer: RequestTimer) -> None:
        """An admitted request's first token will not be seen, as its answer comes in one piece. It
        is counted only if it was late before."""
        self.requests.leave(timer)
        timer.is_unseen, timer.decided = not timer.decided, True

    def without_first(self, timer: RequestTimer) -> None:
        """Judge a request by its end alone: its answer has no first token."""
        timer.decided = timer.held_first = True

    def next_token(
        self, timer: RequestTimer, now_s: float, *, at_cap: bool, in_prefill: bool = False
    ) -> float:
        """A later step's token was delivered; returns its gap in seconds.

        `in_prefill`: another request's prompt was computed in this gap.
        """
        gap_s = now_s - timer.last_s
        timer.last_s = now_s
        timer.num_tokens += 1
        timer.num_gaps += 1
        gaps = self.ticks.open.itl
        is_over = gaps.add(gap_s * 1e3, self.ticks.slo.itl_ms)
        gaps.n_at_cap += at_cap
        gaps.n_in_prefill += in_prefill
        if is_over:
            timer.num_gaps_over += 1
            gaps.over_at_cap += at_cap
            gaps.over_in_prefill += in_prefill
            gaps.over_after_over += timer.last_was_over
        timer.last_was_over = is_over
        return gap_s

    def drafted_token(self, timer: RequestTimer, now_s: float) -> None:
        """Count one more token of the same step. It makes no gap: zeros would hide the gaps
        between steps (vLLM's metric also counts steps)."""
        timer.last_s = now_s
        timer.num_tokens += 1

    def finish(self, timer: RequestTimer, now_s: float, computed_s: float | None = None) -> float:
        """All of its tokens were delivered; returns the end-to-end time in seconds.

        `computed_s`: when the last one came from the engine, if earlier. Its place is free from
        then on.
        """
        self.requests.leave(timer, has_ended=True)
        tick, e2e_s = self.ticks.open, now_s - timer.arrival_s
        tick.finished += 1
        is_late = timer.e2e_decided
        if timer.e2e_decided:
            tick.e2e.note(e2e_s * 1e3)
        else:
            is_late = tick.e2e.add(e2e_s * 1e3, self.ticks.slo.e2e_ms)
        self.recent.add(timer.num_prompt_tokens + timer.num_tokens)
        if timer.admitted_s is not None:
            self.recent.add_service((computed_s or now_s) - timer.admitted_s)
        if timer.held_first and not is_late:
            target = self.ticks.slo.itl_ms
            tick.good += target is None or timer.mean_gap_ms <= target
            tick.smooth += timer.num_gaps_over <= math.floor(timer.num_gaps * SMOOTH_SHARE)
        return e2e_s

    def drop(
        self, timer: RequestTimer, now_s: float, *, by_server: bool, refused: bool = False
    ) -> None:
        """Book an end without finishing. That is a miss if the server ended it for want of time
        (`by_server`: shed), or if the client left after the target had passed.

        `refused` but not `by_server`: dropped for its own deadline, shorter than the targets. It
        counts only against targets that it has already missed.
        """
        cause, age_ms = self._cause_so_far(timer, now_s), (now_s - timer.arrival_s) * 1e3
        self.requests.leave(timer, has_ended=True)
        self.ticks.open.refused += refused
        ttft_ms, e2e_ms = self.ticks.slo.ttft_ms, self.ticks.slo.e2e_ms
        is_over = by_server or (e2e_ms is not None and age_ms > e2e_ms)
        if not timer.e2e_decided and (is_over or not refused):
            self._count_whole(is_over=is_over)
        if timer.decided:
            return
        timer.decided = True
        if by_server or (ttft_ms is not None and age_ms > ttft_ms):
            self.ticks.open.ttft.miss(cause)
        elif not refused:
            self.ticks.open.ttft.n += 1

    def fail(self, timer: RequestTimer, kind: str) -> None:
        """The engine failed it, `kind` as in `contract.Failures`. From here on no target counts it:
        how soon an engine fails says nothing of its speed."""
        self.requests.leave(timer, has_ended=True)
        timer.decided = timer.e2e_decided = True
        failed = self.ticks.open.failed
        failed[kind] = failed.get(kind, 0) + 1

    # -- ticks

    def advance(self, now_s: float, wall_s: float, throttled_s: float) -> None:
        """Close the ticks that ended by `now_s`. `throttled_s`: the cgroup's total so far."""
        while self.ticks.is_due(now_s):
            end_s = self.ticks.end_s
            self._count_late(end_s)
            self.ticks.close(wall_s - (now_s - end_s), throttled_s, self.engine.load)

    def evidence(self, after: int) -> Evidence:
        """All closed ticks with seq > `after`, and the rest that the tuner reads."""
        return Evidence(
            boot_id=self.ticks.boot_id,
            started_s=self.started_s,
            ticks=self.ticks.after(after),
            lengths=self.recent.lengths(),
            memory=self.engine.memory,
            step_model=self.engine.step_model,
        )

    def hopeless(self, now_s: float, target_ms: float | None) -> list[RequestTimer]:
        """Waiting requests that have not begun and can no longer have their first token in time.
        A request of several sequences is listed by its first one, which the engine may spare.

        In time means within their own deadline, or else within `target_ms`. They still need one
        prefill (`EngineSide.prefill_ms`). They begin at once if nothing runs.
        """
        engine = self.engine
        begin_at_once = not engine.load.running
        first: dict[int, RequestTimer] = {}
        late: dict[str, RequestTimer] = {}
        for timer in self.requests.waiting.values():
            limit_ms = timer.ttft_ms or target_ms
            if limit_ms is None or timer.group.has_begun:
                continue
            foremost = first.setdefault(id(timer.group), timer)
            rest_ms = 0.0 if begin_at_once else engine.prefill_ms(timer.num_prompt_tokens, now_s)
            if _is_out_of_reach(timer, now_s, limit_ms, rest_ms):
                late[foremost.request_id] = foremost
        return list(late.values())

    def will_miss(self, timer: RequestTimer, now_s: float) -> bool:
        """True if a waiting request can no longer have its first token within the target."""
        rest_ms = self.engine.prefill_ms(timer.num_prompt_tokens, now_s)
        return _is_out_of_reach(timer, now_s, self.ticks.slo.ttft_ms, rest_ms)

    def _count_late(self, end_s: float) -> None:
        """Count requests as over, once, that passed a target in this tick without a result."""
        for timer in _older(self.requests.pending, end_s, self.ticks.slo.ttft_ms):
            if not timer.decided:
                timer.decided = True
                self.ticks.open.ttft.miss(self._cause_so_far(timer, end_s))
        for timer in _older(self.requests.open, end_s, self.ticks.slo.e2e_ms):
            if not timer.e2e_decided:
                timer.e2e_decided = True
                self._count_whole(is_over=True)

    # -- causes

    def _count_whole(self, *, is_over: bool) -> None:
        """Count an unfinished request against the end-to-end target, if there is one."""
        if self.ticks.slo.e2e_ms is not None:
            self.ticks.open.e2e.n += 1
            self.ticks.open.e2e.over += is_over

    def _cause_so_far(self, timer: RequestTimer, now_s: float) -> Cause:
        """The largest part of the wait of a request that has no first token yet."""
        if timer.request_id in self.requests.waiting or timer.admitted_s is None:
            begun = islice(self.requests.waiting, self.engine.num_free)
            return "prefill" if timer.request_id in begun else self.engine.waiting_cause
        waited_s, prefilling_s = timer.admitted_s - timer.arrival_s, now_s - timer.admitted_s
        return "prefill" if prefilling_s >= waited_s else self.engine.last_lack
