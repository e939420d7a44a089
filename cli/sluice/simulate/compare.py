"""*rim*: ours, and by deadline, against every fixed cap, cap = max, AIMD and the oracle."""

import argparse
import gc
import hashlib
import json
import multiprocessing
import os
import signal
import sys
import time
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
from sluice_core.contract import TICK_SECONDS
from sluice_operator import tuner

from sluice.machine import NEEDS_MATPLOTLIB, can_draw
from sluice.numbers import count, positive
from sluice.targets import read_targets

from .generate import TRACES, Lengths, make_trace
from .params import Params, ParamsError
from .runs import Case, Result, best_near, best_of
from .summary import newest, reach, summarise, table

GPU = Params(a=12, b=0.06, c=9e-5, d=0.07, kv_tokens=160_000, cold_start_s=60)
"""As an A100-class GPU with an 8B model in bf16: 2,048 tokens of prefill take 150 ms."""
CPU = Params(a=21, b=5.3, c=0.002, d=0.8, kv_tokens=40_000, cold_start_s=20, block_size=64)
"""As one core with an 88M model: 512 tokens of prefill take 400 ms, 8 decodes 63 ms."""
SERVICES = {"gpu": (GPU, Lengths(512, 128)), "cpu": (CPU, Lengths(128, 48))}
TARGETS = {
    "gpu": {
        "tight": "ttft=500ms,itl=25ms",
        "default": "ttft=1s,itl=50ms",
        "loose": "ttft=3s,itl=150ms",
        "patient": "ttft=30s,itl=25ms",
    },
    "cpu": {
        "tight": "ttft=1s,itl=60ms",
        "default": "ttft=2s,itl=100ms",
        "loose": "ttft=5s,itl=300ms",
        "patient": "ttft=30s,itl=60ms",
    },
}
NOISES: dict[str, dict[str, float]] = {
    "independent": {},
    "spells": {"spell_every_s": 120.0, "spell_mean_s": 5.0, "spell_factor": 3.0},
}


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


DEFAULTS: dict[str, Any] = {
    "traces": "steady-80,steps,bursts,length-shift",
    "services": "gpu,cpu",
    "targets": "default",
    "noises": "independent",
    "seeds": 3,
    "caps": "",
    "every": TICK_SECONDS,
    "jobs": 1,
    "again": False,
}
"""Of the flags that only the comparison takes."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of the comparison."""
    group = parser.add_argument_group("with --compare")
    texts = {
        "traces": "or: all",
        "services": "of gpu, cpu",
        "targets": "of tight, default, loose, patient, or: all",
        "noises": "of independent, spells, or: all",
        "caps": "1,2,4 or 1..256; without: searched, see best_near",
    }
    for name, text in texts.items():
        group.add_argument(f"--{name}", help=f"{text}; default: {DEFAULTS[name] or 'none'}")
    group.add_argument("--seeds", type=count, help=f"default: {DEFAULTS['seeds']}")
    group.add_argument(
        "--every", type=positive, help=f"seconds between decisions; default: {TICK_SECONDS:g}"
    )
    group.add_argument("--jobs", type=count, help="processes; default: 1")
    group.add_argument(
        "--again",
        action="store_true",
        default=None,
        help="run ours anew where a row is of another tuner's code",
    )


def main(args: argparse.Namespace) -> int:
    """Run all cells that rows.jsonl in --out does not hold yet; write comparison.json and .png."""
    out = args.out
    if out is None:
        raise ParamsError("--compare needs --out FOLDER.")
    if not can_draw():
        raise ParamsError(f"{NEEDS_MATPLOTLIB}.")
    out.mkdir(parents=True, exist_ok=True)
    path = out / "rows.jsonl"
    rows = _whole_rows(path)
    jobs = _left(_jobs(args), rows, args.again)
    started_s = time.monotonic()
    ignored = signal.signal, (signal.SIGINT, signal.SIG_IGN)  # a Ctrl-C is for this process
    spawned = multiprocessing.get_context("spawn").Pool(args.jobs, *ignored)
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
    from .picture import comparison_png  # matplotlib comes with the `demo` extra

    comparison_png(rows, out / "comparison.png")
    print(table(summary), reach(summary), sep="\n\n")
    return 0


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
