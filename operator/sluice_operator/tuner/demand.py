"""How many pods the arrivals need: Little, Halfin-Whitt, the backlog and recurring bursts.

Demand is read from arrivals, never from completions; zero traffic is a value.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, exp, inf, sqrt
from statistics import NormalDist, fmean, median

from sluice_core.contract import TICK_SECONDS

from . import constants as k
from .evidence import HeardPod, is_fresh


@dataclass(frozen=True, slots=True)
class Arrivals:
    """`per_s`: sustained rate. `dispersion`: variance over mean of the counts of ticks, at least 1.

    `burst`: the largest burst if bursts recur, else 0. `is_known`: seen for half a minute at least.
    `newest_per_s`: the present rate, chance included, if a queue rises; else 0. `mean_per_s`: over
    ten minutes. `surely_per_s`: its part beyond chance.
    """

    per_s: float
    dispersion: float
    burst: int
    is_known: bool = True
    newest_per_s: float = 0.0
    mean_per_s: float = 0.0
    surely_per_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Capacity:
    """Capacity of one pod: `concurrency` sequences at once, each for `service_s` seconds.

    `is_modelled`: `service_s` is at that concurrency; else it was seen at whatever ran.
    """

    concurrency: float
    service_s: float
    is_modelled: bool = True

    @property
    def per_s(self) -> float:
        """Requests that one pod completes per second when full."""
        return self.concurrency / self.service_s


@dataclass(frozen=True, slots=True)
class Demand:
    """The replicas needed, and those needed with the margin for scaling in.

    `for_prefill`: prompts that would wait for each other determine the number.
    """

    arrivals: Arrivals
    capacity: Capacity | None
    needed: int
    needed_with_margin: int
    for_prefill: bool = False


@dataclass(frozen=True, slots=True)
class OfferedLoad:
    """The caps that the arrivals need if no more pods will come; 0: any cap.

    `raise_to`: the lowest that serves the arrivals, if the present one does not: the queue grows
    without end, so all first tokens are late. `keep`: a cap below it was recently too low, so none
    is set. `enough`: with a tenth to spare, so that fewer may run in order to end in time.
    """

    raise_to: int = 0
    keep: int = 0
    enough: int = 0


def read_arrivals(pods: Sequence[HeardPod], now: float, heard_share: float) -> Arrivals:
    """Arrivals at `pods` in the last ten minutes, scaled up for pods that are not heard."""
    counts = [count / heard_share for count in _counts(pods, now)]
    if not counts:
        return Arrivals(0.0, 1.0, 0, is_known=False)
    per_s, dispersion = _sustained_per_s(counts), _dispersion(counts)
    fresh = [pod for pod in pods if is_fresh(pod, now)]
    burst = _recurring_burst(counts, per_s * TICK_SECONDS, may_be_cut=len(fresh) > 1)
    newest_per_s = 0.0
    if burst:
        per_s = max(per_s, fmean(counts) / TICK_SECONDS)
    elif _queue_rises(fresh):
        newest_per_s = median(counts[-k.RISING_TICKS :]) / TICK_SECONDS
        per_s = max(per_s, _at_least(newest_per_s, dispersion, k.RISING_TICKS))
    is_known = len(counts) >= k.RECENT_TICKS
    mean_per_s = fmean(counts) / TICK_SECONDS
    surely_per_s = _at_least(mean_per_s, dispersion, len(counts))
    return Arrivals(per_s, dispersion, burst, is_known, newest_per_s, mean_per_s, surely_per_s)


def _counts(pods: Sequence[HeardPod], now: float) -> list[int]:
    """Arrivals in each span of a tick, oldest first, up to the newest that all pods have closed."""
    by_time: dict[int, int] = {}
    oldest = round((now - k.BURST_MEMORY_S) / TICK_SECONDS)
    for pod in pods:
        for index, tick in pod.by_span(reversed(pod.ticks)):
            if index < oldest:
                break
            by_time[index] = by_time.get(index, 0) + tick.arrivals
    if not by_time:
        return []
    # A pod that is gone or dead has closed its last tick: it would stop the clock for all.
    speaking = [pod for pod in pods if is_fresh(pod, now)] or pods
    last = min(round(pod.end_s(pod.ticks[-1]) / TICK_SECONDS) for pod in speaking)
    last = min(last, round(now / TICK_SECONDS) + 1)  # no clock is trusted about the future
    return [by_time.get(index, 0) for index in range(max(oldest, min(by_time)), last + 1)]


def _sustained_per_s(counts: Sequence[float]) -> float:
    """Median over chunks: moved by a step of the load, not by one burst."""
    newest = counts[-k.RECENT_TICKS :]
    per_s = max(fmean(counts), fmean(newest)) / TICK_SECONDS
    chunk_s = min(max(k.CHUNK_ARRIVALS / per_s if per_s else inf, k.MIN_CHUNK_S), k.MAX_CHUNK_S)
    size = ceil(chunk_s / TICK_SECONDS)
    chunks = [
        fmean(counts[end - size : end])
        for end in range(len(counts), size - 1, -size)[: k.RATE_CHUNKS]
    ]
    return (median(chunks) if chunks else fmean(counts)) / TICK_SECONDS


def _queue_rises(pods: Sequence[HeardPod]) -> bool:
    """True if the queue grew in nearly each of the newest ticks; a burst grows it in one."""
    newest = [pod.ticks[-k.RISING_TICKS - 1 :] for pod in pods if len(pod.ticks) > k.RISING_TICKS]
    waits = [[tick.waiting.total for tick in ticks] for ticks in newest]
    queue = [sum(of_pods) for of_pods in zip(*waits, strict=True)]
    rises: int = sum(now > before for before, now in zip(queue, queue[1:], strict=False))
    return rises >= k.RISES


def _at_least(per_s: float, dispersion: float, num_ticks: int) -> float:
    """The rate that `per_s`, seen over `num_ticks`, shows beyond chance."""
    span_s = num_ticks * TICK_SECONDS
    return per_s - k.RATE_DOUBT * sqrt(per_s * dispersion / span_s)


def _dispersion(counts: Sequence[float]) -> float:
    """From differences of neighbours, so that a step of the load does not read as noise.

    It is a lower bound: half a minute of a Poisson stream may read as 2 by chance.
    """
    newest = counts[-k.DISPERSION_TICKS :]
    mean = fmean(newest)
    if len(newest) < k.RECENT_TICKS or not mean:
        return 1.0
    steps = [(b - a) ** 2 / 2 for a, b in zip(newest, newest[1:], strict=False)]
    doubt = 1 + k.DISPERSION_DOUBT * sqrt(3 / len(steps))
    return min(max(fmean(steps) / mean / doubt, 1.0), k.MAX_DISPERSION)


def _recurring_burst(counts: Sequence[float], sustained: float, may_be_cut: bool) -> int:
    """The largest burst if there were several. `sustained`: arrivals of a tick at the steady rate.
    `may_be_cut`: ticks of several pods end at different times, so one burst may be in two."""
    usual = max(fmean(counts), sustained)
    bar = _bar(usual)
    high = [count > bar and _stands_out(counts, at) for at, count in enumerate(counts)]
    starts = sum(now and not before for before, now in zip([False, *high], high, strict=False))
    if starts < k.RECURRENT_BURSTS:
        return 0
    most = max(count for count, is_high in zip(counts, high, strict=True) if is_high)
    if may_be_cut:
        high = [False, *high, False]
        pairs = [i for i in range(len(counts) - 1) if high[i : i + 4] == [False, True, True, False]]
        most = max([most, *(counts[i] + counts[i + 1] - usual for i in pairs)])
    return ceil(most)


def _bar(usual: float) -> float:
    """Arrivals in a tick from which they are a burst."""
    return max(k.BURST_MEAN * usual, usual + k.BURST_SIGMA * sqrt(usual))


def _stands_out(counts: Sequence[float], at: int) -> bool:
    """True if so much came only briefly. A load that rose for longer is a step: the sustained rate
    followed it, and its pods are not held for ten minutes after it."""
    half = k.RECENT_TICKS // 2
    around = counts[max(0, at - half) : at + half + 1]
    return counts[at] > _bar(median(around))


@dataclass(frozen=True, slots=True)
class Backlog:
    """The requirement of a plan for replicas: all but the share `allowed` wait at most `wait_s`.

    `wait_s` is infinite without a first-token target; then only utilisation counts. `waiting`
    requests must be gone within `drain_s`. `prefill_s`: how long one prompt occupies a pod's
    prefill. `prefill_spread`: the variance of that over its square. `by_deadline`: requests that
    can still be in time go before late ones.
    """

    wait_s: float
    allowed: float
    drain_s: float
    waiting: int
    prefill_s: float = 0.0
    prefill_spread: float = 0.0
    by_deadline: bool = False


def plan_demand(
    arrivals: Arrivals,
    capacity: Capacity | None,
    queue: Backlog,
    replicas: int,
    minimum: int,
) -> Demand:
    """Replicas for `arrivals`, for the queue that `replicas` cannot drain, for recurring bursts."""
    if not arrivals.is_known:
        return Demand(arrivals, capacity, replicas, replicas)
    if not (arrivals.per_s or queue.waiting):
        return Demand(arrivals, capacity, minimum, minimum)
    if capacity is None:
        return Demand(arrivals, capacity, replicas, replicas)
    prefill = _for_prefill(arrivals, queue, queue.allowed, k.PREFILL_IDLE)
    others = max(
        minimum,
        _for_rate(arrivals, capacity, queue, k.MAX_UTILISATION, queue.allowed),
        _for_burst(arrivals, capacity, queue),
        _for_backlog(arrivals, capacity, queue, replicas),
    )
    needed = max(prefill, others)
    utilisation = k.SCALE_IN_UTILISATION * (1.0 if capacity.is_modelled else k.UNMODELLED)
    allowed = k.SCALE_IN_MARGIN * queue.allowed
    with_margin = max(
        needed,
        _for_rate(arrivals, capacity, queue, utilisation, allowed),
        _for_prefill(arrivals, queue, allowed, k.PREFILL_IDLE_MARGIN),
    )
    return Demand(arrivals, capacity, needed, with_margin, prefill > others)


def share_that_waits(per_s: float, dispersion: float, capacity: Capacity, replicas: int) -> float:
    """Chance that an arrival finds every sequence taken (Halfin and Whitt 1981)."""
    offered = per_s * capacity.service_s
    spare = replicas * capacity.concurrency - offered
    if spare <= 0:
        return 1.0
    if offered <= 0:
        return 0.0
    beta = spare / sqrt(dispersion * offered)
    normal = NormalDist()
    density = normal.pdf(beta)
    return density / (density + beta * normal.cdf(beta))


def share_too_late(arrivals: Arrivals, capacity: Capacity, queue: Backlog, replicas: int) -> float:
    """Chance that an arrival waits longer than `queue.wait_s`; the wait's tail is exponential."""
    most, offered = replicas * capacity.concurrency, arrivals.per_s * capacity.service_s
    spare = most - offered
    if spare <= 0:
        return 1.0
    waits = share_that_waits(arrivals.per_s, arrivals.dispersion, capacity, replicas)
    late = waits * exp(-spare * queue.wait_s / (capacity.service_s * arrivals.dispersion))
    return _in_order(late, offered / most, queue)


