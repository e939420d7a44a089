"""`make bench`: Sluice and its peers on the same checkpoint and requests, in turns, in one run.

    make bench                                         # everything; hours on two processors
    make bench ARGS="--only offline --peers sluice,vllm"
    PYTHONPATH=tests .venv/bin/python -m bench.peers --requests 4 --repeats 1    # a trial

It installs the peers below --cache (once), makes the checkpoints, and runs the traces one after
another; in a round all peers run one after another, each round beginning with another. A run counts
if the register peak was near its maximum before and after it. After each round the trace's file in
docs/benchmarks is written, and at the end of each trace its plot and docs/benchmarks.md. With
--resume, rounds that are there stay, and only missing ones are run. Traces run in the order given;
what a later one needs stays up, so that those with the same peers belong side by side: all peers at
once take over 20 GB. Exit status: 0 if every peer that could be started has its runs.
"""

import argparse
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec
from bench.peers import report
from bench.peers.checkpoint import CACHE, MODELS
from bench.peers.client import RunFailed
from bench.peers.install import CannotInstall
from bench.peers.launch import CannotStart, Peers, Running
from bench.peers.peak import NoProbe, Peak
from bench.peers.processes import unwind_on_sigterm
from bench.peers.results import CpuTime, Machine, TraceResult, failed_run, make_run
from bench.peers.rounds import Run, counted, needs_more, order
from bench.peers.traces import TRACES, Request, Trace
from bench.peers.variants import TAKING_PART, TARGET_MS, VARIANTS, Launch, launch
from bench.peers.versions import versions
from sluice.machine import processor
from sluice_operator.tuner import Targets

MAX_ERRORS = 2
WARM_UP_REQUESTS = 4


