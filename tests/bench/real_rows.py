"""Targets, traces and figures of `real_caps`. Pure."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import ceil, inf, isfinite
from random import Random
from statistics import median

from research.generate import TRACES, Lengths, Recipe
from sluice.load import quantile_ms
from sluice.measure.client import Outcome
from sluice.measure.targets import is_good, is_smooth
from sluice.simulate.trace import Request
from sluice_core.contract import StepModel
from sluice_core.latency import MIN_CHUNK_TOKENS, TARGET_MARGIN
from sluice_operator.tuner import Targets

OURS = "ours"
LENGTHS = Lengths(32, 64)
TIME_SCALE = 0.2
"""Of the sources' bursts: one every 6 s instead of 30, and a fifth as large."""


@dataclass(frozen=True, slots=True)
class Row:
    """One contender on one trace. Shares are of all arrivals; a first token that did not come
    waits for ever, None where that is the quantile. Gaps are of the requests that were answered.

    `cpu_s`: of both processes of the worker; `cap_path`: seconds since the first arrival and the
    cap that was set then, the first one at 0; `per_s`: requests/s that the load was scaled to;
    `drift`: how much more (or less) the worker did after the last run of the repeat on the trace.
    """

    trace: str
    contender: str
    repeat: int
    requests: int
    answered: int
    good_share: float
    smooth_share: float
    p50_ttft_ms: float | None
    p99_ttft_ms: float | None
    p50_itl_ms: float | None
    p99_itl_ms: float | None
    tokens_per_s: float
    seconds: float
    cpu_s: float
    cap_changes: int
    cap_path: Sequence[tuple[float, int]]
    per_s: float
    itl_target_ms: float
    drift: float = 0.0

    def is_of(self, trace: str, repeat: int) -> bool:
        """Whether it is a run on `trace` in `repeat`."""
        return (self.trace, self.repeat) == (trace, repeat)


def itl_target_ms(model: StepModel, cap: int, tail: float, lengths: Lengths = LENGTHS) -> float:
    """The least target, in tenths of a millisecond, for which the worker's own rule
    (`latency.predicted_cap`) has `cap` for the largest that holds it at `lengths`, if steps at
    P99 take `tail` times the mean: with the measured tail, a noisy minute would make it loose."""
    kv_tokens = lengths.prompt + lengths.output / 2
    plain_ms = model.step_ms(cap, cap * kv_tokens, 0)
    beside_ms = model.step_ms(cap - 1, (cap - 1) * kv_tokens, MIN_CHUNK_TOKENS)
    longest_ms = tail * max(plain_ms, beside_ms) / TARGET_MARGIN
    return ceil(10 * longest_ms + 1e-6) / 10


def scaled_trace(
    name: str, per_s: float, seconds: float, seed: int, lengths: Lengths = LENGTHS
) -> list[Request]:
    """The simulator's trace `name`, of about `seconds` for a pod that does `per_s` requests a
    second. Raises KeyError for another name."""

    def made(num: int) -> list[Request]:
        recipe = Recipe(num, per_s * TIME_SCALE, lengths, Random(seed))
        return [
            Request(TIME_SCALE * one.t_s, one.prompt_tokens, one.max_tokens)
            for one in TRACES[name](recipe)
        ]

    num = ceil(per_s * seconds)
    return made(ceil(num * seconds / made(num)[-1].t_s))


def make_row(
    trace: str,
    contender: str,
    repeat: int,
    outcomes: Sequence[Outcome | None],
    targets: Targets,
    seconds: float,
    cpu_s: float,
    path: Sequence[tuple[float, int]],
    per_s: float,
) -> Row:
    """What came of a run; an outcome of None was not answered in time."""
    answered = [o for o in outcomes if o is not None and o.is_ok]
    first_s = [o.ttft_s for o in answered] + [inf] * (len(outcomes) - len(answered))
    gaps_s = [gap for o in answered for gap in o.gaps_s]
    return Row(
        trace,
        contender,
        repeat,
        requests=len(outcomes),
        answered=len(answered),
        good_share=sum(is_good(o, targets) for o in answered) / len(outcomes),
        smooth_share=sum(is_smooth(o, targets) for o in answered) / len(outcomes),
        p50_ttft_ms=quantile_ms(first_s, 0.5),
        p99_ttft_ms=quantile_ms(first_s, 0.99),
        p50_itl_ms=quantile_ms(gaps_s, 0.5),
        p99_itl_ms=quantile_ms(gaps_s, 0.99),
        tokens_per_s=sum(o.num_tokens for o in answered) / seconds,
        seconds=seconds,
        cpu_s=cpu_s,
        cap_changes=len(path) - 1,
        cap_path=path,
        per_s=per_s,
        itl_target_ms=targets.itl_ms or inf,
    )


def in_order(rows: Sequence[Row]) -> list[Row]:
    """Traces as they were run first, caps as they rise and then ours, repeats."""
    traces = list(dict.fromkeys(row.trace for row in rows))

    def place(row: Row) -> tuple[int, float, int]:
        cap = inf if row.contender == OURS else float(row.contender.removeprefix("cap "))
        return traces.index(row.trace), cap, row.repeat

    return sorted(rows, key=place)


