"""Curves, marks and bars as SVG that follows the width of its place. Pure.

Texts stand at percentages in the outer picture, so they keep their size. Curves are stretched in an
inner one. Colours and widths are the style sheet's, by class.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from itertools import pairwise
from math import ceil, floor, log10

from sluice_operator.status.usage import digits

from sluice.page import Html, tag

from .history import HOUR_S, Point

UNITS = 1000.0
"""Width and height of the inner picture."""
SPANS_S = (300.0, 900.0, 1800.0, HOUR_S)
NICE = (1, 2, 4, 6, 10)
SPARK = 60
"""Points of a small curve, at most: a page may have hundreds of them."""
NEAR = 4.0
"""Percent of the width below which two numbers would cover each other."""


@dataclass(frozen=True, slots=True)
class Span:
    """The times that are drawn."""

    begin_s: float
    end_s: float

    def percent(self, at_s: float) -> float:
        """Where a time stands: 0 is left, as is all before, and 100 right."""
        return max(0.0, 100 * (at_s - self.begin_s) / (self.end_s - self.begin_s))


@dataclass(frozen=True, slots=True)
class Mark:
    """A decision, or what else is told of a time. `number`: as the list has it."""

    at_s: float
    number: int
    text: str
    is_warning: bool = False


@dataclass(frozen=True, slots=True)
class Line:
    """A curve of one name of the points. `is_step`: it holds its value until the next look."""

    name: str
    label: str
    colour: str
    is_step: bool = False


def span_of(points: Sequence[Point], now: float) -> Span:
    """The last 5, 15, 30 or 60 minutes: the least that holds all points."""
    since_s = now - points[0].at_s if points else 0.0
    return Span(now - next((s for s in SPANS_S if s >= since_s), HOUR_S), now)


def clock(at_s: float) -> str:
    """A Unix time as this machine's clock shows it."""
    return f"{datetime.fromtimestamp(at_s).astimezone():%H:%M:%S}"


def told_ms(value: float) -> str:
    """Milliseconds, with three digits."""
    return f"{value:.3g} ms" if value < 1000 else f"{value / 1000:.3g} s"


@dataclass(frozen=True, slots=True)
class _Scale:
    """Heights of values: 0 is the top. `ticks`: evenly spaced, from the bottom."""

    ticks: tuple[float, ...]
    is_log: bool

    @classmethod
    def over(cls, values: Sequence[float], is_log: bool) -> "_Scale":
        if is_log:
            low = floor(log10(max(min(values, default=1.0), 0.01)))
            high = max(ceil(log10(max(values, default=10.0))), low + 1)
            return cls(tuple(10.0**at for at in range(low, high + 1)), True)
        most = max(values, default=0.0)
        ten = 10.0 ** floor(log10(max(most, 2.0)))
        top = max(2.0, next(n * ten for n in NICE if n * ten >= most))
        return cls((0.0, top / 2, top), False)

    def height(self, value: float) -> float:
        low, high = self.ticks[0], self.ticks[-1]
        if self.is_log:
            low, high, value = log10(low), log10(high), log10(max(value, low))
        return 1 - (value - low) / (high - low)


def chart(
    title: str,
    lines: Sequence[Line],
    points: Sequence[Point],
    span: Span,
    marks: Sequence[Mark] = (),
    *,
    target: float | None = None,
    is_ms: bool = False,
) -> Html:
    """A picture with its title and its newest values. Times are on a logarithmic scale."""
    values = [v for p in points for line in lines if (v := p.values.get(line.name)) is not None]
    scale = _Scale.over([*values, *([target] if target else [])], is_ms)
    say = told_ms if is_ms else digits
    keys = [_key(line, points, say) for line in lines]
    limit = tag("span", f"target {say(target)}", class_="key limit") if target else ""
    curves = [_path(line, points, span, scale) for line in lines]
    picture = tag(
        "svg",
        *_grid(scale, say),
        *_unseen(points, span),
        _inner(*curves, _level(target, scale) if target else ""),
        *_marks(marks, span),
        *_times(span),
        role="img",
        aria_label=title,
    )
    told_now = tag("span", *keys, limit, class_="keys")
    return tag("figure", tag("figcaption", tag("b", title), told_now), picture, class_="chart")


def spark(line: Line, points: Sequence[Point], span: Span, *, target: float | None = None) -> Html:
    """A small curve without numbers. Of neighbours it has the largest."""
    points = list(points)
    step = max(1, ceil(len(points) / SPARK))
    groups = [points[at : at + step] for at in range(0, len(points), step)]
    few = [
        replace(
            max(group, key=lambda point: point.values.get(line.name) or 0.0),
            is_first=any(point.is_first for point in group),
        )
        for group in groups
    ]
    values = [v for point in few if (v := point.values.get(line.name)) is not None]
    scale = _Scale.over([*values, *([target] if target else [])], is_log=False)
    curve = _path(line, few, span, scale)
    level = _level(target, scale) if target else ""
    return tag("svg", _inner(curve, level), class_="spark", aria_hidden="true")


