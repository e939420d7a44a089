"""`sluice bench`: the same bursts at several caps of one running server, and each cap's effect.

The traffic is the sources': 200 requests at once, silence until 30 s after them, 100 times, prompts
of 1,024 to 3,072 tokens. `--scale 0.1` makes sizes, silence, number and lengths a tenth. Each round
brings one wave of the same lengths (and new tokens) to every cap, in a drawn order. A machine that
becomes slower does so for all caps. A wave begins only when the one before it is answered, even
after the silence: no cap inherits a queue.
"""

import argparse
import asyncio
import json
import platform
import random
import signal
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import aiohttp
from sluice_core.contract import Slo
from sluice_operator.tuner import Targets

from sluice.machine import processor
from sluice.measure import curve
from sluice.measure.client import (
    COMPLETIONS,
    EMBEDDINGS,
    ROUTES,
    Outcome,
    Shape,
    add_length_arguments,
    request,
)
from sluice.measure.curve import CurveTally
from sluice.measure.endpoint import (
    Cap,
    ClientLimit,
    EndpointError,
    base_url,
    find_live,
    named_live,
    open_session,
    served_model,
)
from sluice.measure.targets import HELP, read_targets
from sluice.numbers import count, not_negative, positive, several, vocabulary
from sluice.page import page, picture, section, table, text_table

CAPS = [1, 4, 8, 16, 32, 64]
EVEN = 0.02
"""Share of throughput within which static and continuous batches are called equal."""
CONNECT_SECONDS = 10.0
WARM_UP = 4
"""Requests before the first wave, not counted: they warm up connections, pages and code paths."""
SAY_EVERY_SECONDS = 5.0
"""Seconds between progress lines of a wave under way."""


def caps(text: str) -> list[int]:
    """`1,4,8` as numbers, each once, in rising order."""
    try:
        found = sorted({int(part) for part in text.split(",")})
    except ValueError:
        found = [0]
    if found[0] < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of caps like 1,4,8,16")
    return found


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--url", type=base_url, required=True, help="of the API, without a route")
    parser.add_argument("--max-num-seqs", type=caps, default=CAPS, metavar="1,4,8", help="the caps")
    whose = parser.add_mutually_exclusive_group()
    whose.add_argument(
        "--admin-url",
        type=base_url,
        help="default: port 8001 of the same host, if it is the same process's",
    )
    whose.add_argument("--client-side", action="store_true", help="leave the server's cap alone")
    parser.add_argument("--admin-token-file", type=Path, help="bearer of the admin port")
    parser.add_argument("--api-key-file", type=Path, help="bearer of the API")
    parser.add_argument("--model", help="default: the first of /v1/models")
    parser.add_argument("--route", choices=ROUTES, default=COMPLETIONS, help="of the API")
    parser.add_argument("--wave", type=several, default=200, help="requests at once")
    parser.add_argument("--waves", type=count, default=100, help="at each cap")
    parser.add_argument(
        "--silence", type=not_negative, default=30.0, help="seconds from wave to wave"
    )
    add_length_arguments(parser, prompt=(1024, 3072), output=(64, 256), output_type=several)
    parser.add_argument(
        "--scale", type=positive, default=1.0, help="a factor on the five above, such as 0.1"
    )
    parser.add_argument(
        "--vocab-size", type=vocabulary, default=1000, help="token ids are drawn below it"
    )
    parser.add_argument("--slo", type=read_targets, help=HELP)
    parser.add_argument("--timeout", type=positive, default=600.0, help="seconds for one request")
    parser.add_argument("--seed", type=int, default=0, help="of lengths, tokens and turns")
    parser.add_argument("--out", type=Path, default=Path("build/bench"), help="a folder")


@dataclass(frozen=True, slots=True)
class Traffic:
    """The waves in seconds and tokens, scaled; at least two requests a wave and two tokens an
    output."""

    wave: int
    waves: int
    silence_s: float
    prompt_tokens: tuple[int, int]
    max_tokens: tuple[int, int]

    @classmethod
    def of(cls, args: argparse.Namespace) -> "Traffic":
        def scaled(value: int) -> int:
            return max(1, round(value * float(args.scale)))

        prompt = sorted(map(scaled, args.prompt_tokens))
        output = sorted(map(scaled, args.max_tokens))
        return cls(
            max(2, scaled(args.wave)),
            scaled(args.waves),
            args.silence * args.scale,
            (prompt[0], prompt[1]),
            (max(2, output[0]), max(2, output[1])),
        )


