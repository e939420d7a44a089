"""Targets, traces and figures of what runs on real engines. Pure."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import ceil, inf, isfinite
from random import Random
from statistics import median
from typing import NamedTuple

from bench.hard_loads import poisson
from research.generate import TRACES, Lengths, Recipe
from sluice.load import quantile_ms
from sluice.measure.client import Outcome
from sluice.measure.targets import is_good, is_smooth
from sluice.simulate.trace import Request
from sluice_core.contract import StepModel
from sluice_core.latency import MIN_CHUNK_TOKENS, TARGET_MARGIN
from sluice_operator.tuner import Targets

OURS, BEFORE, NO_HOLD = "ours", "before", "no hold"
"""The tuner with the law of this checkout, with that of another one, and with one that holds no
first token."""
CAP = "cap "
OVERLOAD, OVERLOAD_FACTOR = "overload", 1.3
"""A trace at so many times what a worker does: the simulator's overload lasts for half an hour."""
EARLY_S = 10.0
"""Arrivals until then are told apart: a contender that starts cold learns in this time."""
LENGTHS = Lengths(32, 64)
TIME_SCALE = 0.2
"""Of the sources' bursts: one every 6 s instead of 30, and a fifth as large."""


@dataclass(frozen=True, slots=True)
class Row:
    """One contender on one trace. Shares are of all arrivals; a first token that did not come
    waits for ever, None where that is the quantile. Gaps are of the requests that were answered.

    `cpu_s`: of both processes of the worker; `cap_path`: seconds since the first arrival and the
    cap that was set then, the first one at 0; `per_s`: requests/s that the load was scaled to;
    `early_...`: of the arrivals of the first `EARLY_S` alone; `drift`: how much more (or less) the
    worker did after the last run of the repeat on the trace, None until it was measured;
    `profile`, `fitted`: its step model before the run and after, where they were looked at.
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
    early_good_share: float | None = None
    early_smooth_share: float | None = None
    drift: float | None = None
    profile: StepModel | None = None
    fitted: StepModel | None = None

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


def real_trace(
    name: str, per_s: float, seconds: float, seed: int, lengths: Lengths = LENGTHS
) -> list[Request]:
    """As `scaled_trace`, and OVERLOAD."""
    if name != OVERLOAD:
        return scaled_trace(name, per_s, seconds, seed, lengths)
    over_per_s = OVERLOAD_FACTOR * per_s
    return poisson(lambda _: over_per_s, seconds, lengths.draw)(Random(seed))


def num_early(trace: Sequence[Request]) -> int:
    """Its first arrivals, until EARLY_S."""
    return sum(one.t_s < EARLY_S for one in trace)


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
    early: int = 0,
) -> Row:
    """What came of a run, in the order of arrival; an outcome of None was not answered in time.
    `early`: so many came first, and are told apart."""
    answered = [o for o in outcomes if o is not None and o.is_ok]
    early_good, early_smooth = _shares(outcomes[:early], targets) if early else (None, None)
    good, smooth = _shares(outcomes, targets)
    first_s = [o.ttft_s for o in answered] + [inf] * (len(outcomes) - len(answered))
    gaps_s = [gap for o in answered for gap in o.gaps_s]
    return Row(
        trace,
        contender,
        repeat,
        requests=len(outcomes),
        answered=len(answered),
        good_share=good,
        smooth_share=smooth,
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
        early_good_share=early_good,
        early_smooth_share=early_smooth,
    )


def _shares(outcomes: Sequence[Outcome | None], targets: Targets) -> tuple[float, float]:
    """Of all: the good and the smooth ones."""
    answered = [o for o in outcomes if o is not None and o.is_ok]
    num_good = sum(is_good(o, targets) for o in answered)
    num_smooth = sum(is_smooth(o, targets) for o in answered)
    return num_good / len(outcomes), num_smooth / len(outcomes)


def line(row: Row) -> str:
    """What is told of a run."""
    gap_ms, first_ms = row.p99_itl_ms or 0.0, row.p99_ttft_ms
    first = f"{first_ms:.0f} ms" if first_ms is not None else "never"
    return (
        f"{row.repeat} {row.trace}, {row.contender}: {row.smooth_share:.1%} smooth, "
        f"{row.good_share:.1%} good of {row.requests}; P99 gap {gap_ms:.0f} of "
        f"{row.itl_target_ms:.4g} ms, first {first}; {row.tokens_per_s:.0f} tokens/s, "
        f"{row.cpu_s:.1f} CPU-s in {row.seconds:.0f} s"
    )


def in_order(rows: Sequence[Row]) -> list[Row]:
    """Traces as they were run first, caps as they rise and then the tuner's, repeats."""
    traces = list(dict.fromkeys(row.trace for row in rows))

    def place(row: Row) -> tuple[int, float, str, int]:
        cap = float(row.contender.split()[1].strip(",")) if _is_fixed(row.contender) else inf
        return traces.index(row.trace), cap, row.contender, row.repeat

    return sorted(rows, key=place)


