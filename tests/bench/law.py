"""The law of a step against stock engines and fixed settings, in simulated machines.

    PYTHONPATH=tests .venv/bin/python -m bench.law --before DIR --out docs/slo/law.json

The machines are a vLLM-like CPU, calm, noisy and with hiccups, and a GPU with launches, stalls and
sizes that were never rehearsed (`bench.law_runs`). All contenders start cold. `--before`: the
checkout of an older commit that has these machines in its `sluice simulate`; its law meets the same
requests. All takes half an hour of one CPU.
"""

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from fnmatch import fnmatch
from pathlib import Path
from tempfile import TemporaryFile

import msgspec
from bench.law_page import page, picture
from bench.law_runs import Job, Row, cells, contenders, load_1_per_s
from msgspec.structs import replace
from sluice.numbers import count

HERE = Path(__file__).resolve().parents[2]
PACKAGES = ("cli", "core", "frontend", "gate", "kernels", "operator", "worker")
PAGE_HEAD = """\
# The law of a step in simulated machines

`{command}` prints this page in {minutes:.0f} minutes, {jobs} processes at once.

"""


class Results(msgspec.Struct):
    """All rows; `per_s`: load 1 of each machine, in requests a second; `before`: of `--before`."""

    seeds: int
    per_s: dict[str, float]
    now: list[Row]
    before: list[Row]


class RunError(Exception):
    """A checkout that cannot run the jobs; one sentence."""


def run_all(
    jobs: Sequence[Job], root: Path, num: int, told: Callable[[Row], None] = lambda row: None
) -> list[Row]:
    """The rows of `jobs` by the product in `root`, from `num` processes; raises RunError."""
    row = msgspec.json.Decoder(Row)  # two threads that prepare one type at once crash msgspec

    def run_share(share: Sequence[Job]) -> list[Row]:
        rows, command = [], [sys.executable, "-m", "bench.law_runs"]
        with TemporaryFile() as given:
            given.write(b"\n".join(map(msgspec.json.encode, share)))
            given.seek(0)
            with subprocess.Popen(
                command, stdin=given, stdout=subprocess.PIPE, env=_environment(root)
            ) as process:
                assert process.stdout is not None
                for line in process.stdout:
                    rows.append(row.decode(line))
                    told(rows[-1])
        if process.returncode or any(found.root != str(root) for found in rows):
            raise RunError(f"{root} does not run these machines, see above.")
        return rows

    shares = [jobs[start::num] for start in range(num)]
    with ThreadPoolExecutor(num) as pool:
        return [row for rows in pool.map(run_share, filter(None, shares)) for row in rows]


def _environment(root: Path) -> dict[str, str]:
    """The benches of this checkout, the product of another."""
    path = [HERE / "tests", *(root / package for package in PACKAGES)]
    return os.environ | {"PYTHONPATH": os.pathsep.join(map(str, path))}


def jobs_of(seeds: int, patterns: Sequence[str], names: Sequence[str]) -> list[Job]:
    """The runs of the cells and contenders that match."""

    def is_asked(text: str, asked: Iterable[str]) -> bool:
        return any(fnmatch(text, pattern) for pattern in asked)

    return [
        Job(cell, name, seed, load_1_per_s(cell.machine))
        for cell in cells()
        if is_asked(str(cell), patterns)
        for name in contenders(cell.machine)
        if is_asked(name, names)
        for seed in range(seeds)
    ]


def main() -> int:
    """Runs everything, prints the page, writes --out with page and picture beside; 1 on failure."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--before", type=Path, help="a checkout of an older commit")
    parser.add_argument("--cells", nargs="+", default=["*"], help="as 'cpuv: bursts*'")
    parser.add_argument("--contenders", nargs="+", default=["*"], help="as stock, 'pair *', ours")
    parser.add_argument("--seeds", type=count, default=5)
    parser.add_argument("--jobs", type=count, default=1, help="processes")
    parser.add_argument("--out", type=Path, default=Path("build/law/law.json"))
    given = parser.parse_args()
    jobs, started_s = jobs_of(given.seeds, given.cells, given.contenders), time.monotonic()
    try:
        results = _measured(jobs, given.seeds, given.before, given.jobs)
    except RunError as e:
        print(f"bench.law: {e}", file=sys.stderr)
        return 1
    minutes = (time.monotonic() - started_s) / 60
    told = ("DIR" if given.before and text == str(given.before) else text for text in sys.argv[1:])
    command = f"python -m bench.law {' '.join(told)}".strip()
    head = PAGE_HEAD.format(command=command, minutes=minutes, jobs=given.jobs)
    text = head + page(results.now, results.before, results.per_s)
    given.out.parent.mkdir(parents=True, exist_ok=True)
    given.out.write_bytes(msgspec.json.encode(results).replace(b"},{", b"},\n{") + b"\n")
    given.out.with_suffix(".md").write_text(text)
    picture(results.now, results.before, given.out.with_suffix(".png"))
    print(text)
    return 0


def _measured(jobs: Sequence[Job], seeds: int, before: Path | None, num: int) -> Results:
    ours = [job for job in jobs if contenders(job.cell.machine)[job.contender].is_ours]
    total, num_done = len(jobs) + (len(ours) if before else 0), 0

    def tell(row: Row) -> None:
        nonlocal num_done
        num_done += 1
        shares = f"{row.good:.0%} good, {row.smooth:.0%} smooth"
        told = f"{num_done} of {total}: {row.cell}, {row.contender}, seed {row.seed}: {shares}"
        print(told, file=sys.stderr, flush=True)

    now = run_all(jobs, HERE, num, tell)
    old = run_all(ours, before.resolve(), num, tell) if before else []
    per_s = {job.cell.machine: job.per_s for job in jobs}
    placeless = ([replace(row, root="") for row in rows] for rows in (now, old))
    return Results(seeds, per_s, *placeless)


if __name__ == "__main__":
    sys.exit(main())
