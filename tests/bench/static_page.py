"""Page, advice and picture of `static_batches`."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from bench.static_rows import BATCH, BLOCK, BURST, CONTINUOUS, ONE, STATIC, WINDOW, Row, middle, of
from matplotlib.axes import Axes
from matplotlib.figure import Figure

EVEN = 0.1
"""A loss of throughput, or a longer P99, up to which two ways are called alike."""
COLOURS = {ONE: "#8c8c8c", CONTINUOUS: "#1f6fb4", BATCH: "#2a9d5c"}
OTHERS, MARK = "#e08214", "#333333"
PANELS = (
    ("tokens/s", "tokens_per_s", 1.0),
    ("P99 of the end, s", "p99_end_ms", 1e-3),
    ("engine CPU-s", "cpu_s", 1.0),
    ("padding, % of computed tokens", "padding_share", 100.0),
    ("KV slots held and unused, %", "unused_share", 100.0),
)
PAGE = f"""\
# One by one, static batches, continuous batches

Written by this command, which replaces it:

```
PYTHONPATH=tests .venv/bin/python -m bench.static_batches --out docs/benchmarks{{options}}
```

{{prompts}} prompts for each run, at commit {{commit}}, {{date}}, on {{cpu}}.
The demo's model runs on one thread. The contenders take turns, each repeat in the other order.
Figures are medians of {{repeats}} repeats. Of tokens/s and of the last P99 the least and the most
are in brackets. One by one is so slow that it ran once.

- **equal at once**: all prompts at the start, with 64 tokens in and 64 out. **mixed at once**:
  the same with 26 to 102 in and 8 to 128 out.
- **mixed in bursts**: such lengths in bursts of {BURST[0]} to {BURST[1]}. With the pauses they are
  half of what continuous batches do, and the same for all.
- **static N, full** starts with N sequences, or after 2 s; **static N, 100 ms** after 100 ms.
  **continuous** runs at most 32, and **one by one** 1. **sluice batch** sends the same prompts
  from a file to the continuous worker, the longest first; its results have no times.
- **Times** count from when a prompt is due, so they include the wait in the queue.
- **Padding** is the share of the computed tokens that were thrown away, as the worker counts them.
  These batches pad no prompts. Batches elsewhere do, and lose more.
- **KV unused** is the share of the slots held, over all steps, without a token of a running
  sequence: the rest of a block of {BLOCK}, and rows that have ended. **Without pages** is the same
  if each row held the window of {WINDOW} tokens. Both follow from the lengths and the batches.

{{table}}
![the figures of all contenders](static.png)

{{advice}}
{{formula}}"""


def page(settings: Mapping[str, Any], rows: Sequence[Row], options: str) -> str:
    """The page in Markdown. `settings`: date, cpu, commit, prompts and repeats."""
    return PAGE.format(
        **settings, options=options, table=table(rows), advice=advice(rows), formula=formula(rows)
    )


def formula(rows: Sequence[Row]) -> str:
    """What `sluice bench` would have said of static batches, beside what they did."""
    said = []
    for trace in dict.fromkeys(row.trace for row in rows):
        found = of(rows, trace)
        gains = [row.formula_gain for row in found[CONTINUOUS] if row.formula_gain is not None]
        theirs = [name for name in found if name.startswith(f"{STATIC} 32")]
        if gains and theirs:
            best = min(middle(found[name], "cpu_s") for name in theirs)
            measured = middle(found[CONTINUOUS], "cpu_s") / best - 1
            said.append(f"{median(gains):+.0%} and {measured:+.0%} ({trace})")
    if not said:
        return ""
    return (
        "\nThe formula of `sluice bench` says from the continuous run what batches of 32 gain, and "
        f"here they did, in tokens for a CPU-second: {'; '.join(said)}.\n"
    )


FIGURES = (
    ("tokens/s", "tokens_per_s", "{:,.0f}", 1.0),
    ("first token P50, s", "p50_first_ms", "{:.2f}", 1e-3),
    ("P99", "p99_first_ms", "{:.2f}", 1e-3),
    ("end P50, s", "p50_end_ms", "{:.2f}", 1e-3),
    ("P99", "p99_end_ms", "{:.2f}", 1e-3),
    ("engine CPU-s", "cpu_s", "{:.1f}", 1.0),
    ("padding, %", "padding_share", "{:.0f}", 100.0),
    ("KV unused, %", "unused_share", "{:.0f}", 100.0),
    ("without pages, %", "unused_of_windows", "{:.0f}", 100.0),
)


def table(rows: Sequence[Row]) -> str:
    """Medians in Markdown, and for tokens/s and the last P99 the least and the most."""
    lines = []
    for trace in dict.fromkeys(row.trace for row in rows):
        lines += [f"| {trace} | " + " | ".join(title for title, *_ in FIGURES) + " |"]
        lines += ["|" + "---|" * (1 + len(FIGURES))]
        for contender, found in of(rows, trace).items():
            cells = [_cell(found, *figure[1:]) for figure in FIGURES]
            lines.append(f"| {contender} | {' | '.join(cells)} |")
        lines.append("")
    return "\n".join(lines)


def _cell(rows: Sequence[Row], name: str, form: str, factor: float) -> str:
    values = [factor * value for row in rows if (value := getattr(row, name)) is not None]
    if not values:
        return ""
    told = form.format(median(values))
    if name not in ("tokens_per_s", "p99_end_ms") or len(values) == 1:
        return told
    return f"{told} ({form.format(min(values))} to {form.format(max(values))})"


def advice(rows: Sequence[Row]) -> str:
    """One sentence on what to take, and one for each trace: by how much it wins, and why."""
    said: dict[str, list[str]] = {}
    lines = []
    for trace in dict.fromkeys(row.trace for row in rows):
        verdict, why = _advice(of(rows, trace))
        said.setdefault(verdict, []).append(trace)
        lines.append(f"- {trace}: {why}.")
    told = "; ".join(f"{verdict} on {' and on '.join(traces)}" for verdict, traces in said.items())
    return "\n".join([f"{told[0].upper()}{told[1:]}.", "", *lines])


def _advice(found: Mapping[str, Sequence[Row]]) -> tuple[str, str]:
    ours = found[CONTINUOUS]
    statics = [name for name in found if name.startswith(STATIC)]
    best = max(statics, key=lambda name: _goodness(found[name], ours))
    theirs = found[best]
    speed = middle(theirs, "tokens_per_s") / middle(ours, "tokens_per_s")
    late = middle(theirs, "p99_end_ms") / middle(ours, "p99_end_ms")
    figures = f"{speed:.0%} of the tokens/s of continuous batches, and {late:.2f} times their P99"
    if min(speed, 1 / late) > 1 + EVEN:
        return "static batches win", f"{best} has {figures}"
    if min(speed, 1 / late) >= 1 - EVEN:
        return "static batches lose little", f"{best} has {figures}"
    return "continuous batches win", f"{best} has {figures}, because {_why(theirs, ours)}"


def _goodness(theirs: Sequence[Row], ours: Sequence[Row]) -> float:
    """The lesser of throughput and of the P99's shortness, beside continuous batches."""
    speed = middle(theirs, "tokens_per_s") / middle(ours, "tokens_per_s")
    return min(speed, middle(ours, "p99_end_ms") / middle(theirs, "p99_end_ms"))