def _is_fixed(contender: str) -> bool:
    return contender.startswith(CAP)


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
    return next(iter(ranked({name: found[name] for name in found if _is_fixed(name)})), None)


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
            "gap P50 ms", "P99", "due ms", "tokens/s", "load/s", "CPU-s", "good/smooth, first 10 s",
            "caps"]  # fmt: skip
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
        _early(done),
        "; ".join(dict.fromkeys(paths)),
    ]  # fmt: skip


def _early(done: Sequence[Row]) -> str:
    shares = [
        [share for row in done if (share := getattr(row, f"early_{name}_share")) is not None]
        for name in ("good", "smooth")
    ]
    return "/".join(f"{100 * median(found):.0f}" if found else "-" for found in shares)


def _middle(times: Sequence[float | None]) -> str:
    """Their median, where one of them that never came is longer than any other."""
    found = median(inf if ms is None else ms for ms in times)
    return f"{found:.4g}" if isfinite(found) else "-"


def spread(values: Sequence[float], form: str = ".1f") -> str:
    """The median, and the least and the most of several."""
    if len(values) < 2:
        return "".join(format(value, form) for value in values) or "-"
    return f"{median(values):{form}} ({min(values):{form}} to {max(values):{form}})"


def findings(rows: Sequence[Row], ceiling: int | None = None) -> Iterator[str]:
    """Ours against the best fixed cap and against cap = `ceiling`, a sentence for each trace, then
    against it and each that is tuned: medians over the repeats, each compared within itself."""
    for trace in dict.fromkeys(row.trace for row in rows if row.contender == OURS):
        ours = runs(rows, trace, OURS)
        told = f"{trace}: ours {spread([100 * row.smooth_share for row in ours])} % smooth"
        best = best_fixed(rows, trace)
        if best and (shares := ratios(rows, trace, OURS, best, "smooth_share")):
            percent = spread([100 * share for share in shares])
            told += f", {percent} % of {best}, the best fixed one"
        points = [
            100 * (row.smooth_share - other.smooth_share)
            for row, other in pairs(rows, trace, OURS, f"{CAP}{ceiling}")
        ]
        if points:
            told += f", {spread(points)} points against cap = max"
        changes = [float(row.cap_changes) for row in ours]
        last = [row.cap_path[-1][0] for row in ours]
        yield f"{told}; {spread(changes)} changes, the last at {spread(last)} s."
        for other in dict.fromkeys((best, *by_contender(rows, trace))):
            if other and other != OURS and (other == best or not _is_fixed(other)):
                yield compared(rows, trace, OURS, other)
        yield from drifts(rows, trace)


class Wanted(NamedTuple):
    """The field `of` of a contender's rows, over that of `other`: at least `bound`, or at most."""

    of: str
    other: str
    bound: float
    is_least: bool = True

    def is_met(self, ratio: float) -> bool:
        """Whether a ratio is within the bound."""
        return ratio >= self.bound if self.is_least else ratio <= self.bound


