"""Judges each target: the promise over the window, and the evidence of this epoch. Failed requests
are no evidence of speed, and are counted apart."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import floor, inf, sqrt
from operator import attrgetter
from typing import NamedTuple

from sluice_core import sketch
from sluice_core.contract import TICK_SECONDS, TargetName, Tick

from . import constants as k
from . import interference
from .detect import Moments, Series, design_effect, headroom
from .evidence import Accepts, HeardPod
from .tick_sums import Reading, TickSlice, TickWindow, add_up, series_of
from .types import EngineFailures, Targets, TargetVerdict, Verdict


@dataclass(frozen=True, slots=True)
class Counts:
    """How one target is read from a tick. `proof`: the samples that may show headroom."""

    seen: Reading
    proof: Reading
    sketch: Callable[[Tick], dict[int, int]]


_first_tokens = attrgetter("ttft.n", "ttft.over")
_gaps = attrgetter("itl.n", "itl.over")
_gaps_at_cap = attrgetter("itl.n_at_cap", "itl.over_at_cap")
_gaps_in_prefill = attrgetter("itl.n_in_prefill", "itl.over_in_prefill")
_requests = attrgetter("e2e.n", "e2e.over")
_slow_runs = attrgetter("itl.over", "itl.over_after_over")
_waiting = attrgetter("waiting.cap", "waiting.kv")


def _gaps_outside_prefill(tick: Tick) -> tuple[int, int]:
    n = max(0, tick.itl.n - tick.itl.n_in_prefill)
    return n, min(n, max(0, tick.itl.over - tick.itl.over_in_prefill))


READERS: dict[TargetName, Counts] = {
    "timeToFirstToken": Counts(_first_tokens, _first_tokens, lambda tick: tick.ttft.sketch),
    "interTokenLatency": Counts(_gaps, _gaps_at_cap, lambda tick: tick.itl.sketch),
    "endToEnd": Counts(_requests, _requests, lambda tick: tick.e2e.sketch),
}


def judge(
    targets: Targets,
    window: TickWindow,
    epoch: TickWindow,
    far_ms: float = inf,
    *,
    decodes_hold: bool = False,
) -> dict[TargetName, TargetVerdict]:
    """Judges every target asked for. `window`: all ticks of the window. `epoch`: those that are
    evidence. `far_ms`: gaps over it are interference. `decodes_hold`: the step model predicts that
    the decodes that ran hold the target without a prompt beside them."""
    names = targets.by_name()
    threshold = k.BREACH_EVIDENCE * max(1, len(names))
    judged = {
        name: _judge_one(name, target_ms, targets, threshold, window, epoch, far_ms)
        for name, target_ms in names.items()
    }
    gaps = judged.get("interTokenLatency")
    if gaps is None or gaps.verdict != "Breach":
        return judged
    if _holds_outside_prefill(targets.allowed_share, threshold, epoch, decodes_hold=decodes_hold):
        judged["interTokenLatency"] = _without_prefill(gaps, epoch)
    return judged


def _holds_outside_prefill(
    allowed: float, threshold: float, epoch: TickWindow, *, decodes_hold: bool
) -> bool:
    """True if the gaps that no other request's first token made hold the target. If those are too
    few to tell, the step model does; without one they do not."""
    n, over = epoch.total(_gaps_outside_prefill)
    if over > allowed * n:
        return False
    evidence = epoch.breach_evidence(allowed, threshold, series_of, _gaps_outside_prefill)
    return evidence < threshold and (allowed * n >= k.MIN_BEYOND or decodes_hold)


def _without_prefill(gaps: TargetVerdict, epoch: TickWindow) -> TargetVerdict:
    """The verdict that excuses gaps in prefill, as those under interference."""
    _, over = epoch.total(_gaps_in_prefill)
    n, over_at_cap = epoch.total(_gaps_at_cap)
    _, at_cap = epoch.total(_in_prefill_at_cap)
    effect = _effect("interTokenLatency", epoch)
    proof = headroom(n - at_cap, over_at_cap - at_cap, effect, gaps.allowed_share)
    return replace(
        gaps,
        samples_needed=proof.samples_needed,
        epoch_far=over,
        far_at_cap=at_cap,
        cap_breached=False,
        in_prefill=True,
    )


def _in_prefill_at_cap(tick: Tick) -> tuple[int, int]:
    return tick.itl.n_at_cap, min(tick.itl.over_in_prefill, tick.itl.over_at_cap)


def _judge_one(
    name: TargetName,
    target_ms: float,
    targets: Targets,
    threshold: float,
    window: TickWindow,
    epoch: TickWindow,
    far_ms: float,
) -> TargetVerdict:
    read = READERS[name]
    n, over = window.total(read.seen)
    epoch_n, epoch_over = epoch.total(read.seen)
    bucket = interference.far_bucket(far_ms) if name == "interTokenLatency" else None
    far, far_at_cap = (0, 0) if bucket is None else epoch.joined(add_up, _far, read.proof, bucket)
    verdict, needed = _test(name, targets.allowed_share, threshold, epoch, far_at_cap)
    cap_breached = verdict == "Breach"
    if cap_breached and far:
        near = epoch.breach_evidence(targets.allowed_share, threshold, _near, read.seen, bucket)
        cap_breached = near >= threshold
    if n and verdict == "NoTraffic":
        verdict = "Hold"  # the epoch is too young to tell
    values = window.sketch(read.sketch)
    return TargetVerdict(
        target=name,
        target_ms=target_ms,
        n=n,
        over=over,
        allowed_share=targets.allowed_share,
        over_share=over / n if n else 0.0,
        quantile_ms=sketch.quantile_ms(values, 1 - targets.allowed_share),
        bound_ms=bound_ms(values, targets.allowed_share),
        verdict=verdict,
        epoch_n=epoch_n,
        epoch_over=epoch_over,
        samples_needed=needed,
        verifiable=_verifiable(needed, n, len(window)),
        epoch_far=far,
        far_at_cap=far_at_cap,
        cap_breached=cap_breached,
    )


def bound_ms(values: Mapping[int, int], allowed: float) -> float | None:
    """The time that the true quantile, 1 - `allowed`, exceeds by chance once in 20 times, if values
    are independent; None for fewer than `3 / allowed`, which show none.

    Values beyond the true quantile are Poisson with the mean `mean`. At most `mean - sqrt(3 mean)`
    come with a probability below 5 % (for a mean of 3: none, e^-3).
    """
    n = sum(values.values())
    mean = allowed * n
    beyond = floor(mean - sqrt(3 * mean))
    if n == 0 or beyond < 0:
        return None
    return sketch.quantile_ms(values, (n - 1 - beyond) / max(n - 1, 1))


def _test(
    name: TargetName, allowed: float, threshold: float, epoch: TickWindow, far_at_cap: int
) -> tuple[Verdict, int]:
    """The verdict, and the clean samples that headroom still needs."""
    read = READERS[name]
    n, over = epoch.total(read.proof)
    proof = headroom(n - far_at_cap, over - far_at_cap, _effect(name, epoch), allowed)
    if epoch.breach_evidence(allowed, threshold, series_of, read.seen) >= threshold:
        return "Breach", proof.samples_needed
    if not epoch.total(read.seen)[0]:
        return "NoTraffic", proof.samples_needed
    return ("Headroom" if proof.shown else "Hold"), proof.samples_needed


def is_breached(name: TargetName, epoch: Sequence[TickSlice], targets: Targets) -> bool:
    """True if the ticks of `epoch` alone breach the target `name`."""
    threshold = k.BREACH_EVIDENCE * max(1, len(targets.by_name()))
    counted = TickWindow(epoch).breach_evidence(
        targets.allowed_share, threshold, series_of, READERS[name].seen
    )
    return counted >= threshold


def _near(parts: Sequence[TickSlice], reading: Reading, bucket: int | None) -> Series:
    """The gaps of each span without those of interference."""
    both = zip(series_of(parts, reading), parts, strict=True)
    counted = [(n, over, interference.num_far(part, bucket)) for (n, over), part in both]
    return [(n - far, over - far) for n, over, far in counted]


def _far(parts: Sequence[TickSlice], proof: Reading, bucket: int) -> tuple[int, int]:
    """Gaps of interference, and those of them that would be proof. Ticks in which the cap was not
    used prove nothing about it, and excuse nothing."""
    far = [interference.num_far(part, bucket) for part in parts]
    over = [over for _, over in series_of(parts, proof)] if any(far) else ()
    return sum(far), sum(map(min, far, over))


def _effect(name: TargetName, epoch: TickWindow) -> float:
    """Design effect from batch means of "over the evidence's own P90"."""
    read = READERS[name].sketch
    bucket = sketch.bucket_at(epoch.sketch(read), k.DESIGN_QUANTILE)
    if bucket is None:
        return 1.0
    if name == "interTokenLatency":
        ticks = epoch.joined(Moments.total, _moments, read, bucket)
        return design_effect(ticks, _interference(epoch.total(_slow_runs)))
    return design_effect(epoch.joined(_on_end, _busy_periods, read, bucket).moments)


def _moments(
    parts: Sequence[TickSlice], read: Callable[[Tick], dict[int, int]], bucket: int
) -> Moments:
    return Moments.of(_marked(parts, read, bucket))


def _marked(
    parts: Sequence[TickSlice], read: Callable[[Tick], dict[int, int]], bucket: int
) -> list[tuple[int, int]]:
    """(samples, those above `bucket`) of each span."""
    spans = [[read(tick) for tick in part] for part in parts]
    return [
        (sum([sum(s.values()) for s in span]), sum([sketch.count_above(s, bucket) for s in span]))
        for span in spans
    ]


class _Periods(NamedTuple):
    """Spans grouped until nobody waits: the requests of one burst share one queue.

    `first`: (samples, marked ones) up to the end of the first period, None if none ends. `rest`:
    those of the periods between. `last`: those of the one that has not ended.
    """

    first: tuple[int, int] | None
    rest: Moments
    last: tuple[int, int]

    @property
    def moments(self) -> Moments:
        """The moments of all periods."""
        return Moments.total([Moments.of([self.first or (0, 0), self.last]), self.rest])


def _busy_periods(
    parts: Sequence[TickSlice], read: Callable[[Tick], dict[int, int]], bucket: int
) -> _Periods:
    ended, n, above = [], 0, 0
    waiting = series_of(parts, _waiting)
    for (more, more_above), waits in zip(_marked(parts, read, bucket), waiting, strict=True):
        n, above = n + more, above + more_above
        if not any(waits):
            ended.append((n, above))
            n = above = 0
    return _Periods(ended[0] if ended else None, Moments.of(ended[1:]), (n, above))


def _on_end(runs: Sequence[_Periods]) -> _Periods:
    """Joins successive ones: the last period of one goes on as the first of the next."""
    across, last = [], (0, 0)
    for run in runs:
        if run.first is None:
            last = add_up([last, run.last])
        else:
            across.append(add_up([last, run.first]))
            last = run.last
    rest = Moments.total([Moments.of(across[1:]), *(run.rest for run in runs)])
    return _Periods(across[0] if across else None, rest, last)


def _interference(slow_runs: tuple[int, int]) -> float:
    """Share of the gaps over target that directly follow another one."""
    over, after_over = slow_runs
    return after_over / over if over else 0.0


def _verifiable(needed: int, n: int, num_spans: int) -> bool:
    """True if `needed` samples come in within `VERIFIABLE_S` at the window's rate."""
    per_second = n / (num_spans * TICK_SECONDS) if num_spans else 0.0
    return needed <= per_second * k.VERIFIABLE_S