class Bench:
    """One invocation: the machine's probe, the peers, what was asked."""

    def __init__(self, given: argparse.Namespace, peers: Peers, peak: Peak) -> None:
        self._given, self._peers, self._peak = given, peers, peak
        cpus = tuple(sorted(os.sched_getaffinity(0)))
        self._cpus = cpus[: given.threads] if given.threads else cpus
        self._all_cpus = self._cpus == cpus

    def launches(self, trace: Trace) -> list[Launch]:
        """What a trace needs running."""
        names = [
            n for n in TAKING_PART[trace.name] if not self._given.peers or n in self._given.peers
        ]
        wanted = {"all_cpus": self._all_cpus, "target_ms": self._given.target_ms}
        return [launch(VARIANTS[name], trace, self._cpus, **wanted) for name in names]

    def trace(self, trace: Trace, later: Sequence[Launch]) -> TraceResult:
        """All rounds of one trace; `later`: what must stay up for the traces behind it."""
        print(f"{trace.name}: {trace.about}", flush=True)
        asked = self.launches(trace)
        self._peers.keep([*asked, *later])
        result = self._kept(trace, asked)
        up: dict[str, Running] = {}
        for wanted in asked:
            name, fresh = wanted.variant.name, wanted not in self._peers.running
            try:
                up[name] = self._start(wanted, trace) if fresh else self._peers.get(wanted)
            except (CannotInstall, CannotStart, RunFailed) as error:
                print(f"  {name} is left out: {error}", flush=True)
                result.left_out[name] = str(error)
            else:
                if fresh:
                    result.starts_s[name] = round(up[name].start_s, 2)
        self._rounds(trace, up, result)
        return self._written(result)

    def _start(self, wanted: Launch, trace: Trace) -> Running:
        """A peer that has answered a few requests."""
        peer = self._peers.get(wanted)
        warm = trace.small(max(WARM_UP_REQUESTS, trace.cap if wanted.variant.is_static else 0))
        peer.run(warm, warm.requests(-1))
        return peer

    def _rounds(self, trace: Trace, up: dict[str, Running], result: TraceResult) -> None:
        """Rounds until each peer has enough counted runs, or twice as many were tried."""
        repeats = self._given.repeats
        first = max((run.repeat for run in result.runs), default=-1) + 1
        for repeat in range(first, 2 * repeats):
            left = [name for name in up if _errors(result.runs, name) < MAX_ERRORS]
            if not needs_more(result.runs, left, self._peak.best_gflops, repeats):
                break
            self._round(trace, {name: up[name] for name in order(left, repeat)}, repeat, result)
            self._written(result)
        for name in up:
            if _errors(result.runs, name) >= MAX_ERRORS:
                last = next(run for run in reversed(result.runs) if run.peer == name and run.error)
                result.left_out[name] = last.error

    def _round(
        self, trace: Trace, up: dict[str, Running], repeat: int, result: TraceResult
    ) -> None:
        """Each peer once, between two probes."""
        requests = trace.requests(repeat)
        before = self._peak.measure()
        for name, peer in up.items():
            try:
                run = self._run(trace, requests, (name, repeat, before), peer)
            except (RunFailed, CannotStart) as error:
                run = failed_run(name, repeat, str(error))
            before = run.peak_after or self._peak.measure()
            result.runs.append(run)
            counts = run.counts(self._peak.best_gflops)
            print(
                f"  round {repeat + 1} {_line(run)}{'' if counts else '  (not counted)'}",
                flush=True,
            )

    def _run(
        self,
        trace: Trace,
        requests: Sequence[Request],
        at: tuple[str, int, float],
        peer: Running,
    ) -> Run:
        others = [other for other in self._peers.running.values() if other is not peer]
        own, idle_s = peer.cpu(), sum(other.cpu().total_s for other in others)
        seen = peer.run(trace, requests)
        used: CpuTime = peer.cpu().since(own)
        idle_s = sum(other.cpu().total_s for other in others) - idle_s
        after = self._peak.measure()
        prompt_tokens = sum(len(request.prompt) for request in requests)
        llama = MODELS[trace.model]
        flops = sum(llama.flops(len(r.prompt), r.output_tokens) for r in requests)
        name, repeat, before = at
        idle, peaks, work = (used, idle_s), (before, after), (prompt_tokens, flops)
        due = Targets("99", trace.ttft_ms, self._given.target_ms, None) if trace.ttft_ms else None
        return make_run(name, repeat, seen, idle, peaks, work, due)

    def _kept(self, trace: Trace, asked: Sequence[Launch]) -> TraceResult:
        """The trace's file so far with --resume, if it was made of the same; else an empty one."""
        requests = trace.requests(0)
        fresh = TraceResult(
            trace=trace.name,
            about=trace.about,
            model=trace.model,
            date=time.strftime("%Y-%m-%d"),
            command=self._given.command,
            machine=self._machine(),
            num_requests=len(requests),
            prompt_tokens=sum(len(request.prompt) for request in requests),
            output_tokens=sum(request.output_tokens for request in requests),
            peers={wanted.variant.name: wanted.variant.about for wanted in asked},
            versions=versions([wanted.variant for wanted in asked]),
            starts_s={},
            left_out={},
            runs=[],
        )
        path = self._given.out / f"{trace.name}.json"
        if not self._given.resume or not path.exists():
            return fresh
        there = msgspec.json.decode(path.read_bytes(), type=TraceResult)
        same = ("num_requests", "prompt_tokens", "peers", "versions")
        if any(getattr(there, name) != getattr(fresh, name) for name in same):
            print("  what is there was made of something else: all rounds anew", flush=True)
            return fresh
        return msgspec.structs.replace(fresh, runs=there.runs, starts_s=there.starts_s)

    def _machine(self) -> Machine:
        return Machine(
            cpu=processor(),
            num_cpus=len(self._cpus),
            probe=self._peak.kind,
            best_gflops=self._peak.best_gflops,
        )

    def _written(self, result: TraceResult) -> TraceResult:
        """The trace's file, with the best peak known by now."""
        result = msgspec.structs.replace(result, machine=self._machine())
        self._given.out.mkdir(parents=True, exist_ok=True)
        path = self._given.out / f"{result.trace}.json"
        half = path.with_suffix(".half")
        half.write_bytes(msgspec.json.format(msgspec.json.encode(result), indent=1) + b"\n")
        half.replace(path)
        return result


def _errors(runs: Sequence[Run], name: str) -> int:
    return sum(1 for run in runs if run.peer == name and run.error)


