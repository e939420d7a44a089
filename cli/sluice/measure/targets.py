"""Targets in a command line's notation, and the test if one request held them. Pure."""

import argparse
import re
from math import floor

from sluice_core.contract import SMOOTH_SHARE, Overload
from sluice_operator.tuner import Targets

from sluice.measure.client import Outcome

HELP = "ttft=1s,itl=100ms,e2e=30s,percentile=99.9; each may be left out"
_UNITS = {"ms": 1.0, "s": 1e3, "m": 6e4}


def read_targets(text: str, overload: Overload = "Queue") -> Targets:
    """The targets of a text like `HELP`; raises ArgumentTypeError with one sentence."""
    found: dict[str, float] = {}
    percentile = "99"
    parts = [part.strip().partition("=") for part in text.split(",") if part]
    names = [name for name, _, _ in parts]
    if twice := next((name for name in names if names.count(name) > 1), ""):
        raise argparse.ArgumentTypeError(f"{twice} is given twice")
    for name, equals, value in parts:
        if (
            name == "percentile"
            and re.fullmatch(r"\d{2}(\.\d+)?", value)
            and 50 <= float(value) < 100
        ):
            percentile = value
            continue
        match = re.fullmatch(r"(\d+(?:\.\d+)?)(ms|s|m)", value)
        if name not in ("ttft", "itl", "e2e") or not match or float(match[1]) <= 0:
            raise argparse.ArgumentTypeError(
                f"{name + equals + value!r} is not like ttft=1s, itl=100ms or percentile=99"
            )
        found[name] = float(match[1]) * _UNITS[match[2]]
    if not found:
        raise argparse.ArgumentTypeError("no target is named; it is like ttft=1s,itl=100ms")
    ttft, itl, e2e = (found.get(name) for name in ("ttft", "itl", "e2e"))
    return Targets(percentile, ttft, itl, e2e, overload=overload)


def is_good(outcome: Outcome, targets: Targets) -> bool:
    """True if it was answered in full, with first token, mean gap and end within their targets."""
    return _within(outcome.mean_gap_s, targets.itl_ms) and _starts_and_ends(outcome, targets)


def is_smooth(outcome: Outcome, targets: Targets) -> bool:
    """True if as good, but with at most 1 %, rounded down, of its own gaps over the target."""
    over = sum(not _within(gap, targets.itl_ms) for gap in outcome.gaps_s)
    return over <= floor(SMOOTH_SHARE * len(outcome.gaps_s)) and _starts_and_ends(outcome, targets)


def _starts_and_ends(outcome: Outcome, targets: Targets) -> bool:
    held = _within(outcome.ttft_s, targets.ttft_ms) and _within(outcome.total_s, targets.e2e_ms)
    return held and outcome.is_ok


def _within(seconds: float, target_ms: float | None) -> bool:
    return target_ms is None or 1000 * seconds <= target_ms
