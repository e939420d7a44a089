"""Judges each target: the promise over the window, and the evidence of this epoch."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf

from sluice_worker.contract import TICK_SECONDS, Tick

from . import constants as k
from . import sketch, spells
from .detect import Series, breach_evidence, design_effect, headroom
from .types import TargetName, Targets, TargetVerdict, Verdict

Slices = Sequence[tuple[Tick, ...]]


@dataclass(frozen=True, slots=True)
class Counts:
    """How one target is read from a tick. `proof`: the samples that may show headroom."""

    seen: Callable[[Tick], tuple[int, int]]
    proof: Callable[[Tick], tuple[int, int]]
    sketch: Callable[[Tick], dict[int, int]]


def _first_tokens(tick: Tick) -> tuple[int, int]:
    return tick.ttft.n, tick.ttft.over


def _gaps(tick: Tick) -> tuple[int, int]:
    return tick.itl.n, tick.itl.over


def _gaps_at_cap(tick: Tick) -> tuple[int, int]:
    return tick.itl.n_at_cap, tick.itl.over_at_cap


def _requests(tick: Tick) -> tuple[int, int]:
    return tick.e2e.n, tick.e2e.over


READERS: dict[TargetName, Counts] = {
    "timeToFirstToken": Counts(_first_tokens, _first_tokens, lambda tick: tick.ttft.sketch),
    "interTokenLatency": Counts(_gaps, _gaps_at_cap, lambda tick: tick.itl.sketch),
    "endToEnd": Counts(_requests, _requests, lambda tick: tick.e2e.sketch),
}


def judge(
    targets: Targets, window: Slices, epoch: Slices, far_ms: float = inf
) -> dict[TargetName, TargetVerdict]:
    """Every target asked for. `window`: all ticks of the window; `epoch`: those that are
    evidence; `far_ms`: gaps over it are of slow spells."""
    names = targets.by_name()
    threshold = k.BREACH_EVIDENCE * max(1, len(names))
    return {
        name: _judge_one(name, target_ms, targets, threshold, window, epoch, far_ms)
        for name, target_ms in names.items()
    }


def _judge_one(
    name: TargetName,
    target_ms: float,
    targets: Targets,
    threshold: float,
    window: Slices,
    epoch: Slices,
    far_ms: float,
) -> TargetVerdict:
    read = READERS[name]
    n, over = _total(window, read.seen)
    epoch_n, epoch_over = _total(epoch, read.seen)
    far = [spells.num_far(part, far_ms if name == "interTokenLatency" else inf) for part in epoch]
    verdict, needed = _test(name, targets.allowed_share, threshold, epoch, sum(far))
    cap_breached = verdict == "Breach"
    if cap_breached and any(far):
        spans = zip(series_of(epoch, read.seen), far, strict=True)
        near = [(n - num_far, over - num_far) for (n, over), num_far in spans]
        cap_breached = breach_evidence(near, targets.allowed_share, threshold) >= threshold
    if n and verdict == "NoTraffic":
        verdict = "Hold"  # the epoch is too young to tell
    merged = sketch.merge(read.sketch(tick) for part in window for tick in part)
    share = over / n if n else 0.0
    return TargetVerdict(
        target=name,
        target_ms=target_ms,
        n=n,
        over=over,
        allowed_share=targets.allowed_share,
        over_share=share,
        used=share / targets.allowed_share,
        quantile_ms=sketch.quantile_ms(merged, 1 - targets.allowed_share),
        verdict=verdict,
        epoch_n=epoch_n,
        epoch_over=epoch_over,
        samples_needed=needed,
        verifiable=_verifiable(needed, n, len(window)),
        epoch_far=sum(far),
        cap_breached=cap_breached,
    )


def _test(
    name: TargetName, allowed: float, threshold: float, epoch: Slices, num_far_gaps: int
) -> tuple[Verdict, int]:
    """The verdict, and the clean samples that headroom still needs."""
    read = READERS[name]
    series = series_of(epoch, read.seen)
    n, over = _total(epoch, read.proof)
    num_far_gaps = min(num_far_gaps, over)
    proof = headroom(n - num_far_gaps, over - num_far_gaps, _effect(name, epoch), allowed)
    if breach_evidence(series, allowed, threshold) >= threshold:
        return "Breach", proof.samples_needed
    if not any(size for size, _ in series):
        return "NoTraffic", proof.samples_needed
    return ("Headroom" if proof.shown else "Hold"), proof.samples_needed


def is_breached(name: TargetName, epoch: Slices, targets: Targets) -> bool:
    """Whether the ticks of `epoch` alone breach the target `name`."""
    threshold = k.BREACH_EVIDENCE * max(1, len(targets.by_name()))
    series = series_of(epoch, READERS[name].seen)
    return breach_evidence(series, targets.allowed_share, threshold) >= threshold


def series_of(parts: Slices, counts: Callable[[Tick], tuple[int, int]]) -> Series:
    """(samples, over) of each span of a tick, summed over the pods."""
    return [_total([part], counts) for part in parts]


def _total(parts: Slices, counts: Callable[[Tick], tuple[int, int]]) -> tuple[int, int]:
    total_n = total_over = 0
    for part in parts:
        for tick in part:
            n, over = counts(tick)
            total_n += n
            total_over += over
    return total_n, total_over


def _effect(name: TargetName, epoch: Slices) -> float:
    """Design effect from batch means of "over the evidence's own P90"."""
    read = READERS[name].sketch
    merged = sketch.merge(read(tick) for part in epoch for tick in part)
    bucket = sketch.bucket_at(merged, k.DESIGN_QUANTILE)
    if bucket is None:
        return 1.0
    batches: Sequence[Sequence[Tick]] = epoch
    if name != "interTokenLatency":
        batches = _busy_periods(epoch)
    marked = []
    for batch in batches:
        n = above = 0
        for tick in batch:
            part = read(tick)
            n += sum(part.values())
            above += sketch.count_above(part, bucket)
        marked.append((n, above))
    return design_effect(marked, _spells(epoch) if name == "interTokenLatency" else 0.0)


def _busy_periods(epoch: Slices) -> list[list[Tick]]:
    """Spans put together until nobody waits: the requests of one burst share one queue."""
    periods: list[list[Tick]] = []
    period: list[Tick] = []
    for part in epoch:
        period += part
        if not _is_queued(part):
            periods.append(period)
            period = []
    return [*periods, period] if period else periods


def _is_queued(part: Sequence[Tick]) -> bool:
    return any(tick.waiting.cap or tick.waiting.kv for tick in part)


def _spells(epoch: Slices) -> float:
    """Share of the gaps over target that directly follow another one."""
    ticks = [tick for part in epoch for tick in part]
    over = sum(tick.itl.over for tick in ticks)
    return sum(tick.itl.over_after_over for tick in ticks) / over if over else 0.0


def _verifiable(needed: int, n: int, num_spans: int) -> bool:
    """Whether `needed` samples come in within `VERIFIABLE_S` at the window's rate."""
    per_second = n / (num_spans * TICK_SECONDS) if num_spans else 0.0
    return needed <= per_second * k.VERIFIABLE_S
