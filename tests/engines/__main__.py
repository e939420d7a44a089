"""`make engines`: the conformance suite on real engines, and the table of its results.

    make engines
    make engines ARGS="vllm ollama"

It installs the engines as `make bench` does its peers, runs the suite on one after another, and
writes docs/engines.json and the section of docs/engines.md. Results of engines that were not asked
for stay. Exit status: 0 if every line passed on every engine.
"""

import argparse
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from bench.peers.checkpoint import CACHE
from bench.peers.install import CannotInstall, install
from bench.peers.processes import unwind_on_sigterm
from bench.peers.versions import version_of
from engines.launchers import KINDS
from engines.table import Line, Results, merged, section
from sluice.machine import processor

ROOT = Path(__file__).parents[2]
SUITE = Path(__file__).with_name("test_conformance.py")
JSON, PAGE = ROOT / "docs" / "engines.json", ROOT / "docs" / "engines.md"


class Lines:
    """A plugin of pytest that keeps each test's outcome and figures."""

    def __init__(self) -> None:
        self.lines: dict[str, Line] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        name = report.nodeid.partition("::")[2].partition("[")[0].removeprefix("test_")
        if report.when != "call" and report.passed:
            return
        reason = "" if report.passed else _reason(report)
        self.lines[name] = Line(report.outcome, reason, dict(report.user_properties))


def _reason(report: pytest.TestReport) -> str:
    """Why it was skipped, or the first line of what went wrong, as pytest marks it."""
    if isinstance(report.longrepr, tuple):  # of a skip: path, line, reason
        return report.longrepr[2]
    text = report.longreprtext
    marked = [line[1:].strip() for line in text.splitlines() if line.startswith("E ")]
    return (marked or text.strip().splitlines() or [""])[0][:200]


def tried(name: str) -> Results:
    """One engine: its version, and each line of the suite."""
    kind = KINDS[name]
    about: dict[str, Any] = {"version": version_of(kind.site or "sluice")}
    about |= {"date": time.strftime("%Y-%m-%d"), "cpu": processor()}
    print(f"{name}: {about['version']}", flush=True)
    try:
        if kind.site:
            install(kind.site, CACHE)
    except CannotInstall as error:
        print(f"  cannot be installed: {error}", flush=True)
        return Results(**about, left_out=str(error), lines={})
    os.environ["SLUICE_ENGINES"] = name
    lines = Lines()
    pytest.main(["-v", "--no-header", "--tb=short", str(SUITE)], [lines])
    return Results(**about, left_out="", lines=lines.lines)


def main(argv: Sequence[str]) -> int:
    """Entry of `make engines`."""
    parser = argparse.ArgumentParser(
        prog="make engines", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("engines", nargs="*", help=f"of {', '.join(KINDS)}; default: all")
    asked = parser.parse_args(argv).engines or list(KINDS)
    if unknown := [name for name in asked if name not in KINDS]:
        parser.error(f"{', '.join(unknown)} is none of {', '.join(KINDS)}")
    unwind_on_sigterm()
    status = 0
    for name in asked:
        results = tried(name)
        bad = results.left_out or [n for n, one in results.lines.items() if one.outcome == "failed"]
        status = status or int(bool(bad) or not results.lines)
        everything = merged(JSON, name, results)
        PAGE.write_text(section(PAGE.read_text(), everything))
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
