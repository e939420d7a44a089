"""Ratios, page and picture of `background`."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from matplotlib.figure import Figure

ONLINE, BOTH, AT_CAP, AT_CEILING, ALONE = PHASES = (
    "online alone",
    "online and batch",
    "ordinary at the cap",
    "ordinary at the ceiling",
    "batch alone",
)
WANTED = {
    "first token P99": ("<=", 1.5),
    "gap P99": ("<=", 1.1),
    "share of what was left": (">=", 0.8),
    "alone, of the offline rate": (">=", 0.95),
}
"""Ratios, and what was wanted of each."""
DEFAULTS = {"repeats": 3, "seconds": 40.0}
BLUE, GREEN, GREY = "#1f6fb4", "#2a9d5c", "#8c8c8c"


@dataclass(frozen=True, slots=True)
class Row:
    """One phase. `online`, `batch`: tokens a second of each; times in ms, of online alone."""

    phase: str
    repeat: int
    online: float
    batch: float
    num: int
    ttft_p99: float | None
    ttft_p50: float | None
    gap_p99: float | None
    gap_p50: float | None
    cpu_s: float

    @property
    def told(self) -> str:
        """A line of the log."""
        return (
            f"{self.repeat + 1} {self.phase}: {self.num} online, {self.online:.0f} tokens/s; "
            f"batch {self.batch:.0f}; first token P99 {self.ttft_p99 or 0:.0f} ms, "
            f"gap {self.gap_p99 or 0:.1f} ms, engine {self.cpu_s:.1f} CPU-s"
        )


def ratios_of(rows: Sequence[Row]) -> dict[str, list[float]]:
    """The ratios of `WANTED`, one for each repeat."""
    found: dict[str, list[float]] = {name: [] for name in WANTED}
    for repeat in sorted({row.repeat for row in rows}):
        of = {row.phase: row for row in rows if row.repeat == repeat}
        alone, both = of[ONLINE], of[BOTH]
        left = of[AT_CAP].batch - alone.online
        values = (
            (both.ttft_p99 or 0.0) / (alone.ttft_p99 or 1.0),
            (both.gap_p99 or 0.0) / (alone.gap_p99 or 1.0),
            both.batch / left,
            of[ALONE].batch / of[AT_CEILING].batch,
        )
        for name, value in zip(WANTED, values, strict=True):
            found[name].append(value)
    return found


PAGE = """\
# A batch beside online requests

Written by this command, which replaces it:

```
PYTHONPATH=tests .venv/bin/python -m bench.background --out docs/benchmarks{option}
```

{seconds:g} s for each phase, {repeats} repeats in turns, at commit {commit}, {date}, on {cpu}.
{engine} runs on one thread{gated}. The cap is {cap}, and memory is for {ceiling}.
Online requests come in bursts of 2 to 10, which are half of what the cap can do.
The batch keeps {twice} requests under way. Prompts have 64 to 192 tokens, and answers 32 to 96.

| ratio | wanted | median | least and most |
|---|---|---|---|
{ratios}

- **First token** and **gap** compare online beside the batch with online alone.
- **Left** is what ordinary requests do at the cap, less what online does. The share of it is the
  batch's beside online.
- **Alone** compares the batch alone with ordinary requests at the ceiling.

| phase | online, tokens/s | batch | first token P50, ms | P99 | gap P50, ms | P99 | CPU-s |
|---|---|---|---|---|---|---|---|
{table}

![both, and each alone]({name}.png)
"""


def page(settings: Mapping[str, Any], rows: Sequence[Row], name: str) -> str:
    """The page in Markdown."""
    ratios = [
        f"| {title} | {WANTED[title][0]} {WANTED[title][1]:g} | {median(values):.2f} | "
        f"{min(values):.2f} to {max(values):.2f} |"
        for title, values in ratios_of(rows).items()
    ]
    options = [" --gate" if settings["gate"] else ""]
    options += [f" --{k} {settings[k]:g}" for k, v in DEFAULTS.items() if settings[k] != v]
    return PAGE.format(
        **settings,
        option="".join(options),
        engine="vLLM-CPU with a model of 88 M" if settings["gate"] else "The demo's model",
        gated=", behind a gate" if settings["gate"] else "",
        twice=2 * settings["ceiling"],
        ratios="\n".join(ratios),
        table="\n".join(_line(rows, phase) for phase in PHASES),
        name=name,
    )


def _middle(rows: Sequence[Row], phase: str, name: str) -> float:
    values = [getattr(row, name) for row in rows if row.phase == phase]
    return median(value or 0.0 for value in values)


def _line(rows: Sequence[Row], phase: str) -> str:
    names = ("online", "batch", "ttft_p50", "ttft_p99", "gap_p50", "gap_p99", "cpu_s")
    cells = [_middle(rows, phase, name) for name in names]
    return f"| {phase} | " + " | ".join(f"{cell:,.1f}" if cell else "" for cell in cells) + " |"


def png(rows: Sequence[Row], path: Path) -> None:
    """Tokens a second by class; P99 of first tokens and gaps, without and with the batch."""
    figure = Figure((11, 4.2), layout="constrained")
    speed, first, gap = figure.subplots(1, 3, width_ratios=(2.2, 1, 1))
    for place, phase in enumerate(PHASES):
        of_online, of_batch = (_middle(rows, phase, name) for name in ("online", "batch"))
        is_marked = phase in (BOTH, ALONE)
        speed.bar(place, of_online, 0.7, color=BLUE, label="online" if place == 0 else None)
        speed.bar(
            *(place, of_batch, 0.7, of_online),
            color=GREEN if is_marked else GREY,
            label={1: "batch in the background", 2: "ordinary requests"}.get(place),
        )
    speed.set_xticks(
        range(len(PHASES)), [phase.replace(" ", "\n", 1) for phase in PHASES], fontsize=8
    )
    speed.set_ylabel("tokens/s")
    speed.legend(fontsize=8)
    for axis, name, title in (
        (first, "ttft_p99", "P99 of first tokens, ms"),
        (gap, "gap_p99", "P99 of gaps, ms"),
    ):
        for place, (phase, colour) in enumerate(((ONLINE, BLUE), (BOTH, GREEN))):
            values = [getattr(row, name) for row in rows if row.phase == phase]
            axis.bar(place, median(values), 0.6, color=colour)
            axis.plot([place] * len(values), values, ".", color="#333333", markersize=5)
        axis.set_xticks((0, 1), ("alone", "beside\nthe batch"), fontsize=8)
        axis.set_title(title, fontsize=10)
    figure.savefig(path, dpi=110)
