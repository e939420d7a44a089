"""Traces made to measure: a share of what one pod can do, in the shapes that traffic takes.

PYTHONPATH=tests .venv/bin/python -m research.generate --make steps --params P.json --out F
"""

import argparse
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import exp, inf, log, pi, sin
from pathlib import Path
from random import Random
from typing import Any

from sluice.measure.targets import HELP, read_targets
from sluice.numbers import count, positive
from sluice.simulate.params import Params, ParamsError, read_params
from sluice.simulate.trace import Request
from sluice_core.latency import MIN_CHUNK_TOKENS

BURST = 200
SILENCE_S = 30.0
OVERLOAD_S = 600.0
LONGER = 8
MAX_TOKENS = 16_384
PREFIXES = 8


@dataclass(frozen=True, slots=True)
class Lengths:
    """Mean lengths of prompts and outputs; single ones are log-normal with `sigma`."""

    prompt: float
    output: float
    sigma: float = 0.5

    def draw(self, random: Random, scale: float = 1.0) -> tuple[int, int]:
        """A prompt's and an output's length."""
        return _near(random, scale * self.prompt, self.sigma), _near(
            random, scale * self.output, self.sigma
        )


def _near(random: Random, mean: float, sigma: float) -> int:
    length = exp(random.gauss(log(mean) - sigma**2 / 2, sigma))
    return min(max(1, round(length)), MAX_TOKENS)


@dataclass(frozen=True, slots=True)
class Recipe:
    """A trace to be made: `num` requests; `per_s`: what one pod can do with these lengths."""

    num: int
    per_s: float
    lengths: Lengths
    random: Random


Curve = Callable[[float], float]
"""Of how much of the trace is over."""
Make = Callable[[Recipe], Iterator[Request]]


def make_trace(
    name: str, params: Params, itl_ms: float | None, lengths: Lengths, num: int, seed: int
) -> list[Request]:
    """The trace `name` of `TRACES` with about `num` requests. Raises KeyError for another name."""
    per_s = capacity_per_s(params, itl_ms, lengths)
    make = TRACES[name]
    return list(make(Recipe(num, per_s, lengths, Random(seed))))


def capacity_per_s(params: Params, itl_ms: float | None, lengths: Lengths) -> float:
    """Requests per second of one pod at the largest batch whose mean step takes 0.85 of `itl_ms`,
    with its share of all prefills in it and at least the least chunk."""
    prompt, output = lengths.prompt, lengths.output
    context = prompt + output / 2
    decode_ms, prefill_ms = params.b + params.c * context, params.d * prompt / output
    room = (0.85 * itl_ms if itl_ms else inf) - params.a
    fits = min(
        room / max(decode_ms + prefill_ms, 1e-9),
        (room - params.d * MIN_CHUNK_TOKENS) / max(decode_ms, 1e-9),
        params.kv_tokens / context,
        params.ceiling,
    )
    batch = max(1.0, fits)
    return 1000 * batch / (output * (params.a + (decode_ms + prefill_ms) * batch))


def _arrivals(recipe: Recipe, share: Curve) -> Iterator[tuple[float, float]]:
    """(time, how much of the trace is over) of Poisson arrivals; `share` of the capacity."""
    now_s = 0.0
    for index in range(recipe.num):
        done = index / recipe.num
        now_s += recipe.random.expovariate(max(share(done), 0.01) * recipe.per_s)
        yield now_s, done


def _plain(recipe: Recipe, share: Curve, scale: Curve = lambda _: 1.0) -> Iterator[Request]:
    """`scale`: of the lengths."""
    for now_s, done in _arrivals(recipe, share):
        yield Request(now_s, *recipe.lengths.draw(recipe.random, scale(done)))


def _steady(share: float, scale: Curve = lambda _: 1.0) -> Make:
    return lambda recipe: _plain(recipe, lambda _: share, scale)


def _steps(recipe: Recipe) -> Iterator[Request]:
    """Fifths of the requests at 30, 90, 50, 115 and 40 %: one of them is more than a pod can do."""
    levels = (0.3, 0.9, 0.5, 1.15, 0.4)
    return _plain(recipe, lambda done: levels[int(done * len(levels))])


def _diurnal(recipe: Recipe) -> Iterator[Request]:
    """Two days between 15 and 95 %, each as long as the requests last."""
    return _plain(recipe, lambda done: 0.55 - 0.4 * sin(4 * pi * done + pi / 2))


