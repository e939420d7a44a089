"""Contenders in turns on a real engine, each run kept, so that a bench that is cut goes on. *Rim*.

For each repeat and trace the engine is measured, which sets load and target of all runs: they meet
the same requests, in an order that is drawn. The speed of a shared machine wanders in the meantime,
so the engine is measured again after the last run.
"""

import argparse
import json
import platform
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import product
from pathlib import Path
from random import Random
from typing import Any, Protocol

import msgspec
from bench.real_rows import Row, line
from bench.serving import PACKAGES
from sluice.machine import processor
from sluice.numbers import count
from sluice_operator.tuner import Targets

ROOT = Path(__file__).resolve().parents[2]
PRODUCT = (*PACKAGES, "operator")
PLACES = ("before", "cache", "out", "resume")
"""Flags that are no settings."""
FREE = ("date", "repeats")
"""Settings in which a bench may differ from the one that it goes on with."""


@dataclass(frozen=True, slots=True)
class Setting:
    """What an engine was just measured to do: `per_s` requests a second, within `targets`."""

    targets: Targets
    per_s: float


class Contest(Protocol):
    """What is measured."""

    async def setting(self) -> Setting:
        """What the engine does now, and what may be asked of it."""
        ...

    async def per_s(self) -> float:
        """The requests/s of `setting`, measured again."""
        ...

    async def run(self, trace: str, name: str, repeat: int, found: Setting) -> Row:
        """The contender `name` on `trace`."""
        ...


@dataclass
class Kept:
    """All rows so far, in the file `path` under the settings `told`. `screened`: of short runs that
    choose the contenders."""

    path: Path
    told: Mapping[str, Any]
    rows: list[Row] = field(default_factory=list)
    screened: list[Row] = field(default_factory=list)

    @classmethod
    def of(cls, path: Path, told: Mapping[str, Any], resume: bool) -> "Kept":
        """With the rows that the file has, if asked to `resume`. Raises SystemExit in a sentence if
        they are of other settings."""
        path.parent.mkdir(parents=True, exist_ok=True)
        if not (resume and path.exists()):
            return cls(path, told)
        found = json.loads(path.read_text())
        rows = [msgspec.convert(found.pop(name, []), list[Row]) for name in ("rows", "screened")]
        asked = json.loads(json.dumps(told))
        for name in sorted({*found, *asked} - {*FREE}):
            if found.get(name) != asked.get(name):
                was, now = json.dumps(found.get(name)), json.dumps(asked.get(name))
                raise SystemExit(f"--resume: {path} was measured with {name} {was}, not {now}.")
        return cls(path, told, *rows)

    def add(self, row: Row, is_screened: bool = False) -> None:
        """One more, told and kept."""
        (self.screened if is_screened else self.rows).append(row)
        print(line(row), flush=True)
        self.write()

    def row(self, trace: str, name: str, repeat: int) -> Row | None:
        """The one of this run, if it is done."""
        of = (row for row in self.rows if row.is_of(trace, repeat) and row.contender == name)
        return next(of, None)

    def setting(self, trace: str, repeat: int) -> Setting | None:
        """The one in which runs of the trace and repeat were done, if any were."""
        return next((setting_of(r, self.told) for r in self.rows if r.is_of(trace, repeat)), None)

    def drifted(self, trace: str, repeat: int, drift: float) -> None:
        """How much more the engine did after the runs of the trace and repeat."""
        self.rows = [replace(r, drift=drift) if r.is_of(trace, repeat) else r for r in self.rows]
        print(f"{trace}: {drift:+.0%} requests/s afterwards", flush=True)
        self.write()

    def write(self) -> None:
        """The file, as a whole: a cut leaves the old one or the new one."""
        rows = {name: [asdict(row) for row in getattr(self, name)] for name in ("screened", "rows")}
        beside = self.path.with_suffix(".part")
        beside.write_text(json.dumps({**self.told, **rows}, indent=1) + "\n")
        beside.replace(self.path)


def setting_of(row: Row, told: Mapping[str, Any]) -> Setting:
    """The one in which a row was measured."""
    return Setting(Targets("99", told["ttft_ms"], row.itl_target_ms, None), row.per_s)


async def turns(
    contest: Contest,
    kept: Kept,
    traces: Sequence[str],
    named: Callable[[str], Sequence[str]],
    repeats: int,
    seed: int,
) -> None:
    """Run the contenders `named` for each trace as often as asked; what is kept is not run again.
    The order is drawn from seed, repeat and trace alone, so a bench that goes on has the same."""
    for repeat, trace in product(range(repeats), traces):
        names = list(named(trace))
        drawn = Random(f"{seed} {repeat} {trace}").sample(names, len(names))
        done = [kept.row(trace, name, repeat) for name in drawn]
        if all(row is not None and row.drift is not None for row in done):
            continue
        found = kept.setting(trace, repeat) or await contest.setting()
        told = f"{found.per_s:.2f} requests/s, {found.targets.itl_ms:.4g} ms are due"
        print(f"repeat {repeat + 1} of {repeats}, {trace}: {told}", flush=True)
        for name, row in zip(drawn, done, strict=True):
            if row is None:
                kept.add(await contest.run(trace, name, repeat, found))
        kept.drifted(trace, repeat, await contest.per_s() / found.per_s - 1)


def add_turns(parser: argparse.ArgumentParser) -> None:
    """The flags of a bench in turns."""
    parser.add_argument("--before", type=Path, help="a checkout of an older commit: one more")
    parser.add_argument("--resume", action="store_true", help="go on with the rows in --out")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--repeats", type=count, default=5)


def settings(given: argparse.Namespace) -> dict[str, Any]:
    """All that rows depend on: flags, machine, and the commits of this product and of --before."""
    flags = {name: value for name, value in vars(given).items() if name not in PLACES}
    before = given.before and commit_of(given.before)
    return {
        "date": time.strftime("%Y-%m-%d"), "cpu": processor(), "python": platform.python_version(),
        "product": commit_of(ROOT), "before": before, **flags,
    }  # fmt: skip


def commit_of(checkout: Path) -> str:
    """The last one in which the product of a checkout changed. Raises SystemExit if it is none."""
    asked = ("git", "-C", str(checkout), "log", "-1", "--abbrev=8", "--format=%h", "--", *PRODUCT)
    found = subprocess.run(asked, capture_output=True, text=True, check=False)
    if found.returncode or not found.stdout.strip():
        raise SystemExit(f"{checkout} is no checkout: {found.stderr.strip() or 'no package'}.")
    return found.stdout.strip()
