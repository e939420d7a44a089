"""Ours, and by deadline, against every fixed cap, cap = max, AIMD and the oracle, in virtual time.

    PYTHONPATH=tests .venv/bin/python -m research.compare --out docs/slo

Writes comparison.json and comparison.png, and rows.jsonl, from which it continues after a stop.
"""

import argparse
import gc
import hashlib
import json
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
from research.generate import TRACES, make_trace
from research.picture import comparison_png
from research.search import Case, best_near, best_of
from research.services import NOISES, SERVICES, TARGETS
from research.summary import newest, reach, summarise, table
from sluice.measure.targets import read_targets
from sluice.numbers import count, positive
from sluice.simulate.params import ParamsError
from sluice.simulate.runs import Result
from sluice_core.contract import TICK_SECONDS
from sluice_operator import tuner


class Cell(msgspec.Struct, frozen=True):
    """One service, target, noise and trace; of each cell every seed is run."""

    service: str
    target: str
    noise: str
    trace: str


@dataclass(frozen=True, slots=True)
class Job:
    """`tuned`: a row of the same run with other caps, which do not change what ours brings;
    `fixed`: one with another law, which does not change what fixed caps and AIMD bring."""

    cell: Cell
    seed: int
    requests: int
    caps: tuple[int, ...]
    every_s: float
    tuned: dict[str, Any] | None = None
    fixed: dict[str, Any] | None = None