def _bursts(recipe: Recipe) -> Iterator[Request]:
    """`BURST` requests at once, then `SILENCE_S` of nothing; fewer where a pod would not do 80 %
    of them by then."""
    size = max(1, min(BURST, int(0.8 * recipe.per_s * SILENCE_S)))
    for index in range(recipe.num):
        yield Request(1.0 + SILENCE_S * (index // size), *recipe.lengths.draw(recipe.random))


def _overload(recipe: Recipe) -> Iterator[Request]:
    """Half as many more as a pod can do for ten minutes, then half for twenty, over and over."""
    over, under = 1.5 * OVERLOAD_S * recipe.per_s, 0.5 * 2 * OVERLOAD_S * recipe.per_s
    return _plain(recipe, lambda done: 1.5 if done * recipe.num % (over + under) < over else 0.5)


def _bimodal(recipe: Recipe) -> Iterator[Request]:
    """One prompt in ten is `LONGER` times as long as the others; together they have the mean."""
    short = 1 / (0.9 + 0.1 * LONGER)
    for now_s, _ in _arrivals(recipe, lambda _: 0.9):
        prompt, output = recipe.lengths.draw(recipe.random)
        scale = short * (LONGER if recipe.random.random() < 0.1 else 1)
        yield Request(now_s, max(1, round(scale * prompt)), output)


def _heavy_tail(recipe: Recipe) -> Iterator[Request]:
    """Log-normal lengths with a sigma of 1.2: one in a hundred is eight times the mean."""
    heavy = replace(recipe.lengths, sigma=1.2)
    return _plain(replace(recipe, lengths=heavy), lambda _: 0.7)


def _prefix_drop(recipe: Recipe) -> Iterator[Request]:
    """Three quarters of the mean prompt are one of `PREFIXES` system prompts; from half on none."""
    shared = max(1, int(0.75 * recipe.lengths.prompt))
    for now_s, done in _arrivals(recipe, lambda _: 0.8):
        prompt, output = recipe.lengths.draw(recipe.random)
        name = f"system-{recipe.random.randrange(PREFIXES)}"
        if done < 0.5 and prompt > shared:
            yield Request(now_s, prompt, output, (name,), shared)
        else:
            yield Request(now_s, prompt, output)


TRACES: dict[str, Make] = {
    "steady-50": _steady(0.5),
    "steady-80": _steady(0.8),
    "steady-95": _steady(0.95),
    "steps": _steps,
    "diurnal": _diurnal,
    "bursts": _bursts,
    "overload": _overload,
    "bimodal": _bimodal,
    "heavy-tail": _heavy_tail,
    "length-shift": _steady(0.42, lambda done: 2.0 if done >= 0.5 else 1.0),
    "prefix-drop": _prefix_drop,
    "slow-leak": _steady(0.45, lambda done: 1.0 + done),
}


def write_trace(requests: Iterable[Request], path: Path) -> None:
    """Write `requests`, whose prefixes have one name at most, as our JSON lines."""
    with path.open("w", encoding="utf-8") as file:
        for request in requests:
            line: dict[str, Any] = {
                "t_s": round(request.t_s, 6),
                "prompt_tokens": request.prompt_tokens,
                "max_tokens": request.max_tokens,
                "prefix_id": request.prefix[0] if request.prefix else None,
            }
            if request.prefix and request.prefix_tokens < request.prompt_tokens:
                line["prefix_tokens"] = request.prefix_tokens
            file.write(json.dumps(line) + "\n")


def mean_length(text: str) -> float:
    """Of lengths in tokens: argparse's `type=`."""
    if 1 <= (number := positive(text)) <= MAX_TOKENS:
        return number
    raise argparse.ArgumentTypeError(f"{text!r} is not a number from 1 to {MAX_TOKENS}")


def main(argv: Sequence[str] | None = None) -> int:
    """0, or 2 if what was given cannot be used."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--make", choices=list(TRACES), required=True)
    parser.add_argument("--out", type=Path, required=True, help="the trace's file")
    parser.add_argument("--params", type=Path, required=True, help="as `sluice simulate` has them")
    parser.add_argument("--slo", type=read_targets, help=HELP, default="ttft=1s,itl=100ms")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--requests", type=count, default=4000)
    parser.add_argument("--prompt-tokens", type=mean_length, default=512.0, help="their mean")
    parser.add_argument("--output-tokens", type=mean_length, default=128.0, help="their mean")
    args = parser.parse_args(argv)
    lengths = Lengths(args.prompt_tokens, args.output_tokens)
    try:
        params = read_params(args.params)
        trace = make_trace(args.make, params, args.slo.itl_ms, lengths, args.requests, args.seed)
        write_trace(trace, args.out)
    except (ParamsError, OSError) as e:
        print(f"research.generate: {e}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