def _in_order(late: float, busy: float, queue: Backlog) -> float:
    """The share that is late under the serving order; `late`: under first come, first served.

    If the late were never served, they would delay nobody. Then (1 - busy) / (1 - busy * late) of
    the share is left (Boots and Tijms 1999, doi:10.1287/mnsc.45.3.444). They are served when nobody
    in time waits, and then keep their places. So the result is the geometric mean of the two
    (simulated: 0.7 to 1.1 of it, at loads of 60 to 95 %).
    """
    return late * sqrt((1 - busy) / (1 - busy * late)) if queue.by_deadline else late


def share_late_in_prefill(arrivals: Arrivals, queue: Backlog, replicas: int) -> float:
    """The same for the wait for a pod's prefill, which takes one prompt after the other. The tail
    is that of a single server in heavy traffic (Kingman 1962).

    A prompt that alone takes too long does so on any number of pods.
    """
    if not queue.prefill_s or not queue.wait_s:
        return 0.0
    busy = arrivals.per_s / replicas * queue.prefill_s
    if busy >= 1:
        return 1.0
    irregular = arrivals.dispersion + queue.prefill_spread
    late = busy * exp(-2 * (1 - busy) * queue.wait_s / (queue.prefill_s * irregular))
    return _in_order(late, busy, queue)


