"""Only what was measured is drawn, where it was measured."""

import re

from sluice.ui.charts import Line, Mark, Part, bar, chart, span_of, spark
from sluice.ui.history import HOUR_S, History, of_ticks
from sluice_core.contract import FirstTokens
from unit.operator.observations import create_tick

CAP = Line("cap", "cap", "blue", is_step=True)
NOW = 1_760_000_000.0


def history(*values: float | None, every_s: float = 10.0) -> History:
    """Looks at the cap until `NOW`."""
    found = History()
    for at, value in enumerate(values, 1):
        found.add(NOW - every_s * (len(values) - at), {"cap": value})
    return found


def paths(page: str, colour: str = "blue") -> list[str]:
    return re.findall(rf'<path d="([^"]*)" class="line {colour}">', page)


def test_of_equal_looks_the_first_and_the_last_are_kept() -> None:
    points = history(4, 4, 4, 4, 8, 8, 8).points
    assert [(NOW - point.at_s, point.values["cap"]) for point in points] == [
        (60, 4), (30, 4), (20, 8), (0, 8),
    ]  # fmt: skip


def test_an_hour_is_kept_and_the_look_before_it() -> None:
    points = history(*range(100), every_s=60).points
    assert [NOW - points[0].at_s, NOW - points[1].at_s] == [HOUR_S + 60, HOUR_S]


def test_the_span_is_the_least_that_holds_all() -> None:
    spans = [
        span_of(list(history(1, 2, every_s=s).points), NOW) for s in (60, 400, 1500, 3000, 9999)
    ]
    assert [span.end_s - span.begin_s for span in spans] == [300, 900, 1800, 3600, 3600]
    assert span_of([], NOW).begin_s == NOW - 300


def test_a_step_holds_its_value_until_the_next_look() -> None:
    points = list(history(0, 8, every_s=150).points)
    [path] = paths(chart("Cap", [CAP], points, span_of(points, NOW)))
    assert path == "M500.0 1000.0h0H1000.0V200.0", "half of the span, and 8 of 10 of the height"


def test_nothing_is_drawn_where_nothing_was_measured() -> None:
    looks = history(4, None, 4)
    looks.interrupt()
    looks.add(NOW + 60, {"cap": 4})
    points = list(looks.points)
    page = chart("Cap", [CAP], points, span_of(points, NOW + 60))
    [path] = paths(page)
    assert path.count("M") == 3, "a new beginning behind each gap"
    assert page.count('class="unseen"') == 2, "before the first look, and while none was possible"
    none = chart("Cap", [CAP], [], span_of([], NOW))
    assert paths(none) == [""]
    assert "cap -" in none


def test_a_target_and_the_marks_are_drawn_in_their_places() -> None:
    points = list(history(10, 100, every_s=300).points)
    marks = [
        Mark(NOW - 150, 1, "<b>", True),
        Mark(NOW - 149, 2, "near"),
        Mark(NOW - 999, 3, "past"),
    ]
    page = chart("P99", [CAP], points, span_of(points, NOW), marks, target=100, is_ms=True)
    assert paths(page, "limit") == ["M0 0.0H1000"]
    assert page.count("<line") == 2 + 2, "two rules and two marks"
    assert 'x1="50.00%"' in page
    assert re.findall(r"<text[^>]*mark[^>]*>(\d)</text>", page) == ["1"], "2 has no room"
    assert "&lt;b&gt;" in page
    assert "target 100 ms" in page


def test_a_small_curve_has_few_points_and_keeps_peaks_and_gaps() -> None:
    looks = history(*(80 if at == 100 else at % 7 for at in range(200)), every_s=1)
    looks.interrupt()
    looks.add(NOW + 1, {"cap": 3})
    points = list(looks.points)
    [path] = paths(spark(CAP, points, span_of(points, NOW)))
    assert len(re.findall("[MHL]", path)) <= 60
    assert "V200.0" in path, "80 of 100"
    assert path.count("M") == 2


def test_a_bar_has_its_parts_in_their_shares() -> None:
    page = bar([Part(1, "one", "blue"), Part(2, "two", "green")], 4)
    assert re.findall(r'x="([\d.]+)%" width="([\d.]+)%"', page) == [
        ("0.00", "25.00"), ("25.00", "50.00"),
    ]  # fmt: skip
    assert 'width="0.00%"' in bar([Part(0, "none", "blue")], 0)


def test_ticks_of_a_server_become_one_percentile_over_all_of_them() -> None:
    ticks = [
        create_tick(1, arrivals=2, steps=10, decodes=40, ttft=FirstTokens(98, sketch={100: 98})),
        create_tick(2, arrivals=6, steps=10, decodes=60, ttft=FirstTokens(2, sketch={300: 2})),
    ]
    values = of_ticks(ticks)
    assert (values["batch"], values["arrivals"]) == (5.0, 2.0)
    assert (values["timeToFirstToken"] or 0) > 300
    assert values["interTokenLatency"] is None
