"""A bench that is cut goes on where it was, and never mixes rows of different settings."""

import asyncio
import json
import os
import shutil
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from bench.real_rows import Row, make_row
from bench.real_turns import ROOT, Kept, Setting, commit_of, turns
from bench.serving import product_of
from hypothesis import given
from hypothesis import strategies as st
from sluice.measure.client import Outcome
from sluice_operator.tuner import Targets

TRACES, NAMES, REPEATS, SEED, TTFT_MS = ("steps", "bursts"), ("stock", "cap 8", "ours"), 2, 3, 2e3
TOLD = {"date": "today", "repeats": REPEATS, "ttft_ms": TTFT_MS, "seconds": 45.0, "seed": SEED}
ANSWERED = Outcome("ok", "", 0.2, 0.3, 3, (0.04, 0.045), 0)


class Cut(Exception):
    """The session is over."""


@dataclass
class Engine:
    """One that becomes faster with each look at it; `lasts`: so many runs, then comes the cut."""

    lasts: int
    speed: float = 1.0
    runs: list[tuple[str, str, int, float]] = field(default_factory=list)

    async def setting(self) -> Setting:
        return Setting(Targets("99", TTFT_MS, 50 * await self.per_s(), None), self.speed)

    async def per_s(self) -> float:
        self.speed += 1
        return self.speed

    async def run(self, trace: str, name: str, repeat: int, found: Setting) -> Row:
        if len(self.runs) == self.lasts:
            raise Cut
        self.runs.append((trace, name, repeat, found.per_s))
        done = ([ANSWERED, None], found.targets, 10.0, 5.0, [(0.0, 4)], found.per_s)
        return make_row(trace, name, repeat, *done)


def run(engine: Engine, kept: Kept, repeats: int = REPEATS) -> None:
    asyncio.run(turns(engine, kept, TRACES, lambda _: NAMES, repeats, SEED))


@given(cut=st.integers(0, REPEATS * len(TRACES) * len(NAMES)))
def test_a_bench_that_was_cut_does_what_is_left_in_the_same_order_at_the_same_load(
    tmp_path_factory: pytest.TempPathFactory, cut: int
) -> None:
    path, whole = tmp_path_factory.mktemp("rows") / "rows.json", Engine(100)
    run(whole, Kept.of(path.with_name("whole.json"), TOLD, resume=False))
    first, second = Engine(cut), Engine(100, speed=whole.speed)
    with suppress(Cut):
        run(first, Kept.of(path, TOLD, resume=False))
    kept = Kept.of(path, TOLD, resume=True)
    assert len(kept.rows) == min(cut, len(whole.runs))
    run(second, kept)
    both = [one[:3] for one in first.runs + second.runs]
    assert both == [one[:3] for one in whole.runs]
    settings = {(r.trace, r.repeat, r.per_s, r.itl_target_ms, r.drift) for r in kept.rows}
    assert len(settings) == REPEATS * len(TRACES)
    assert all(row.drift is not None for row in kept.rows)
    assert Kept.of(path, TOLD, resume=True).rows == kept.rows


def test_rows_of_other_settings_are_refused_in_a_sentence_and_stay(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    run(Engine(100), Kept.of(path, TOLD, resume=False))
    before = path.read_text()
    with pytest.raises(SystemExit, match=r"was measured with seconds 45\.0, not 30\.0\.$"):
        Kept.of(path, TOLD | {"seconds": 30.0}, resume=True)
    assert path.read_text() == before


def test_more_repeats_may_be_asked_of_a_bench_that_goes_on(tmp_path: Path) -> None:
    path, engine = tmp_path / "rows.json", Engine(100)
    run(engine, Kept.of(path, TOLD, resume=False))
    kept = Kept.of(path, TOLD | {"repeats": 3, "date": "tomorrow"}, resume=True)
    run(engine, kept, repeats=3)
    assert len(engine.runs) == len(kept.rows) == 3 * len(TRACES) * len(NAMES)
    assert json.loads(path.read_text())["repeats"] == 3


def test_screened_rows_are_kept_apart_and_without_resume_all_is_new(tmp_path: Path) -> None:
    path, engine = tmp_path / "rows.json", Engine(100)
    kept = Kept.of(path, TOLD, resume=True)
    found = asyncio.run(engine.setting())
    kept.add(asyncio.run(engine.run("steps", "8/64", 0, found)), is_screened=True)
    again = Kept.of(path, TOLD, resume=True)
    assert again.screened == kept.screened
    assert again.rows == []
    assert Kept.of(path, TOLD, resume=False).screened == []


def test_only_a_checkout_has_a_commit(tmp_path: Path) -> None:
    assert len(commit_of(ROOT)) == 8
    with pytest.raises(SystemExit, match="is no checkout"):
        commit_of(tmp_path)


def test_the_product_of_another_checkout_is_what_a_process_runs(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "core", tmp_path / "core")
    command = [sys.executable, "-c", "import sluice_core; print(sluice_core.__file__)"]
    environ = {**os.environ, **product_of(tmp_path)}
    found = subprocess.run(command, env=environ, capture_output=True, text=True, check=True)
    assert Path(found.stdout.strip()).is_relative_to(tmp_path)