def runs(rows: Sequence[Row], trace: str, contender: str) -> list[Row]:
    """All repeats of one contender on one trace."""
    return [row for row in rows if (row.trace, row.contender) == (trace, contender)]


def by_contender(rows: Sequence[Row], trace: str) -> dict[str, list[Row]]:
    """The repeats of each contender on one trace, in the order of their first."""
    names = dict.fromkeys(row.contender for row in rows if row.trace == trace)
    return {name: runs(rows, trace, name) for name in names}


def best_fixed(rows: Sequence[Row], trace: str) -> str | None:
    """The oracle: the fixed cap whose median is best in hindsight; None where none was run."""
    found = by_contender(rows, trace)
    found.pop(OURS, None)
    return next(iter(ranked(found)), None)


def ranked(found: Mapping[str, Sequence[Row]]) -> list[str]:
    """Contenders, the best one first: by the medians of smooth share, good share, CPU-seconds."""

    def quality(name: str) -> tuple[float, ...]:
        done = found[name]
        return (
            median(row.smooth_share for row in done),
            median(row.good_share for row in done),
            -median(row.cpu_s for row in done),
        )

    return sorted(found, key=quality, reverse=True)


def table(rows: Sequence[Row]) -> str:
    """Each trace's best fixed cap in bold."""
    return table_of(rows, lambda trace: best_fixed(rows, trace))


def table_of(rows: Sequence[Row], best_on: Callable[[str], str | None]) -> str:
    """A line of Markdown for each contender on each trace, of its repeats' medians, shares with the
    least and the most; the best on each trace in bold."""
    head = ["trace", "contender", "smooth %", "good %", "answered", "first P50 ms", "P99",
            "gap P50 ms", "P99", "due ms", "tokens/s", "load/s", "CPU-s", "caps"]  # fmt: skip
    lines = [head, ["---"] * len(head)]
    for trace in dict.fromkeys(row.trace for row in rows):
        best = best_on(trace)
        lines += [_cells(done, n == best) for n, done in by_contender(rows, trace).items()]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _cells(done: Sequence[Row], is_best: bool) -> list[str]:
    row = done[0]
    paths = [", ".join(str(cap) for _, cap in row.cap_path) for row in done]
    return [
        row.trace, f"**{row.contender}**" if is_best else row.contender,
        spread([100 * row.smooth_share for row in done]),
        spread([100 * row.good_share for row in done]),
        f"{sum(row.answered for row in done)} of {sum(row.requests for row in done)}",
        _middle([row.p50_ttft_ms for row in done]), _middle([row.p99_ttft_ms for row in done]),
        _middle([row.p50_itl_ms for row in done]), _middle([row.p99_itl_ms for row in done]),
        f"{median(row.itl_target_ms for row in done):.4g}",
        f"{median(row.tokens_per_s for row in done):.0f}",
        f"{median(row.per_s for row in done):.2f}", f"{median(row.cpu_s for row in done):.1f}",
        "; ".join(dict.fromkeys(paths)),
    ]  # fmt: skip


def _middle(times: Sequence[float | None]) -> str:
    """Their median, where one of them that never came is longer than any other."""
    found = median(inf if ms is None else ms for ms in times)
    return f"{found:.4g}" if isfinite(found) else "-"


def spread(values: Sequence[float], form: str = ".1f") -> str:
    """The median, and the least and the most of several."""
    if len(values) < 2:
        return "".join(format(value, form) for value in values) or "-"
    return f"{median(values):{form}} ({min(values):{form}} to {max(values):{form}})"


def findings(rows: Sequence[Row], ceiling: int) -> Iterator[str]:
    """Ours against the best fixed cap and against cap = max, a sentence for each trace: medians
    over the repeats, each of which is compared within itself."""
    for trace in dict.fromkeys(row.trace for row in rows if row.contender == OURS):
        ours = runs(rows, trace, OURS)
        told = f"{trace}: ours {spread([100 * row.smooth_share for row in ours])} % smooth"
        best = best_fixed(rows, trace)
        shares = [
            100 * row.smooth_share / other.smooth_share
            for row, other in _pairs(ours, runs(rows, trace, best or ""))
            if other.smooth_share
        ]
        if shares:
            told += f", {spread(shares)} % of {best}, the best fixed one"
        points = [
            100 * (row.smooth_share - other.smooth_share)
            for row, other in _pairs(ours, runs(rows, trace, f"cap {ceiling}"))
        ]
        if points:
            told += f", {spread(points)} points against cap = max"
        changes = [float(row.cap_changes) for row in ours]
        last = [row.cap_path[-1][0] for row in ours]
        told += f"; {spread(changes)} changes, the last at {spread(last)} s"
        drift = spread([100 * row.drift for row in ours])
        yield f"{told}; afterwards the worker did {drift} % more."


def _pairs(ours: Sequence[Row], others: Sequence[Row]) -> list[tuple[Row, Row]]:
    found = {row.repeat: row for row in others}
    return [(row, found[row.repeat]) for row in ours if row.repeat in found]
