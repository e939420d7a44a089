"""What one trace's file in docs/benchmarks holds: everything that its tables are made of. Pure."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from bench.peers.rounds import Run
from msgspec import Struct
from sluice.load import quantile_ms
from sluice.measure.client import Outcome
from sluice.measure.targets import is_good, is_smooth
from sluice_operator.tuner import Targets


@dataclass(frozen=True, slots=True)
class Result:
    """One run as its client saw it. `outcomes`: none if only the whole is known."""

    wall_s: float
    output_tokens: int
    outcomes: tuple[Outcome, ...] = ()

    def share(self, holds: Callable[[Outcome], bool]) -> float | None:
        """Of the requests, those of which it holds."""
        held = [holds(outcome) for outcome in self.outcomes]
        return round(sum(held) / len(held), 4) if held else None


@dataclass(frozen=True, slots=True)
class CpuTime:
    """CPU-seconds of a process and all below it; `engine_s` of those that compute."""

    total_s: float
    engine_s: float

    def since(self, before: "CpuTime") -> "CpuTime":
        """What was used after `before`."""
        return CpuTime(self.total_s - before.total_s, self.engine_s - before.engine_s)


class Machine(Struct, frozen=True):
    """Where it was measured."""

    cpu: str
    num_cpus: int
    probe: str
    best_gflops: float


class TraceResult(Struct, frozen=True):
    """A trace's runs, and who was left out and why. `starts_s`: seconds from start to ready."""

    trace: str
    about: str
    model: str
    date: str
    command: str
    machine: Machine
    num_requests: int
    prompt_tokens: int
    output_tokens: int
    peers: dict[str, str]
    versions: dict[str, str]
    starts_s: dict[str, float]
    left_out: dict[str, str]
    runs: list[Run]


def make_run(
    peer: str,
    repeat: int,
    result: Result,
    cpu: tuple[CpuTime, float],
    peaks: tuple[float, float],
    work: tuple[int, float],
    targets: Targets | None = None,
) -> Run:
    """One run as it is kept. `cpu`: its own and the other peers'; `work`: prompt tokens, FLOPs.

    `targets`: what its requests are judged by, whether or not the peer was told them.
    """
    own, others_s = cpu
    first_s = [outcome.ttft_s for outcome in result.outcomes]
    gaps_s = [gap for outcome in result.outcomes for gap in outcome.gaps_s]
    return Run(
        peer=peer,
        repeat=repeat,
        wall_s=round(result.wall_s, 4),
        cpu_s=round(own.total_s, 2),
        engine_cpu_s=round(own.engine_s, 2),
        others_cpu_s=round(others_s, 2),
        peak_before=peaks[0],
        peak_after=peaks[1],
        prompt_tokens=work[0],
        output_tokens=result.output_tokens,
        flops=work[1],
        ttft_p50_ms=quantile_ms(first_s, 0.5),
        ttft_p99_ms=quantile_ms(first_s, 0.99),
        itl_p50_ms=quantile_ms(gaps_s, 0.5),
        itl_p99_ms=quantile_ms(gaps_s, 0.99),
        good_share=result.share(partial(is_good, targets=targets)) if targets else None,
        smooth_share=result.share(partial(is_smooth, targets=targets)) if targets else None,
    )


def failed_run(peer: str, repeat: int, reason: str) -> Run:
    """A run that brought no figures."""
    return Run(peer, repeat, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0, 0, 0.0, error=reason)
