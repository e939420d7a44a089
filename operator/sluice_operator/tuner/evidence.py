"""Selects the pods that are heard and their ticks that count, and adds those ticks up."""

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from math import inf, sqrt
from operator import lt
from statistics import median

import msgspec
from sluice_core.contract import TICK_SECONDS, Evidence, Lengths, Tick

from . import constants as k
from .types import Cause, Observation, PodView


@dataclass(frozen=True, slots=True)
class HeardPod:
    """A pod with evidence. `ticks`: oldest first; `shift_s`: from its clock to the operator's."""

    view: PodView
    ticks: Sequence[Tick]
    shift_s: float = 0.0

    @property
    def present(self) -> Sequence[Tick]:
        """The ticks of its present boot: what ran as an earlier boot ended never finished."""
        ticks, evidence = self.ticks, self.view.evidence
        boot_id = evidence.boot_id if evidence else ""
        if not ticks or ticks[0].boot_id == boot_id:
            return ticks
        first = next((i for i, t in enumerate(ticks) if t.boot_id == boot_id), len(ticks))
        return ticks[first:]

    @property
    def is_young(self) -> bool:
        """True if it has served for so short a time that its misses may come from its start."""
        return len(self.present) * TICK_SECONDS < k.YOUNG_S

    def end_s(self, tick: Tick) -> float:
        """When one of its ticks ended, in the operator's clock."""
        return tick.t_s + self.shift_s

    def by_span(self, ticks: Iterable[Tick]) -> Iterator[tuple[int, Tick]]:
        """`ticks` of this pod, each with its span in the operator's clock.

        Spans count from its newest tick. Otherwise ends midway between two spans would round to
        either, and two ticks could get the same span.
        """
        if not self.ticks:
            return
        newest = self.ticks[-1]
        newest_s, last = newest.t_s, round(self.end_s(newest) / TICK_SECONDS)
        for tick in ticks:
            yield last - round((newest_s - tick.t_s) / TICK_SECONDS), tick


@dataclass(frozen=True, slots=True)
class Fleet:
    """`heard`: ready pods with fresh evidence. `leaving`, `unheard`: pods that end, and ready ones
    without it; their ticks belong to the promise. `silent`: the unheard that should report."""

    heard: tuple[HeardPod, ...]
    leaving: tuple[HeardPod, ...]
    unheard: tuple[HeardPod, ...]
    silent: tuple[str, ...]
    num_ready: int

    @property
    def majority_silent(self) -> bool:
        """True if too few pods report to decide anything."""
        return 2 * len(self.silent) > self.num_ready


def survey(observation: Observation) -> Fleet:
    """Sort the pods into heard, leaving and silent."""
    heard: list[HeardPod] = []
    leaving: list[HeardPod] = []
    unheard: list[HeardPod] = []
    silent: list[str] = []
    serving = [pod for pod in observation.pods if pod.ready and not pod.terminating]
    for view in observation.pods:
        pod = _aligned(view, observation.now)
        if view not in serving:
            leaving.append(pod)
        elif is_fresh(pod, observation.now):
            heard.append(pod)
        else:
            unheard.append(pod)
            if not _is_new(view, observation.now):
                silent.append(view.name)
    return Fleet(tuple(heard), tuple(leaving), tuple(unheard), tuple(silent), len(serving))


def _aligned(view: PodView, now: float) -> HeardPod:
    """The pod with its ticks in order, and its clock aligned to the operator's. Ticks that are out
    of order or duplicated are repaired."""
    if view.evidence is None or not view.evidence.ticks:
        return HeardPod(view, ())
    ticks: Sequence[Tick] = view.evidence.ticks
    ends_s = [tick.t_s for tick in ticks]
    if not all(map(lt, ends_s, islice(ends_s, 1, None))):
        ticks = _in_order(view.evidence)
    if ticks[-1].boot_id != view.evidence.boot_id:  # it just restarted: its delay is unknown
        return HeardPod(view, ticks)
    return HeardPod(view, ticks, clock_shift(ticks[-1].t_s, view.seen_s, now))