def verdict(rows: Sequence[Row], trace: str, ours: str, wanted: Wanted) -> Iterator[str]:
    """A sentence, if a repeat has both: the median of the ratios decides, and BEFORE's are told."""
    if not (found := ratios(rows, trace, ours, wanted.other, wanted.of)):
        return
    told = f"{COMPARED[wanted.of]} {spread(found, '.2f')} times that of {wanted.other}"
    bound = f"at {'least' if wanted.is_least else 'most'} {wanted.bound:g} wanted"
    met = "met" if wanted.is_met(median(found)) else "MISSED"
    before = spread(ratios(rows, trace, BEFORE, wanted.other, wanted.of), ".2f")
    yield f"{trace}: {told}, {bound}: {met} ({BEFORE}: {before})."


def cold_verdicts(rows: Sequence[Row]) -> Iterator[str]:
    """What the tuner from cold is to reach of the best fixed setting, a sentence each."""
    for trace in dict.fromkeys(row.trace for row in rows):
        if best := best_fixed(rows, trace):
            yield from verdict(rows, trace, OURS, Wanted("good_share", best, 0.98))
            yield from verdict(rows, trace, OURS, Wanted("smooth_share", best, 1.0))


COMPARED = {
    "good_share": "good", "smooth_share": "smooth", "early_good_share": "good in the first 10 s",
    "early_smooth_share": "smooth in the first 10 s", "tokens_per_s": "tokens/s",
    "p99_itl_ms": "P99 gap", "p50_ttft_ms": "P50 first token", "p99_ttft_ms": "P99 first token",
    "cpu_s": "CPU-seconds",
}  # fmt: skip
"""Fields of Row, and what they are called."""


def compared(rows: Sequence[Row], trace: str, ours: str, other: str) -> str:
    """All that is COMPARED of two contenders, as ratios within each repeat: their median, the
    least and the most."""
    found = {name: ratios(rows, trace, ours, other, of) for of, name in COMPARED.items()}
    told = ", ".join(f"{name} {spread(each, '.2f')}" for name, each in found.items() if each)
    return f"{trace}: {ours} over {other}: {told or 'no repeat has both'}."


def drifts(rows: Sequence[Row], trace: str) -> Iterator[str]:
    """How the machine changed within each repeat, if that was measured: no difference under that is
    to be believed."""
    found = {row.repeat: row.drift for row in rows if row.trace == trace and row.drift is not None}
    told = ", ".join(f"{100 * drift:+.0f} %" for _, drift in sorted(found.items()))
    if told:
        yield f"{trace}: the engine did so much more after each repeat than before: {told}."


def ratios(rows: Sequence[Row], trace: str, ours: str, other: str, of: str) -> list[float]:
    """The field `of` of one over that of the other, in each repeat that has both."""
    found = [(getattr(a, of), getattr(b, of)) for a, b in pairs(rows, trace, ours, other)]
    if of.startswith("early"):  # None: nothing came so early
        found = [(a, b) for a, b in found if a is not None and b is not None]
    return [_over(inf if a is None else a, inf if b is None else b) for a, b in found]


def _over(one: float, other: float) -> float:
    """Their ratio; equal ones are 1, also where both are 0 or for ever."""
    if one == other:
        return 1.0
    return one / other if other else inf


def pairs(rows: Sequence[Row], trace: str, ours: str, other: str) -> list[tuple[Row, Row]]:
    """The runs of both on one trace, in each repeat that has both."""
    found = {row.repeat: row for row in runs(rows, trace, other)}
    return [(row, found[row.repeat]) for row in runs(rows, trace, ours) if row.repeat in found]


def models(rows: Sequence[Row]) -> Iterator[str]:
    """A sentence for each tuner's run that was looked at: what the profile of the worker's start
    said, and what was true."""
    for row in rows:
        if row.contender == OURS and row.profile:
            told = f"the profile predicted a cap of {row.cap_path[0][1]} by {_terms(row.profile)}"
            yield f"{row.trace}: {told}; at the end it was {_terms(row.fitted)}."


def _terms(model: StepModel | None) -> str:
    if model is None:
        return "no model"
    told = f"{model.a:.2f} + {model.b:.3f} decodes + {model.c:.2g} kv + {model.d:.4f} prefill ms"
    return f"{told} (P99 {model.resid_q:.2f} times)"