def _why(worse: Sequence[Row], better: Sequence[Row]) -> str:
    """What the worse has more of: padding, or else waiting for the first token."""
    padding = middle(worse, "padding_share") - middle(better, "padding_share")
    firsts = [middle(rows, "p50_first_ms") / 1000 for rows in (worse, better)]
    said = []
    if padding > EVEN:
        said.append(f"{middle(worse, 'padding_share'):.0%} of its computed tokens are padding")
    if firsts[0] > (1 + EVEN) * firsts[1]:
        said.append(f"half of its first tokens take over {firsts[0]:.2f} s, not {firsts[1]:.2f} s")
    return " and ".join(said) or "its steps take longer"


def static_png(rows: Sequence[Row], path: Path) -> None:
    """A column for each trace, a row for each figure; bars are medians, dots the repeats."""
    traces = list(dict.fromkeys(row.trace for row in rows))
    size = (4.4 * len(traces), 2.3 * len(PANELS))
    names = max((list(of(rows, trace)) for trace in traces), key=len)
    figure = Figure(size, layout="constrained")
    axes = figure.subplots(len(PANELS), len(traces), squeeze=False, sharex=True, sharey="row")
    for line, (title, name, factor) in zip(axes, PANELS, strict=True):
        line[0].set_ylabel(title, fontsize=9)
        for axis, trace in zip(line, traces, strict=True):
            _bars(axis, of(rows, trace), name, factor)
            axis.set_xticks(range(len(names)), names, rotation=35, ha="right", fontsize=8)
        most = factor * max(getattr(row, name) or 0.0 for row in rows)
        line[0].set_ylim(0, 1.2 * most or 1.0)
    for axis, trace in zip(axes[0], traces, strict=True):
        axis.set_title(trace)
    figure.suptitle("The same prompts one by one, in static batches and in continuous ones")
    figure.savefig(path, dpi=110)


def _bars(axis: Axes, found: dict[str, list[Row]], name: str, factor: float) -> None:
    for place, (contender, done) in enumerate(found.items()):
        values = [factor * value for row in done if (value := getattr(row, name)) is not None]
        if not values:
            continue
        middle_one = median(values)
        axis.bar(place, middle_one, 0.7, color=COLOURS.get(contender, OTHERS))
        axis.plot([place] * len(values), values, ".", color=MARK, markersize=4)
        told, at = f"{middle_one:,.0f}" if middle_one >= 100 else f"{middle_one:.3g}", max(values)
        axis.annotate(
            told, (place, at), (0, 3), textcoords="offset points", ha="center", fontsize=7
        )
