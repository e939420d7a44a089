"""*rim*: `sluice simulate`: one run, a trace to be written, or the whole comparison."""

import argparse
import json
import sys
import time
from pathlib import Path

from sluice.targets import read_targets

from . import compare, generate
from .params import ParamsError, read_params
from .runs import POLICIES, simulate
from .trace import TraceError, read_trace, write_trace


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `sluice simulate`."""
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--trace", type=Path, help="JSON lines of ours or Mooncake's, or a CSV")
    what.add_argument("--make", choices=list(generate.TRACES), help="write such a trace to --out")
    what.add_argument(
        "--compare", action="store_true", help="ours and fixed caps on many traces, to --out"
    )
    parser.add_argument("--policy", default="sluice", help=POLICIES)
    parser.add_argument("--params", type=Path, help="JSON: a b c d (ms), kv_tokens, cold_start_s")
    parser.add_argument("--slo", default="ttft=1s,itl=100ms", help="ttft=1s,itl=100ms,e2e=30s")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--out", type=Path, help="a trace's file, or the comparison's folder")
    parser.add_argument("--requests", type=int, default=4000, help="of a trace that is made")
    parser.add_argument("--prompt-tokens", type=float, default=512, help="their mean, with --make")
    parser.add_argument("--output-tokens", type=float, default=128, help="their mean, with --make")
    compare.add_arguments(parser)


def main(args: argparse.Namespace) -> int:
    """Entry of `sluice simulate`: 0, or 2 if what was given cannot be used."""
    try:
        if args.compare:
            return compare.main(args)
        if args.params is None:
            raise ParamsError("--params is needed.")
        return _make(args) if args.make else _simulate(args)
    except argparse.ArgumentTypeError as e:
        print(f"sluice simulate: --slo: {e}", file=sys.stderr)
    except (ParamsError, TraceError) as e:
        print(f"sluice simulate: {e}", file=sys.stderr)
    return 2


def _make(args: argparse.Namespace) -> int:
    if args.out is None or args.requests < 1:
        raise ParamsError("--make needs --out FILE and at least one of --requests.")
    params, targets = read_params(args.params), read_targets(args.slo)
    lengths = generate.Lengths(args.prompt_tokens, args.output_tokens)
    write_trace(
        generate.make_trace(args.make, params, targets.itl_ms, lengths, args.requests, args.seed),
        args.out,
    )
    return 0


def _simulate(args: argparse.Namespace) -> int:
    params = read_params(args.params)
    targets = read_targets(args.slo, params.overload)
    trace = read_trace(args.trace)
    started_s = time.process_time()
    result = simulate(params, targets, trace, args.policy, args.seed)
    result = {"policy": args.policy, "seed": args.seed, **result}
    result["cpu_s"] = round(time.process_time() - started_s, 3)
    if args.json:
        print(json.dumps(result))
    else:
        for name, value in result.items():
            print(f"{name:26} {value:.6g}" if isinstance(value, float) else f"{name:26} {value}")
    return 0
