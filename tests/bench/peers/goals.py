"""What the worker must reach beside its peers, and whether it did. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from bench.peers.results import TraceResult
from bench.peers.rounds import Claim, Run, Spread, Value, counted, ratio, spread
from bench.peers.variants import VLLM_SETTINGS


def speed(run: Run) -> float | None:
    """Output tokens a second of wall time."""
    return run.output_tokens / run.wall_s


def between(run: Run) -> float | None:
    """P99 of the gaps between tokens."""
    return run.itl_p99_ms


def first(run: Run) -> float | None:
    """P99 of first tokens."""
    return run.ttft_p99_ms


def percent_good(run: Run) -> float | None:
    """Percent of the requests that are good."""
    return None if run.good_share is None else 100 * run.good_share


def percent_smooth(run: Run) -> float | None:
    """Percent of the requests that are smooth."""
    return None if run.smooth_share is None else 100 * run.smooth_share


def of_peak(run: Run) -> float | None:
    """Part of the register peak."""
    return run.peak_fraction


def outside(run: Run) -> float | None:
    """Part of the CPU time that is not the engine's."""
    return 1 - run.engine_cpu_s / run.cpu_s if run.cpu_s else None


@dataclass(frozen=True, slots=True)
class Goal:
    """`value` of a peer over that of the best of `against` (by `best_by`), or alone without any."""

    work: str
    trace: str
    peer: str
    value: Value
    at_least: float
    aim: float
    against: tuple[str, ...] = ()
    best_by: Value = speed
    is_less_better: bool = False

    def holds(self, median: float) -> bool:
        """Whether a median is good enough."""
        return median <= self.at_least if self.is_less_better else median >= self.at_least

    def reaches_aim(self, median: float) -> bool:
        """Whether it is as good as is hoped for."""
        return median <= self.aim if self.is_less_better else median >= self.aim


_VLLM = ("vllm", "vllm-mp", "vllm-float32")
GOALS = (
    Goal("offline, bf16, over vLLM-CPU", "offline", "sluice", speed, 1.1, 1.3, _VLLM),
    Goal(
        "offline, bf16, both in-process",
        "offline",
        "sluice-offline",
        speed,
        1.1,
        1.3,
        ("vllm-offline",),
    ),
    Goal("offline, w8a8, over vLLM-CPU", "offline", "sluice-w8a8", speed, 1.5, 2.0, _VLLM),
    Goal(
        "waves: P99 between tokens, of vLLM-CPU's best",
        "bursty",
        "sluice-target",
        between,
        0.6,
        0.35,
        VLLM_SETTINGS,
        best_by=between,
        is_less_better=True,
    ),
    Goal(
        "waves: P99 of first tokens, of the same setting's",
        "bursty",
        "sluice-target",
        first,
        1.1,
        1.0,
        VLLM_SETTINGS,
        best_by=between,
        is_less_better=True,
    ),
    Goal("shared prefixes, over vLLM-CPU", "prefix", "sluice", speed, 1.1, 1.5, ("vllm",)),
    Goal(
        "offline, over transformers' continuous batching",
        "offline",
        "sluice",
        speed,
        5.0,
        8.0,
        ("transformers-continuous",),
    ),
    *(
        Goal(
            f"{size} at a time, over llama.cpp",
            f"batch-{size}",
            "sluice",
            speed,
            1.5,
            2.5,
            ("llama.cpp",),
        )  # fmt: skip
        for size in (8, 16, 32)
    ),
    Goal("1 at a time, over llama.cpp", "batch-1", "sluice", speed, 0.8, 1.0, ("llama.cpp",)),
    Goal("offline, of the register peak", "offline", "sluice", of_peak, 0.62, 0.75),
    Goal("offline, plain torch, over vLLM-CPU", "offline", "sluice-torch", speed, 0.5, 0.75, _VLLM),
    *(
        Goal(
            f"32 at a time, {answers}, continuous over {static}, own engine",
            trace,
            "sluice",
            speed,
            1.4,
            2.0,
            (peer,),
        )
        for trace, answers in (("batch-32", "8-128 tokens out"), ("chat", "8-384 tokens out"))
        for static, peer in (
            ("padded static", "sluice-padded"),
            ("static that pads no prompts", "sluice-static"),
        )
    ),
    Goal(
        "CPU time outside the engine, streaming 32",
        "batch-32",
        "sluice",
        outside,
        0.10,
        0.05,
        is_less_better=True,
    ),
    Goal("larger model, over vLLM-CPU", "offline-500M", "sluice", speed, 1.1, 1.3, ("vllm",)),
)


def best(runs: Sequence[Run], peers: Sequence[str], goal: Goal, best_gflops: float) -> str | None:
    """The strongest of `peers`, by the median of what counts; None if none has any."""
    medians = {}
    for peer in peers:
        values = [goal.best_by(run) for run in counted(runs, peer, best_gflops)]
        found = spread([value for value in values if value is not None])
        if found is not None:
            medians[peer] = found.median
    if not medians:
        return None
    choose = min if goal.best_by is not speed else max
    return choose(medians, key=lambda peer: medians[peer])


def judge(
    goal: Goal, results: Mapping[str, TraceResult], best_gflops: float
) -> tuple[Claim, str | None]:
    """What may be claimed of a goal, and whom it was measured against."""
    result = results.get(goal.trace)
    if result is None:
        return Claim(None, "not measured"), None
    if not goal.against:
        return alone(result.runs, goal, best_gflops), None
    other = best(result.runs, goal.against, goal, best_gflops)
    if other is None:
        return Claim(None, "no run of the peer counts"), None
    return ratio(result.runs, (goal.peer, other), goal.value, best_gflops), other


def alone(runs: Sequence[Run], goal: Goal, best_gflops: float, at_least: int = 3) -> Claim:
    """A value of one peer's own runs, under the same rule as ratios."""
    own = [run for run in runs if run.peer == goal.peer]
    good = counted(runs, goal.peer, best_gflops)
    if not own:
        return Claim(None, "not measured")
    if 2 * len(good) < len(own):
        return Claim(None, f"{len(own) - len(good)} of {len(own)} runs discarded")
    if len(good) < at_least:
        return Claim(None, f"only {len(good)} runs")
    found: Spread | None = spread([v for v in map(goal.value, good) if v is not None])
    return Claim(found, "" if found else "not measured")
