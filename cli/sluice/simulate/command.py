"""*rim*: `sluice simulate`: one run, a trace to be written, or the whole comparison."""

import argparse
import json
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sluice.numbers import count, positive
from sluice.targets import HELP, read_targets

from . import compare, generate
from .params import ParamsError, read_params
from .runs import POLICIES, simulate
from .trace import TraceError, read_trace, write_trace
from .world import World

DEFAULTS: dict[str, Any] = {
    "policy": "sluice",
    "params": None,
    "slo": "ttft=1s,itl=100ms",
    "seed": 1,
    "json": False,
    "out": None,
    "requests": 4000,
    "prompt_tokens": 512.0,
    "output_tokens": 128.0,
    **compare.DEFAULTS,
}
MODES = {
    "trace": {"policy", "params", "slo", "seed", "json"},
    "make": {"params", "slo", "seed", "out", "requests", "prompt_tokens", "output_tokens"},
    "compare": {"out", "requests", *compare.DEFAULTS},
}
"""Which flags say something with each of the three."""
SAY_EVERY_SECONDS = 5.0
"""How often a run tells how far it is."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `sluice simulate`."""
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--trace", type=Path, help="JSON lines of ours or Mooncake's, or a CSV")
    what.add_argument("--make", choices=list(generate.TRACES), help="write such a trace to --out")
    what.add_argument(
        "--compare", action="store_true", help="ours and fixed caps on many traces, to --out"
    )
    one = parser.add_argument_group("with --trace")
    one.add_argument("--policy", help=f"{POLICIES}; default: {DEFAULTS['policy']}")
    one.add_argument("--json", action="store_true", default=None, help="print JSON")
    parser.add_argument("--params", type=Path, help="JSON: a b c d (ms), kv_tokens, cold_start_s")
    parser.add_argument("--slo", help=f"{HELP}; default: {DEFAULTS['slo']}")
    parser.add_argument("--seed", type=int, help="not with --compare, which takes --seeds")
    parser.add_argument("--out", type=Path, help="a trace's file, or the comparison's folder")
    parser.add_argument(
        "--requests", type=count, help=f"of a trace that is made; default: {DEFAULTS['requests']}"
    )
    made = parser.add_argument_group("with --make")
    made.add_argument(
        "--prompt-tokens", type=_mean, help=f"their mean; default: {DEFAULTS['prompt_tokens']:g}"
    )
    made.add_argument(
        "--output-tokens", type=_mean, help=f"their mean; default: {DEFAULTS['output_tokens']:g}"
    )
    compare.add_arguments(parser)


def _mean(text: str) -> float:
    """Of lengths in tokens."""
    if 1 <= (number := positive(text)) <= generate.MAX_TOKENS:
        return number
    raise argparse.ArgumentTypeError(f"{text!r} is not a number from 1 to {generate.MAX_TOKENS}")


def main(args: argparse.Namespace) -> int:
    """Entry of `sluice simulate`: 0, or 2 if what was given cannot be used."""
    try:
        args = _of_mode(args)
        if args.compare:
            return compare.main(args)
        if args.params is None:
            raise ParamsError("--params is needed.")
        return _make(args) if args.make else _simulate(args)
    except argparse.ArgumentTypeError as e:
        print(f"sluice simulate: --slo: {e}", file=sys.stderr)
    except BrokenPipeError:
        raise
    except (ParamsError, TraceError, OSError) as e:
        print(f"sluice simulate: {e}", file=sys.stderr)
    return 2


def _of_mode(args: argparse.Namespace) -> argparse.Namespace:
    """The flags with their defaults; refuses one that says nothing in this mode."""
    mode = next(mode for mode in MODES if getattr(args, mode))
    for name, value in vars(args).items():
        if value is not None and name in DEFAULTS and name not in MODES[mode]:
            raise ParamsError(f"--{name.replace('_', '-')} says nothing with --{mode}.")
    given = {name: value for name, value in vars(args).items() if value is not None}
    return argparse.Namespace(**{**DEFAULTS, **dict.fromkeys(MODES), **given})


def _make(args: argparse.Namespace) -> int:
    if args.out is None:
        raise ParamsError("--make needs --out FILE.")
    params, targets = read_params(args.params), read_targets(args.slo)
    lengths = generate.Lengths(args.prompt_tokens, args.output_tokens)
    write_trace(
        generate.make_trace(args.make, params, targets.itl_ms, lengths, args.requests, args.seed),
        args.out,
    )
    return 0


@dataclass
class Progress:
    """Tells every few seconds how far a run of `policy` is, which may try several caps."""

    policy: str
    started_s: float = field(default_factory=time.monotonic)
    num_told: int = 0

    def watch(self, name: str, world: World) -> None:
        """`name`: whose world it is."""
        seconds = time.monotonic() - self.started_s
        if seconds < SAY_EVERY_SECONDS * (self.num_told + 1):
            return
        self.num_told = int(seconds / SAY_EVERY_SECONDS)
        whose = self.policy if name == self.policy else f"{self.policy}, {name}"
        last_s = world.trace[-1].t_s
        told = f"{min(world.now, last_s):.0f} of {last_s:.0f} s simulated"
        print(f"{whose}: {told} after {seconds:.0f} s", file=sys.stderr, flush=True)


def _simulate(args: argparse.Namespace) -> int:
    params = read_params(args.params)
    targets = read_targets(args.slo, params.overload)
    trace, watch = read_trace(args.trace), Progress(args.policy).watch
    started_s = time.process_time()
    result = simulate(params, targets, trace, args.policy, args.seed, watch=watch)
    result = {"policy": args.policy, "seed": args.seed, **result}
    result["cpu_s"] = round(time.process_time() - started_s, 3)
    if args.json:
        print(json.dumps(result))
    else:
        for name, value in result.items():
            print(f"{name:26} {value:.6g}" if isinstance(value, float) else f"{name:26} {value}")
    return 0