def _in_order(evidence: Evidence) -> list[Tick]:
    """The ticks, each once, boots and ticks in the order they began. Ticks from before the clock
    was set back are timed back from the first after it: a boot's ticks are `TICK_SECONDS` apart."""
    earlier = [tick.boot_id for tick in evidence.ticks if tick.boot_id != evidence.boot_id]
    boots = [*dict.fromkeys(earlier), evidence.boot_id]
    rank = {boot_id: number for number, boot_id in enumerate(boots)}
    unique = {(rank[tick.boot_id], tick.seq): tick for tick in evidence.ticks}
    newest_first: list[Tick] = []
    is_off = False
    for key in sorted(unique, reverse=True):
        tick, after = unique[key], newest_first[-1] if newest_first else None
        if after is not None:
            is_same_boot = after.boot_id == tick.boot_id
            is_off = tick.t_s >= after.t_s or (is_off and is_same_boot)
            if is_off:
                num = after.seq - tick.seq if is_same_boot else 1
                tick = msgspec.structs.replace(tick, t_s=after.t_s - num * TICK_SECONDS)
        newest_first.append(tick)
    return newest_first[::-1]


def clock_shift(newest_s: float, seen_s: float | None, now: float) -> float:
    """Seconds to add to a pod's clock. A tick closed at most a tick before it was read."""
    reference = now if seen_s is None else min(seen_s, now)
    age = reference - newest_s
    if age < 0 or (seen_s is not None and age > k.STALE_TICKS * TICK_SECONDS):
        return age - TICK_SECONDS / 2
    return 0.0


def _is_new(view: PodView, now: float) -> bool:
    """True if it is too young to have been read, or has answered but closed no tick yet."""
    if view.evidence is None:
        return view.started_s is not None and now - view.started_s < k.YOUNG_S
    ticks = view.evidence.ticks
    if ticks and ticks[-1].boot_id == view.evidence.boot_id:
        return False
    return view.seen_s is not None and now - view.seen_s <= k.STALE_TICKS * TICK_SECONDS


def is_fresh(pod: HeardPod, now: float) -> bool:
    """True if it closed a tick recently."""
    return bool(pod.ticks) and now - pod.end_s(pod.ticks[-1]) <= k.STALE_TICKS * TICK_SECONDS


def slices(pods: Sequence[HeardPod], accepts: "Accepts") -> list[tuple[Tick, ...]]:
    """The accepted ticks of `pods`, grouped by time: one tuple for each span of a tick."""
    if len(pods) == 1:
        return list(zip(accepts.of(pods[0])))
    by_time: dict[int, list[Tick]] = {}
    for pod in pods:
        for index, tick in pod.by_span(accepts.of(pod)):
            by_time.setdefault(index, []).append(tick)
    return [tuple(by_time[index]) for index in sorted(by_time)]


@dataclass(frozen=True, slots=True)
class Accepts:
    """Selects ticks: those begun since `since_s`, of `epoch` and settled if one is given.

    From `used_since_s` on a tick need not be settled: a raise that nothing used for that long is in
    force. Breaches by memory, prefill or the node must still be seen then.
    """

    since_s: float
    epoch: int | None = None
    used_since_s: float = inf

    def newest(self, pod: HeardPod, num: int) -> Sequence[Tick]:
        """The last `num` ticks of `pod`, without those that do not count, oldest first."""
        return self.of(replace(pod, ticks=pod.ticks[-num:]))

    def of(self, pod: HeardPod) -> Sequence[Tick]:
        """The ticks of `pod` that count, oldest first."""
        ended_s, epoch = TICK_SECONDS - pod.shift_s, self.epoch
        begun = pod.ticks[bisect_left(pod.ticks, self.since_s + ended_s, key=_end_s) :]
        if epoch is None:
            return begun
        used_s = self.used_since_s + ended_s
        return [
            tick for tick in begun if tick.epoch == epoch and (tick.settled or tick.t_s >= used_s)
        ]


def _end_s(tick: Tick) -> float:
    return tick.t_s


def acknowledged(pods: Sequence[HeardPod], epoch: int) -> tuple[HeardPod, ...]:
    """The pods that run the configuration of `epoch`."""
    return tuple(
        pod
        for pod in pods
        if (pod.view.config.epoch if pod.view.config else pod.ticks[-1].epoch) == epoch
    )