@dataclass
class Bench:
    session: aiohttp.ClientSession
    args: argparse.Namespace
    cap: Cap
    traffic: Traffic
    shape: Shape
    targets: Targets
    tallies: dict[int, CurveTally]
    rng: random.Random
    costs: curve.StepCosts | None = None
    started_s: float = field(default_factory=time.monotonic)

    async def run(self) -> None:
        """Run all rounds; the last cap stays in force."""
        await self.cap.use(max(self.tallies))
        outcomes, _ = await self._send("warm-up", [self.shape.lengths(self.rng)] * WARM_UP)
        if not any(outcome.is_ok for outcome in outcomes):
            why = outcomes[0].detail or outcomes[0].result
            raise EndpointError(f"no request is answered in full: {why}")
        for number in range(1, self.traffic.waves + 1):
            lengths = [self.shape.lengths(self.rng) for _ in range(self.traffic.wave)]
            for cap in self.rng.sample(list(self.tallies), len(self.tallies)):
                await self._wave(number, self.tallies[cap], lengths)

    async def put_back(self) -> None:
        """Restore the cap that was in force before; EndpointError if that fails."""
        try:
            async with asyncio.timeout(CONNECT_SECONDS):
                cap = await self.cap.restore()
        except (aiohttp.ClientError, TimeoutError) as e:
            why = str(e) or "it does not answer"
            raise EndpointError(f"the server keeps the cap that was measured last: {why}") from e
        if cap is not None:
            print(f"cap {cap} is in force again, as before", flush=True)

    async def _send(self, name: str, lengths: list[curve.Length]) -> tuple[list[Outcome], float]:
        """Answers to requests sent at once, and the seconds until the last one. Meanwhile it prints
        the progress of the wave called `name`."""
        url, slot, ended = self.args.url + self.args.route, self.cap.slot, list[Outcome]()
        bodies = [self.shape.body(self.rng, one) for one in lengths]

        async def one(body: dict[str, object]) -> Outcome:
            outcome = await request(self.session, url, body, max_retries=0, slot=slot())
            ended.append(outcome)
            return outcome

        saying = asyncio.create_task(_say_how_far(name, ended, len(bodies)))
        try:
            start = time.monotonic()
            outcomes = list(await asyncio.gather(*map(one, bodies)))
            return outcomes, time.monotonic() - start
        finally:
            saying.cancel()

    async def _wave(self, number: int, tally: CurveTally, lengths: list[curve.Length]) -> None:
        await self.cap.use(tally.cap)
        before = await self.cap.counters()
        name = f"round {number} of {self.traffic.waves}, cap {tally.cap:3}"
        outcomes, seconds = await self._send(name, lengths)
        after = await self.cap.counters()
        await self.cap.check()
        steps, batch = after.batch_since(before) if after else (None, None)
        self.costs = after.costs if after else None
        prompts = [prompt for prompt, _ in lengths]
        wave = tally.add(outcomes, prompts, seconds, self.targets, steps, batch)
        self._say(name, wave, len(outcomes))
        await asyncio.sleep(max(0.0, self.traffic.silence_s - seconds))

    def _say(self, name: str, wave: curve.Wave, sent: int) -> None:
        done = sum(len(tally.waves) for tally in self.tallies.values())
        left = self.traffic.waves * len(self.tallies) - done
        left_s = left * (time.monotonic() - self.started_s) / done
        held = f", {wave.good} within the targets" if self.args.slo else ""
        print(
            f"{name}: {len(wave.lengths)} of {sent} answered in {wave.seconds:.1f} s, "
            f"{wave.tokens / wave.seconds:.0f} tokens/s{held}; about {left_s / 60:.0f} min left",
            flush=True,
        )

    def result(self, left_out: list[int]) -> dict[str, Any]:
        """All results, ready for JSON."""
        points = [
            curve.point(tally, self.targets, self.costs, self.traffic.silence_s)
            for tally in self.tallies.values()
        ]
        has_targets = self.args.slo is not None
        return {
            "url": self.args.url, "route": self.args.route, "model": self.shape.model,
            "client": {"cpu": processor(), "python": platform.python_version()},
            "caps_are": self.cap.how, "ceiling": self.cap.ceiling, "left_out": left_out,
            "traffic": {name: getattr(self.traffic, name) for name in Traffic.__slots__},
            "seed": self.args.seed,
            "targets": {"percentile": self.targets.percentile, **self.targets.by_name()},
            "rules": curve.RULES,
            "knee": curve.knee(points),
            "recommended": curve.recommend(points, has_targets=has_targets),
            "points": points,
        }  # fmt: skip