def _for_rate(
    arrivals: Arrivals, capacity: Capacity, queue: Backlog, utilisation: float, allowed: float
) -> int:
    replicas = max(1, _whole(arrivals.per_s / (capacity.per_s * utilisation)))
    while replicas < k.MOST_REPLICAS:
        if share_too_late(arrivals, capacity, queue, replicas) <= allowed:
            break
        replicas += 1
    return replicas


def _for_prefill(arrivals: Arrivals, queue: Backlog, allowed: float, idle: float) -> int:
    """Pods among which prompts do not wait too long for each other, or whose prefill is busy for at
    most `idle` of the time."""
    most = max(1, _whole(arrivals.per_s * queue.prefill_s / idle))
    pods = range(1, most)
    held = (num for num in pods if share_late_in_prefill(arrivals, queue, num) <= allowed)
    return next(held, most)


def _whole(replicas: float) -> int:
    """`replicas` rounded up, at most `MOST_REPLICAS`."""
    return ceil(min(replicas, k.MOST_REPLICAS))


def _for_burst(arrivals: Arrivals, capacity: Capacity, queue: Backlog) -> int:
    """Pods that start a whole burst within the wait. They use free sequences and those that end;
    none of the burst's own ends before its service time."""
    if not arrivals.burst or queue.wait_s == inf:
        return 1
    started = capacity.concurrency * (1 + queue.wait_s // capacity.service_s)
    return _whole(arrivals.burst / started)


def _for_backlog(arrivals: Arrivals, capacity: Capacity, queue: Backlog, replicas: int) -> int:
    """Pods that drain the queue in time, if `replicas` do not by themselves."""
    if drain_seconds(queue.waiting, arrivals, capacity, replicas) <= queue.drain_s:
        return 1
    per_s = arrivals.per_s + queue.waiting / queue.drain_s
    return _whole(per_s / (capacity.per_s * k.MAX_UTILISATION))


def drain_seconds(waiting: int, arrivals: Arrivals, capacity: Capacity, replicas: int) -> float:
    """How long `replicas` need to empty the queue; infinite when arrivals outrun them."""
    if not waiting:
        return 0.0
    spare_per_s = replicas * capacity.per_s - arrivals.per_s
    return waiting / spare_per_s if spare_per_s > 0 else inf