@dataclass(frozen=True, slots=True)
class Workload:
    """The work that the recent ticks of some pods show, whatever the epoch.

    `lengths_known`: enough requests finished for their mean output to be believed. `output_tokens`,
    `prompt_tokens`: means per request, the prompt without what the prefix cache gave.
    `output_steps`: steps that bring its output, fewer with speculation. `total_tokens`,
    `total_sigma`, `num_totals`: mean, standard deviation and number of whole lengths observed.
    `context_tokens`: mean KV tokens of a running sequence. `is_encoding`: nothing is written, each
    request is done by one step and counts as a decode. `decodes`, `prefill_tokens`: means per
    step. `throttled_share`: of the busy time. `waiting_cap`, `waiting_kv`: now, over all pods.
    """

    lengths_known: bool
    output_tokens: float
    output_steps: float
    prompt_tokens: float
    total_tokens: float
    total_sigma: float
    num_totals: int
    context_tokens: float
    is_encoding: bool
    decodes: float
    prefill_tokens: float
    throttled_share: float
    waiting_cap: int
    waiting_kv: int
    spare_pods: tuple[str, ...]


def recent(pods: Iterable[HeardPod]) -> list[Tick]:
    """The last `RECENT_TICKS` ticks of each pod's present boot."""
    return [tick for pod in pods for tick in pod.present[-k.RECENT_TICKS :]]


def describe_work(pods: Sequence[HeardPod]) -> Workload:
    """Mean lengths and steps of `pods` over their recent ticks, with defaults before any."""
    ticks = recent(pods)
    last = [pod.present[-1] for pod in pods if pod.present]
    steps = sum(tick.steps for tick in ticks)
    busy_s = sum(tick.busy_s for tick in ticks)
    telling = _telling(pods)
    spare = tuple(pod.view.name for pod in pods if _has_spare(pod))
    # If all have room, those that finished first are not the short ones.
    num_pods = len(pods) if len(spare) < len(pods) else 1
    known = _num_finished(telling) >= num_pods * k.MIN_FINISHED
    output = _output_tokens(telling, known)
    prompt = _prompt_tokens(telling)
    lengths = pooled(pod.view.evidence for pod in pods if pod.view.evidence)
    total = lengths.mean if lengths.n else output + prompt
    is_encoding = known and not any(map(_writes, telling))
    ran = sum(t.finished if is_encoding else t.decodes for t in ticks)
    return Workload(
        lengths_known=known,
        output_tokens=output,
        output_steps=output * _steps_per_token(telling),
        prompt_tokens=prompt,
        total_tokens=total,
        total_sigma=lengths.sigma,
        num_totals=lengths.n,
        context_tokens=max(total - output / 2, 1.0),
        is_encoding=is_encoding,
        decodes=ran / steps if steps else 0.0,
        prefill_tokens=sum(tick.prefill_tokens for tick in ticks) / steps if steps else 0.0,
        throttled_share=sum(t.throttled_s for t in ticks) / busy_s if busy_s else 0.0,
        waiting_cap=sum(tick.waiting.cap for tick in last),
        waiting_kv=sum(tick.waiting.kv for tick in last),
        spare_pods=spare,
    )


def _has_spare(pod: HeardPod) -> bool:
    """True if nothing waited and at most half of the cap ran for ten seconds."""
    return all(
        2 * tick.max_running <= tick.cap and not tick.waiting.total
        for tick in pod.ticks[-k.STALE_TICKS :]
    )


def _telling(pods: Sequence[HeardPod]) -> list[Sequence[Tick]]:
    """Each pod's newest ticks: those of half a minute, or as many more as it takes to know lengths.

    Half a minute holds too few rare or long requests.
    """
    present = [pod.present for pod in pods if pod.present]
    num, longest = k.RECENT_TICKS, max(map(len, present), default=0)
    while True:
        found = [ticks[-num:] for ticks in present]
        if num >= longest or _num_finished(found) >= len(pods) * k.MIN_FINISHED:
            return found
        num *= 2


def _num_finished(spans: Iterable[Sequence[Tick]]) -> int:
    return sum(tick.finished for span in spans for tick in span)


def num_begun(ticks: Iterable[Tick]) -> int:
    """Requests whose first token came."""
    return sum(sum(tick.ttft.sketch.values()) for tick in ticks)


