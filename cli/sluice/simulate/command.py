"""*rim*: `sluice simulate`: one policy on one trace, and its result."""

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

from sluice.measure.targets import HELP, read_targets

from .params import ParamsError, read_params
from .runs import PODS, POLICIES, Result, Watch, simulate
from .trace import TraceError, read_trace
from .world import World

SAY_EVERY_SECONDS = 5.0
"""Seconds between two reports of a run's progress."""


def add_arguments(parser: argparse.ArgumentParser, policies: str = POLICIES) -> None:
    parser.add_argument(
        "--trace", type=Path, required=True, help="JSON lines of ours or Mooncake's, or a CSV"
    )
    parser.add_argument(
        "--params",
        type=Path,
        required=True,
        help="JSON: a b c d (ms), kv_tokens, cold_start_s; noise, hiccup_share, hiccup_ms; of a "
        "GPU also chunk_ms, stall_every_s, stall_ms (least, most), first_size_ms",
    )
    parser.add_argument("--policy", help=policies, default="sluice")
    parser.add_argument("--slo", help=HELP, default="ttft=1s,itl=100ms")
    parser.add_argument(
        "--pod",
        choices=[*PODS],
        default="sluice",
        help="foreign: an engine with a fixed max_num_batched_tokens, behind a gate; "
        "inner: one with our scheduler inside",
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", action="store_true", help="print JSON")


def main(args: argparse.Namespace, run: Callable[..., Result] = simulate) -> int:
    """Entry of `sluice simulate`: 0, or 2 if the input cannot be used."""
    try:
        params = read_params(args.params)
        targets = read_targets(args.slo, params.overload)
        trace, started_s = read_trace(args.trace), time.process_time()
        watch = _progress(args.policy)
        result = run(params, targets, trace, args.policy, args.seed, watch=watch, pod=args.pod)
    except argparse.ArgumentTypeError as e:
        print(f"sluice simulate: --slo: {e}", file=sys.stderr)
    except (ParamsError, TraceError) as e:
        print(f"sluice simulate: {e}", file=sys.stderr)
    else:
        cpu_s = round(time.process_time() - started_s, 3)
        _tell({"policy": args.policy, "seed": args.seed, **result, "cpu_s": cpu_s}, args.json)
        return 0
    return 2


def _progress(policy: str) -> Watch:
    """Reports the progress of a run of `policy` every few seconds; the run may try several caps."""
    started_s = told_s = time.monotonic()

    def watch(name: str, world: World) -> None:
        nonlocal told_s
        now_s, last_s = time.monotonic(), world.trace[-1].t_s
        if now_s < told_s + SAY_EVERY_SECONDS:
            return
        told_s = now_s
        whose = policy if name == policy else f"{policy}, {name}"
        told = f"{min(world.now, last_s):.0f} of {last_s:.0f} s simulated"
        print(f"{whose}: {told} after {now_s - started_s:.0f} s", file=sys.stderr, flush=True)

    return watch


def _tell(result: Result, as_json: bool) -> None:
    if as_json:
        print(json.dumps(result))
        return
    for name, value in result.items():
        print(f"{name:26} {value:.6g}" if isinstance(value, float) else f"{name:26} {value}")