def read_failures(
    window: TickWindow, pods: Sequence[HeardPod], since_s: float, targets: Targets
) -> EngineFailures:
    """Requests that the engines failed in `window`, the ticks of `pods` since `since_s`."""
    finished, _ = window.total(_finished_and_failed)
    by = window.joined(_sum, _kinds)
    return EngineFailures(
        ended=finished + sum(by.values()),
        by=by,
        allowed_share=min(k.FAILED_SHARE, targets.allowed_share),
        pod=_only_pod(pods, since_s) if by and len(pods) > 1 else "",
        is_all=_are_all(window),
    )


def _finished_and_failed(tick: Tick) -> tuple[int, int]:
    return tick.finished, sum(tick.failed.values())


def _kinds(parts: Sequence[TickSlice]) -> dict[str, int]:
    return _sum(tick.failed for part in parts for tick in part)


def _sum(counts: Iterable[dict[str, int]]) -> dict[str, int]:
    total = Counter[str]()
    for counted in counts:
        total.update(counted)
    return dict(+total)


def _only_pod(pods: Sequence[HeardPod], since_s: float) -> str:
    """The only one of `pods` that has failed any, or ""."""
    accepts = Accepts(since_s)
    failing = [pod.view.name for pod in pods if any(tick.failed for tick in accepts.of(pod))]
    return failing[0] if len(failing) == 1 else ""


def _are_all(window: TickWindow) -> bool:
    """True if enough failed since one finished, which is a minute ago or not in the window."""
    num_failed = 0
    for age, part in enumerate(reversed(window.parts)):
        if any(tick.finished for tick in part):
            return age >= k.ALL_FAILED_TICKS and num_failed >= k.ALL_FAILED
        num_failed += sum(_finished_and_failed(tick)[1] for tick in part)
    return num_failed >= k.ALL_FAILED