@dataclass(frozen=True, slots=True)
class Part:
    """A part of a bar."""

    size: float
    label: str
    colour: str


def bar(parts: Sequence[Part], total: float) -> Html:
    """Parts side by side; what they leave of `total` is empty."""
    found, left = [], 0.0
    for part in parts:
        wide = 100 * part.size / total if total else 0.0
        rect = tag("title", part.label)
        found.append(
            tag("rect", rect, x=f"{left:.2f}%", width=f"{wide:.2f}%", height="100%",
                class_=part.colour)
        )  # fmt: skip
        left += wide
    label = ", ".join(part.label for part in parts)
    return tag("svg", *found, class_="bar", role="img", aria_label=label)


def _inner(*parts: Html | str) -> Html:
    box = f"0 0 {UNITS:g} {UNITS:g}"
    return tag("svg", *parts, viewBox=box, preserveAspectRatio="none", class_="curves")


def _key(line: Line, points: Sequence[Point], say: Callable[[float], str]) -> Html:
    now = points[-1].values.get(line.name) if points else None
    return tag(
        "span", f"{line.label} {'-' if now is None else say(now)}", class_=f"key {line.colour}"
    )


def _path(line: Line, points: Sequence[Point], span: Span, scale: _Scale) -> Html:
    """The curve, with a gap where nothing is known."""
    drawn, is_open, before = list[str](), False, ""
    for point in points:
        value = point.values.get(line.name)
        if value is None:
            is_open = False
            continue
        x = f"{span.percent(point.at_s) * UNITS / 100:.1f}"
        y = f"{scale.height(value) * UNITS:.1f}"
        if point.is_first or not is_open:
            drawn.append(f"M{x} {y}h0")
        elif line.is_step and y != before:
            drawn.append(f"H{x}V{y}")
        else:
            drawn.append(f"L{x} {y}")
        is_open, before = True, y
    return tag("path", d="".join(drawn), class_=f"line {line.colour}")


def _level(value: float, scale: _Scale) -> Html:
    return tag("path", d=f"M0 {scale.height(value) * UNITS:.1f}H{UNITS:g}", class_="line limit")


def _grid(scale: _Scale, say: Callable[[float], str]) -> Iterator[Html]:
    """Rules, and their values above them; of many decades, every other one has its value."""
    for at, tick in enumerate(scale.ticks):
        y = f"{100 * scale.height(tick):.1f}%"
        yield tag("line", x1="0", x2="100%", y1=y, y2=y, class_="rule")
        is_last = at == len(scale.ticks) - 1
        if is_last or len(scale.ticks) < 5 or at % 2 == 0:
            yield tag("text", say(tick), x="2", y=y, dy="12" if is_last else "-3", class_="tick")


def _unseen(points: Sequence[Point], span: Span) -> Iterator[Html]:
    """The times before the first look, and the gaps."""
    ends = [(span.begin_s, points[0].at_s)] if points else [(span.begin_s, span.end_s)]
    ends += [(a.at_s, b.at_s) for a, b in pairwise(points) if b.is_first]
    for begin_s, end_s in ends:
        left, right = span.percent(begin_s), span.percent(end_s)
        where = {"x": f"{left:.2f}%", "width": f"{right - left:.2f}%", "height": "100%"}
        yield tag("rect", tag("title", "not measured"), **where, class_="unseen")


def _marks(marks: Sequence[Mark], span: Span) -> Iterator[Html]:
    """A line for each, and its number where that has room."""
    free = 0.0
    for mark in sorted(marks, key=lambda mark: mark.at_s):
        if mark.at_s < span.begin_s:
            continue
        at = span.percent(mark.at_s)
        x, colour = f"{at:.2f}%", "mark bad" if mark.is_warning else "mark"
        title = tag("title", f"{clock(mark.at_s)} {mark.text}")
        yield tag("line", title, x1=x, x2=x, y1="0", y2="100%", class_=colour)
        if at >= free and at < 98:
            yield tag("text", mark.number, x=x, y="0", dy="11", dx="3", class_=colour)
            free = at + NEAR


def _times(span: Span) -> Iterator[Html]:
    middle_s = (span.begin_s + span.end_s) / 2
    for at_s, x, anchor in (
        (span.begin_s, "0", "start"),
        (middle_s, "50%", "middle"),
        (span.end_s, "100%", "end"),
    ):
        yield tag(
            "text", clock(at_s)[:5], x=x, y="100%", dy="14", text_anchor=anchor, class_="tick"
        )