def _output_tokens(spans: Sequence[Sequence[Tick]], known: bool) -> float:
    """Mean output of requests that ended, finished or cancelled once they ran.

    A running request has part of its output: if more began than ended, the surplus counts half.
    Before lengths are known all that run count, which gives a lower bound.
    """
    if not known:
        generated = sum(tick.generated_tokens for ticks in spans for tick in ticks)
        open_ones = _num_finished(spans) + sum(ticks[-1].running for ticks in spans)
        return max(k.DEFAULT_OUTPUT_TOKENS, generated / open_ones if open_ones else 0.0)
    later = [ticks[1:] for ticks in spans]  # since what ran at the end of the first
    later = later if _num_finished(later) else list(spans)
    generated = sum(tick.generated_tokens for ticks in later for tick in ticks)
    finished, begun = _num_finished(later), sum(map(num_begun, later))
    grown = sum(ticks[-1].running - ticks[0].running for ticks in spans)
    grown = min(grown, begun - finished)  # some are still in prefill
    ended = max(finished, begun - grown)
    return max(generated / (ended + max(grown, 0) / 2), 1.0)


def _steps_per_token(spans: Sequence[Sequence[Tick]]) -> float:
    """At most 1: a step of speculation may bring several tokens. 1 if nobody counts decodes."""
    generated = sum(tick.generated_tokens for ticks in spans for tick in ticks)
    decodes = sum(tick.decodes for ticks in spans for tick in ticks)
    steps = decodes + sum(map(num_begun, spans))
    return min(steps / generated, 1.0) if generated and decodes else 1.0


def _writes(ticks: Sequence[Tick]) -> bool:
    return num_begun(ticks) > 0 or any(tick.generated_tokens for tick in ticks)


def _prompt_tokens(spans: Sequence[Sequence[Tick]]) -> float:
    """Prompt tokens computed per request whose first token came, or that ended where none come."""
    computed = sum(tick.prefill_tokens for ticks in spans for tick in ticks)
    begun = sum(map(num_begun, spans)) or _num_finished(spans)
    return computed / begun if begun else k.DEFAULT_PROMPT_TOKENS


def pooled(evidence: Iterable[Evidence]) -> Lengths:
    """Mean, standard deviation and number of the whole lengths of all finished requests; zeros
    before any."""
    lengths = [pod.lengths for pod in evidence]
    num = sum(length.n for length in lengths)
    if not num:
        return Lengths(0.0, 0.0, 0)
    mean = sum(length.mean * length.n for length in lengths) / num
    square = sum((length.sigma**2 + length.mean**2) * length.n for length in lengths) / num
    return Lengths(mean, sqrt(max(0.0, square - mean**2)), num)


def is_filled(tick: Tick) -> bool:
    """True if no more could run: the cap was reached, or some waited for memory."""
    return tick.waiting.kv > 0 or _reaches_cap(tick)


def _reaches_cap(tick: Tick) -> bool:
    return tick.max_running >= k.USED_SHARE * tick.cap


def cap_is_used(ticks: Sequence[Tick]) -> bool:
    """True if at least half of `ticks` ran at the cap or had requests waiting for it."""
    used = [tick for tick in ticks if _reaches_cap(tick) or tick.waiting.cap]
    return bool(ticks) and 2 * len(used) >= len(ticks)


def misses_by_cause(ticks: Iterable[Tick]) -> dict[Cause, int]:
    """First-token misses of `ticks` by booked cause; `none`: refused or not booked."""
    by: dict[Cause, int] = {"cap": 0, "kv": 0, "prefill": 0, "outside": 0, "none": 0}
    for tick in ticks:
        causes = tick.ttft.by
        booked = causes.cap + causes.kv + causes.prefill + causes.outside
        by["cap"] += causes.cap
        by["kv"] += causes.kv
        by["prefill"] += causes.prefill
        by["outside"] += causes.outside
        by["none"] += max(0, tick.ttft.over - booked)
    return by


def median_kv_tokens(pods: Sequence[HeardPod]) -> float | None:
    """KV tokens of one pod, or None if no pod reported them."""
    sizes = [pod.view.evidence.memory.kv_tokens for pod in pods if pod.view.evidence]
    return median(sizes) if sizes else None
