"""Sluice's inner loop inside stock vLLM, beside stock vLLM: the same requests, in turns.

    PYTHONPATH=tests .venv/bin/python -m bench.vllm_inner --repeats 3 --out build/vllm-inner.json

Both servers stay up, and one works at a time. `free` has a target that no step reaches, so that
only the cost of steering shows. `bursts` are 16 prompts at once, and 16 more after 8 seconds.
`stream` are bursts that come faster than they are served. Each ratio is of two runs of one round.
CPU-seconds are those of the whole server.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from bench.peers.checkpoint import CACHE, MODELS
from bench.peers.launch import Peers, Running
from bench.peers.peak import Peak
from bench.peers.processes import unwind_on_sigterm
from bench.peers.results import make_run
from bench.peers.rounds import Run, order
from bench.peers.traces import Request, Trace
from bench.peers.variants import VARIANTS, Launch, launch
from bench.peers.versions import versions
from engines.gate import Gate, steered
from msgspec.structs import asdict
from sluice_core.port import EngineLimits

STOCK, STEERED = "vllm", "vllm-sluice"
CAP, TOKENS = 16, 2048
FREE_MS = 60_000.0
WARM_UP = 8


@dataclass(frozen=True, slots=True)
class Setting:
    """A trace and the target that the steered server is told; None: `--target-ms`."""

    trace: Trace
    itl_ms: float | None = None


def _trace(name: str, about: str, num: int, prompts: tuple[int, int], seconds: float) -> Trace:
    return Trace(
        name,
        about,
        "88M",
        num_requests=num,
        prompt_tokens=prompts,
        output_tokens=(32, 128),
        cap=CAP,
        server_cap=CAP,
        paced=seconds == 0,
        wave_requests=CAP,
        wave_seconds=seconds,
    )


SETTINGS = {
    setting.trace.name: setting
    for setting in (
        Setting(_trace("free", "chats, the target does not bind", 64, (16, 128), 0.0), FREE_MS),
        Setting(_trace("bursts", "16 at once, 8 seconds apart", 64, (64, 768), 8.0)),
        Setting(_trace("stream", "16 at once, 2 seconds apart", 96, (64, 768), 2.0)),
    )
}


def limits(epoch: int, itl_ms: float, *, cap: int = CAP) -> EngineLimits:
    """What a gate tells."""
    return EngineLimits(epoch=epoch, cap=cap, max_num_batched_tokens=TOKENS, itl_ms=itl_ms)


def launches(trace: Trace, path: Path) -> tuple[Launch, Launch]:
    """The two servers; `path`: of the gate."""
    cpus = tuple(sorted(os.sched_getaffinity(0)))
    stock = launch(VARIANTS[STOCK], trace, cpus, all_cpus=True)
    variant = replace(stock.variant, name=STEERED, about="the same with sluice_vllm.Scheduler")
    stock = replace(stock, arguments=(*stock.arguments, "--max-num-batched-tokens", str(TOKENS)))
    return stock, steered(replace(stock, variant=variant), path)


class Comparison:
    """Both servers, and the gate of one."""

    def __init__(self, peers: Peers, peak: Peak, gate: Gate) -> None:
        self._peers, self._peak, self._gate, self._epoch = peers, peak, gate, 0
        first = next(iter(SETTINGS.values())).trace
        started = [peers.get(wanted) for wanted in launches(first, gate.path)]
        self._up = dict(zip((STOCK, STEERED), started, strict=True))
        for peer in started:
            peer.run(first, first.small(WARM_UP).requests(-1))

    def run(self, setting: Setting, repeats: int, target_ms: float) -> list[Run]:
        """All rounds of a setting, each beginning with the other server."""
        self._epoch += 1
        self._gate.configure(limits(self._epoch, setting.itl_ms or target_ms))
        runs: list[Run] = []
        for repeat in range(repeats):
            for name in order([STOCK, STEERED], repeat):
                runs.append(self._one(setting.trace, name, repeat))
                print(f"  {setting.trace.name:7} {_line(runs[-1])}", flush=True)
        return runs

    def _one(self, trace: Trace, name: str, repeat: int) -> Run:
        peer, requests = self._up[name], trace.requests(repeat)
        before, own = self._peak.measure(), peer.cpu()
        others = [other for other in self._up.values() if other is not peer]
        idle_s = _total(others)
        seen = peer.run(trace, requests)
        used, idle_s = peer.cpu().since(own), _total(others) - idle_s
        after = self._peak.measure()
        work = (sum(len(request.prompt) for request in requests), _flops(trace, requests))
        return make_run(name, repeat, seen, (used, idle_s), (before, after), work)


def _total(peers: Sequence[Running]) -> float:
    return sum(peer.cpu().total_s for peer in peers)


def _flops(trace: Trace, requests: Sequence[Request]) -> float:
    llama = MODELS[trace.model]
    return sum(llama.flops(len(request.prompt), request.output_tokens) for request in requests)


def _line(run: Run) -> str:
    return (
        f"{run.repeat + 1} {run.peer:12} {run.output_tokens / run.wall_s:7.1f} tokens/s, "
        f"{run.cpu_s:6.2f} CPU-s, between P50 {run.itl_p50_ms:.0f} P99 {run.itl_p99_ms:.0f} ms, "
        f"first P50 {run.ttft_p50_ms:.0f} P99 {run.ttft_p99_ms:.0f} ms, "
        f"peak {run.peak_before:.0f}/{run.peak_after:.0f}, others {run.others_cpu_s} CPU-s"
    )


def ratios(runs: Sequence[Run]) -> dict[str, list[float]]:
    """Steered over stock, a value a round."""
    rounds: dict[int, dict[str, Run]] = {}
    for run in runs:
        rounds.setdefault(run.repeat, {})[run.peer] = run
    pairs = [(both[STEERED], both[STOCK]) for both in rounds.values()]
    return {
        "tokens_per_s": [round(stock.wall_s / ours.wall_s, 3) for ours, stock in pairs],
        "cpu_s": [round(ours.cpu_s / stock.cpu_s, 3) for ours, stock in pairs],
        "between_p99": [_ratio(ours.itl_p99_ms, stock.itl_p99_ms) for ours, stock in pairs],
        "first_p50": [_ratio(ours.ttft_p50_ms, stock.ttft_p50_ms) for ours, stock in pairs],
        "first_p99": [_ratio(ours.ttft_p99_ms, stock.ttft_p99_ms) for ours, stock in pairs],
    }


def _ratio(ours: float | None, stock: float | None) -> float:
    return round(ours / stock, 3) if ours and stock else float("nan")


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.vllm_inner",
        description=__doc__,
        formatter_class=argparse.RawTextHelpFormatter,
    )
    parser.add_argument("--only", default=",".join(SETTINGS), help="settings, by commas")
    parser.add_argument("--repeats", type=int, default=3, help="rounds")
    parser.add_argument("--target-ms", type=float, default=44.0, help="between tokens")
    parser.add_argument("--cache", type=Path, default=CACHE, help="where peers are installed")
    parser.add_argument("--out", type=Path, help="a JSON file")
    return parser.parse_args(argv)


def main(argv: Sequence[str]) -> int:
    """Entry of `python -m bench.vllm_inner`."""
    given = parse(argv)
    unwind_on_sigterm()
    told: dict[str, dict[str, object]] = {}
    with (
        tempfile.TemporaryDirectory() as directory,
        Peers(given.cache, given.cache / "logs") as peers,
    ):
        gate = Gate(Path(directory) / "gate.sock", limits(0, FREE_MS))
        both = Comparison(peers, Peak(given.cache), gate)
        for name in given.only.split(","):
            print(f"{name}: {SETTINGS[name].trace.about}", flush=True)
            runs = both.run(SETTINGS[name], given.repeats, given.target_ms)
            told[name] = {"runs": [asdict(run) for run in runs], "ratios": ratios(runs)}
            model = next((r.step_model for r in reversed(gate.reports) if r.step_model), None)
            told[name]["step_model"] = model and asdict(model)
            for what, values in ratios(runs).items():
                middle = statistics.median(values)
                print(f"  {what:13} x {middle:.3f} ({min(values):.3f} to {max(values):.3f})")
    if given.out:
        date, made_of = time.strftime("%Y-%m-%d"), versions([VARIANTS[STOCK]])
        given.out.parent.mkdir(parents=True, exist_ok=True)
        given.out.write_text(json.dumps({"date": date, "versions": made_of, **told}, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