def _line(run: Run) -> str:
    if run.error:
        return f"{run.peer}: {run.error}"
    told = f"{run.peer:24} {run.wall_s:8.2f} s, {run.output_tokens / run.wall_s:7.1f} tokens/s, "
    told += f"{run.cpu_s:7.2f} CPU-s ({run.cpu_s - run.engine_cpu_s:.2f} outside the engine), "
    if run.itl_p99_ms is not None and run.ttft_p99_ms is not None:
        told += f"P99 first {run.ttft_p99_ms:.0f} ms, between {run.itl_p99_ms:.0f} ms, "
    if run.good_share is not None and run.smooth_share is not None:
        told += f"{100 * run.good_share:.0f} % good, {100 * run.smooth_share:.0f} % smooth, "
    return (
        told + f"peak {run.peak_before:.0f}/{run.peak_after:.0f}, others {run.others_cpu_s} CPU-s"
    )


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """The command line; unknown names are refused."""
    parser = argparse.ArgumentParser(
        prog="make bench", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--only", help=f"traces, by commas, of {', '.join(TRACES)}")
    parser.add_argument("--peers", help=f"peers, by commas, of {', '.join(VARIANTS)}")
    parser.add_argument("--repeats", type=int, default=3, help="counted runs of each peer")
    parser.add_argument("--requests", type=int, help="at most so many of each trace: a trial")
    parser.add_argument("--threads", type=int, help="compute threads of each; default: all")
    parser.add_argument("--target-ms", type=int, default=TARGET_MS, help="between tokens, in waves")
    parser.add_argument("--resume", action="store_true", help="keep the rounds that are there")
    parser.add_argument("--report", action="store_true", help="only write plots and tables anew")
    parser.add_argument("--install", action="store_true", help="only install the peers")
    parser.add_argument("--cache", type=Path, default=CACHE, help="where peers are installed")
    parser.add_argument("--out", type=Path, help="default: docs/benchmarks; of trials build/")
    given = parser.parse_args(argv)
    given.command = _command(argv)
    for option, known in (("only", TRACES), ("peers", VARIANTS)):
        names = (getattr(given, option) or "").split(",")
        if unknown := [name for name in names if name and name not in known]:
            parser.error(f"--{option}: {', '.join(unknown)} is none of {', '.join(known)}")
        setattr(given, option, [name for name in names if name])
    if given.repeats < 1:
        parser.error("--repeats must be at least 1")
    default = report.ROOT / ("build" if given.requests else "docs") / "benchmarks"
    given.out = (given.out or default).resolve()
    return given


def _command(argv: Sequence[str]) -> str:
    """The command as it is told beside figures: without directories."""
    told = [
        word
        for before, word in zip(("", *argv), argv, strict=False)
        if not {before, word.partition("=")[0]} & {"--out", "--cache"}
    ]
    return f'make bench ARGS="{" ".join(told)}"' if told else "make bench"


def _install_all(peers: Peers) -> int:
    status = 0
    for name in dict.fromkeys(variant.site for variant in VARIANTS.values() if variant.site):
        try:
            peers.site(name)
        except CannotInstall as error:
            print(f"  {name} cannot be installed: {error}", flush=True)
            status = 1
    return status


def main(argv: Sequence[str]) -> int:
    """Entry of `make bench`."""
    given = parse(argv)
    if given.report:
        report.write(given.out)
        return 0
    unwind_on_sigterm()
    with Peers(given.cache, given.cache / "logs") as peers:
        if given.install:
            return _install_all(peers)
        try:
            peak = Peak(given.cache)
            peak.measure()
        except NoProbe as error:
            print(error, file=sys.stderr)
            return 2
        bench = Bench(given, peers, peak)
        names = given.only or list(TRACES)
        traces = [TRACES[name].small(given.requests or sys.maxsize) for name in names]
        done = []
        for at, trace in enumerate(traces):
            later = [wanted for next_one in traces[at + 1 :] for wanted in bench.launches(next_one)]
            done.append(bench.trace(trace, later))
            report.write(given.out)
    short = [
        f"{result.trace}/{name}"
        for result in done
        for name in result.starts_s
        if not counted(result.runs, name, result.machine.best_gflops)
    ]
    print(f"no run counted: {', '.join(short)}" if short else "every peer has runs that count")
    return 1 if short else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