async def _say_how_far(name: str, ended: list[Outcome], num: int) -> None:
    """Print a line every few seconds, for ever; `ended`: the finished requests out of `num`."""
    start = time.monotonic()
    while True:
        await asyncio.sleep(SAY_EVERY_SECONDS)
        failed = sum(not outcome.is_ok for outcome in ended)
        told = f"{len(ended) - failed} of {num} answered" + (f", {failed} failed" if failed else "")
        seconds = time.monotonic() - start
        print(f"{name}: {told} after {seconds:.0f} s", file=sys.stderr, flush=True)


async def measure(args: argparse.Namespace) -> dict[str, Any]:
    """The whole measurement; raises EndpointError if there is nothing to measure."""
    traffic = Traffic.of(args)
    async with (
        open_session(args.api_key_file, args.timeout, CONNECT_SECONDS) as api,
        open_session(args.admin_token_file, args.timeout, CONNECT_SECONDS) as a,
    ):
        served = await served_model(api, args.url, args.model)
        window = served.window
        longest = traffic.prompt_tokens[1]
        longest += traffic.max_tokens[1] if args.route != EMBEDDINGS else 0
        if window and longest > window:
            raise EndpointError(
                f"requests of up to {longest} tokens are over the window of {window}; "
                "give --scale, or shorter --prompt-tokens and --max-tokens"
            )
        asked = args.slo and Slo(args.slo.ttft_ms, args.slo.itl_ms, args.slo.e2e_ms)
        cap: Cap = ClientLimit(api, args.url)
        if args.admin_url:
            cap = await named_live(a, args.admin_url, asked)
        elif not args.client_side:
            cap = await find_live(api, a, args.url, asked) or cap
        usable = [c for c in args.max_num_seqs if cap.ceiling is None or c <= cap.ceiling]
        if not usable:
            raise EndpointError(f"every cap is over the server's ceiling of {cap.ceiling}")
        bench = Bench(
            api, args, cap, traffic,
            Shape(
                traffic.prompt_tokens, traffic.max_tokens, args.vocab_size, served.name,
                words=args.words, route=args.route,
            ),
            args.slo or Targets("99", None, None, None),
            {c: CurveTally(c) for c in usable},
            random.Random(args.seed),  # noqa: S311 - a load, not a secret
        )  # fmt: skip
        print(f"caps {', '.join(map(str, usable))}: {cap.how}", flush=True)
        await _run_until_signal(bench)
        return bench.result([c for c in args.max_num_seqs if c not in usable])


def rows(result: Mapping[str, Any]) -> list[list[str]]:
    """The curve as a table; times in ms."""
    header = ["cap", "tokens/s", "req/s", "good/s", "good %", "smooth %", "first P50", "P99",
              "gap P50", "P99", "end P50", "P99", "batch", "failed", "padding %"]  # fmt: skip
    return [header, *(_row(p) for p in result["points"])]


def _row(p: Mapping[str, Any]) -> list[str]:
    times = [p[f"{name}_ms"][q] for name in ("ttft", "itl", "e2e") for q in ("p50", "p99")]
    batch = p["effective_batch"]
    return [
        str(p["cap"]), f"{p['tokens_per_s']:.0f}",
        *(f"{p[name]:.2f}" for name in ("requests_per_s", "goodput_rps")),
        *(f"{100 * p[name]:.1f}" for name in ("good_share", "smooth_share")),
        *("-" if t is None else f"{t:.4g}" for t in times),
        "-" if batch is None else f"{batch:.1f}", str(p["failed"]),
        f"{100 * p['static']['padding_waste']:.0f}",
    ]  # fmt: skip