def parser() -> argparse.ArgumentParser:
    """The flags of the comparison."""
    found = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    found.add_argument("--out", type=Path, required=True, help="the comparison's folder")
    texts = {
        "traces": ("or: all", "steady-80,steps,bursts,length-shift"),
        "services": ("of gpu, cpu", "gpu,cpu"),
        "targets": ("of tight, default, loose, patient, or: all", "default"),
        "noises": ("of independent, interference, or: all", "independent"),
        "caps": ("1,2,4 or 1..256; without: searched, see best_near", ""),
    }
    for name, (text, default) in texts.items():
        found.add_argument(
            f"--{name}", default=default, help=f"{text}; default: {default or 'none'}"
        )
    found.add_argument("--requests", type=count, default=4000, help="of a trace")
    found.add_argument("--seeds", type=count, default=3)
    found.add_argument(
        "--every", type=positive, default=TICK_SECONDS, help="seconds between decisions"
    )
    found.add_argument("--jobs", type=count, default=1, help="processes")
    found.add_argument(
        "--again", action="store_true", help="run ours anew where a row is of another tuner's code"
    )
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """0, 2 if what was given cannot be used, or 130 if it was interrupted."""
    try:
        compare(parser().parse_args(argv))
    except (ParamsError, OSError) as e:
        print(f"research.compare: {e}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("research.compare: interrupted", file=sys.stderr)
        return 130
    return 0


def compare(args: argparse.Namespace) -> None:
    """Run all cells that rows.jsonl in --out does not hold yet; write comparison.json and .png."""
    out: Path = args.out
    out.mkdir(parents=True, exist_ok=True)
    path = out / "rows.jsonl"
    rows = _whole_rows(path)
    jobs = _left(_jobs(args), rows, args.again)
    started_s = time.monotonic()
    heard = signal.signal(
        signal.SIGINT, signal.SIG_IGN
    )  # children inherit it from their first step
    spawned = multiprocessing.get_context("spawn").Pool(args.jobs)
    signal.signal(signal.SIGINT, heard)
    with spawned as pool, path.open("a") as file:
        for number, row in enumerate(pool.imap_unordered(run_job, jobs), 1):
            rows.append(row)
            print(json.dumps(row), file=file, flush=True)
            name = " ".join((*row["cell"].values(), f"seed {row['seed']}"))
            seconds = time.monotonic() - started_s
            print(f"{number}/{len(jobs)}  {seconds:.0f} s  {name}", file=sys.stderr, flush=True)
    if len(current := {_key(row): row for row in rows}) < len(rows):  # some were run anew
        _replace(path, list(current.values()))
    rows = newest(rows)
    rows.sort(key=lambda row: (*row["cell"].values(), row["seed"]))
    summary = summarise(rows)
    (out / "comparison.json").write_text(json.dumps(summary, indent=1) + "\n")
    comparison_png(rows, out / "comparison.png")
    print(table(summary), reach(summary), sep="\n\n")


def _whole_rows(path: Path) -> list[dict[str, Any]]:
    """The rows of a file, from which one that was cut while it was written is taken away."""
    if not path.exists():
        return []
    whole, newline, cut = path.read_bytes().rpartition(b"\n")
    if cut:
        os.truncate(path, len(whole + newline))
    try:
        return [json.loads(line) for line in whole.splitlines()]
    except ValueError as e:
        raise ParamsError(f"{path} holds a line that is no row: {e}.") from e


def _replace(path: Path, rows: list[dict[str, Any]]) -> None:
    """The file holds `rows`; whoever stops it meanwhile finds it as it was."""
    anew = path.with_suffix(".new")
    anew.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    anew.replace(path)


def _left(jobs: list[Job], rows: list[dict[str, Any]], again: bool) -> list[Job]:
    """Those of which there is no row yet, or one without AIMD or the order by deadline, which are
    then run alone; `again`: none of this law. What one of another law or with other caps says is
    not run anew."""
    current = [row for row in rows if not again or row.get("law") == _law()]
    done = {_key(row) for row in current if row.keys() >= {"aimd", "deadline"}}
    tuned = {_run_key(row): row for row in current}
    fixed = {_key(row): row for row in rows}
    return [
        replace(job, tuned=tuned.get(_run_key(_named(job))), fixed=fixed.get(_key(_named(job))))
        for job in jobs
        if _key(_named(job)) not in done
    ]


@cache
def _law() -> str:
    """Names the tuner's code."""
    folder = Path(tuner.__file__).parent
    code = b"".join(path.read_bytes() for path in sorted(folder.glob("*.py")))
    return hashlib.sha256(code).hexdigest()[:12]


def _named(job: Job) -> dict[str, Any]:
    """What a row says of its job."""
    return {
        "requests": job.requests,
        "every_s": job.every_s,
        "caps": list(job.caps),
        "cell": msgspec.to_builtins(job.cell),
        "seed": job.seed,
    }


def _run_key(row: dict[str, Any]) -> tuple[Any, ...]:
    return (*row["cell"].values(), *(row[name] for name in ("seed", "requests", "every_s")))


def _key(row: dict[str, Any]) -> tuple[Any, ...]:
    return (*_run_key(row), *row.get("caps", ()))


def _jobs(args: argparse.Namespace) -> list[Job]:
    services = _chosen(args.services, SERVICES)
    caps = _caps(args.caps)
    for service in services:
        ceiling = SERVICES[service][0].ceiling
        if caps and min(caps) > ceiling:
            raise ParamsError(f"--caps {args.caps!r}: the ceiling of {service} is {ceiling}.")
    return [
        Job(Cell(service, target, noise, trace), seed, args.requests, caps, args.every)
        for seed in range(1, args.seeds + 1)
        for target in _chosen(args.targets, TARGETS["cpu"])
        for noise in _chosen(args.noises, NOISES)
        for trace in _chosen(args.traces, TRACES)
        for service in services
    ]


def _chosen(text: str, known: Any) -> list[str]:
    names = list(known) if text == "all" else text.split(",")
    for name in names:
        if name not in known:
            raise ParamsError(f"{name!r} is none of {', '.join(known)}.")
    return names


def _caps(text: str) -> tuple[int, ...]:
    first, dots, last = text.partition("..")
    try:
        caps = range(int(first), int(last) + 1) if dots else [int(c) for c in text.split(",") if c]
    except ValueError as e:
        raise ParamsError(f"--caps {text!r} is not like 1,2,4 or 1..256.") from e
    if text and min(caps, default=0) < 1:
        raise ParamsError(f"--caps {text!r} holds no cap, or one under 1.")
    return tuple(caps)


def run_job(job: Job) -> dict[str, Any]:
    """All policies on one trace of one seed."""
    gc.disable()  # nothing here makes cycles, and looking for them is a fifth of the time
    cell = job.cell
    params, lengths = SERVICES[cell.service]
    params = msgspec.structs.replace(params, **NOISES[cell.noise])
    targets = read_targets(TARGETS[cell.service][cell.target])
    trace = make_trace(cell.trace, params, targets.itl_ms, lengths, job.requests, job.seed)
    case = Case(params, targets, trace, job.seed, job.every_s)
    tuned = job.tuned or _tuned(case)
    fixed = job.fixed or _fixed(case, job.caps, tuned["sluice"]["last_cap"])
    return {
        **_named(job),
        "law": tuned.get("law"),
        **{name: tuned[name] for name in ("sluice", "times_real")},
        "deadline": tuned.get("deadline") or _without_path(case.deadline()),
        **{name: fixed[name] for name in ("ceiling", "oracle")},
        "aimd": (job.fixed or job.tuned or {}).get("aimd") or _without_path(case.aimd()),
    }


def _tuned(case: Case) -> dict[str, Any]:
    """Ours."""
    started_s = time.process_time()
    sluice = case.sluice()
    times_real = sluice["simulated_s"] / (time.process_time() - started_s)
    return {"law": _law(), "sluice": sluice, "times_real": times_real}


def _fixed(case: Case, caps: tuple[int, ...], near: int) -> dict[str, Any]:
    """The ceiling and the best cap, which is searched around `near` where no caps are given."""
    ceiling = case.params.ceiling
    if caps:
        oracle = best_of(case.replayed, [cap for cap in caps if cap <= ceiling])
    else:
        oracle = best_near(case.replayed, near, ceiling)
    return {"ceiling": _without_path(case.replayed(ceiling)), "oracle": _without_path(oracle)}


def _without_path(result: Result) -> Result:
    return {key: value for key, value in result.items() if key != "cap_path"}


if __name__ == "__main__":
    sys.exit(main())