def findings(result: Mapping[str, Any]) -> list[str]:
    by_cap = {p["cap"]: p for p in result["points"]}
    best, rules = by_cap[result["recommended"]], result["rules"]
    hold = [str(cap) for cap, p in by_cap.items() if p["holds"]]
    said = [
        f"Recommended cap: {best['cap']} ({rules['recommended']}).",
        f"Knee: {result['knee']} ({rules['knee']}).",
        f"The caps are {result['caps_are']}.",
    ]
    if len(result["targets"]) > 1:
        named = ", ".join(hold) if hold else "none of the caps"
        said.insert(1, f"Every target holds at P{result['targets']['percentile']} at: {named}.")
    if result["left_out"]:
        out = ", ".join(map(str, result["left_out"]))
        said.append(f"Left out, over the server's ceiling of {result['ceiling']}: {out}.")
    return [*said, _static(best, rules["static"])]


def _static(p: Mapping[str, Any], rule: str) -> str:
    waste, gain, gap_ms = (p["static"][key] for key in ("padding_waste", "gain", "gap_ms"))
    padded = f"Static batches of {p['cap']} would throw {waste:.0%} of their rows away as padding"
    if gain is None:
        return f"{padded} (of the measured lengths; what a step costs here is not known)."
    if gain < -EVEN:
        return f"{padded} and bring {-gain:.1%} less throughput ({rule})."
    wins = f"win by {gain:.1%} of the throughput" if gain > EVEN else "bring the same throughput"
    return (
        f"{padded} and {wins}, with gaps of about {gap_ms:.3g} ms, in which no prompt is computed, "
        f"where the continuous run's P99 was {p['itl_ms']['p99']:.3g} ms ({rule})."
    )


def write(result: Mapping[str, Any], out: Path) -> None:
    """bench.json, bench.png and bench.html in the folder `out`."""
    from sluice.measure.plot import caps_png

    out.mkdir(parents=True, exist_ok=True)
    (out / "bench.json").write_text(json.dumps(result, indent=1))
    caps_png(result, out / "bench.png")
    setting = {k: result[k] for k in ("url", "route", "model", "client", "traffic", "seed")}
    html = page(
        "Caps of one server under the same bursts",
        section("Findings", *findings(result)),
        picture((out / "bench.png").read_bytes(), "throughput, goodput and latency by cap"),
        table(rows(result)),
        section("Setting", *(f"{name}: {value}" for name, value in setting.items())),
    )
    (out / "bench.html").write_text(html)


class BenchEnded(Exception):
    def __init__(self, number: int) -> None:
        super().__init__(f"ended by {signal.Signals(number).name}")
        self.number = number


async def _run_until_signal(bench: Bench) -> None:
    """Run it, and restore the cap however it ends. Raises `BenchEnded`."""
    work, got = asyncio.ensure_future(bench.run()), list[int]()

    def end(number: int) -> None:
        got.append(number)
        work.cancel()  # and nothing else, so that no signal keeps the cap from being restored

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:  # nohup sets SIG_IGN
            asyncio.get_running_loop().add_signal_handler(number, end, number)
    try:
        await work
    except asyncio.CancelledError:
        raise BenchEnded(got[0]) from None
    finally:
        await bench.put_back()


def main(args: argparse.Namespace) -> int:
    """Entry of `sluice bench`: 0 if all was measured, 2 if it cannot be."""
    if args.client_side and args.admin_token_file:
        told = "--admin-token-file says nothing with --client-side"
        print(f"sluice bench: {told}", file=sys.stderr)
        return 2
    if find_spec("matplotlib") is None:  # reported before minutes of measuring, not after them
        print("sluice bench: the picture needs matplotlib: sluice[plots]", file=sys.stderr)
        return 2
    try:
        args.out.mkdir(parents=True, exist_ok=True)
        result = asyncio.run(measure(args))
    except BrokenPipeError:
        raise
    except (EndpointError, aiohttp.ClientError, TimeoutError, OSError) as e:
        print(f"sluice bench: {str(e) or type(e).__name__}", file=sys.stderr)
        return 2
    except BenchEnded as e:
        print(f"sluice bench: {e}", file=sys.stderr)
        return 128 + e.number
    write(result, args.out)
    print("\n" + text_table(rows(result)) + "\n")
    print(*findings(result), f"Written: {args.out}/bench.json, .png, .html", sep="\n")
    return 0
