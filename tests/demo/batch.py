"""`make demo-batch`: an InferenceBatch of 1,000 prompts beside online requests, through two kills.

    PYTHONPATH=cluster:tests .venv/bin/python -m demo.batch --out docs

Applies a service of the demo's model to the cluster, and sends it bursts of streams: alone, and
then while a batch runs in the background. In the middle of it the batch's pod is killed, and later
the operator's. The table and the picture show what online and the batch got. Exit 0 only if each
prompt has one result and no online request failed.
"""

import argparse
import asyncio
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

import aiohttp
from bench.static_rows import bursts
from e2e.batches import SERVICE, VOLUME, Files, completed, delete, kill, lines, look, start
from e2e.kit import SYSTEM, Cluster, NoClusterError
from matplotlib.figure import Figure
from sluice.kube import NAMESPACE
from sluice.measure.client import COMPLETIONS, Outcome, Shape, exact_quantile_ms, request

BATCH, NUM = "thousand", 1000
SHAPE = Shape((32, 96), (16, 48), 2048, SERVICE)
SIZES, PER_S, BLOCK_S = (2, 6), 3.0, 10.0
ALONE_S, LIMIT_S, LOOK_S = 90.0, 900.0, 2.0
SHARES = (0.1, 0.5)
"""Of the prompts are done when the batch's pod is killed, and the operator's."""
BLUE, GREEN, RED = "#1f6fb4", "#2a9d5c", "#c0392b"


@dataclass
class Seen:
    """What was seen; seconds from the start. `online`: when each came, and its outcome; `done`:
    prompts of the batch; `kills`: when, and whom; `began_s`: when the batch was applied."""

    start_s: float = field(default_factory=time.monotonic)
    online: list[tuple[float, Outcome]] = field(default_factory=list)
    done: list[tuple[float, int]] = field(default_factory=list)
    kills: list[tuple[float, str]] = field(default_factory=list)
    began_s: float = 0.0
    ended_s: float = 0.0
    state: str = ""

    @property
    def now_s(self) -> float:
        return time.monotonic() - self.start_s

    def between(self, from_s: float, to_s: float) -> list[Outcome]:
        """Online requests that came in between, and were answered."""
        return [o for at_s, o in self.online if from_s <= at_s < to_s and o.is_ok]

    def quantiles(self) -> dict[str, dict[str, float | None]]:
        """Of online, without the batch and beside it: milliseconds."""
        told = {}
        for name, span in (
            ("alone", (0.0, self.began_s)),
            ("beside", (self.began_s, self.ended_s)),
        ):
            outcomes = self.between(*span)
            gaps = [gap for outcome in outcomes for gap in outcome.gaps_s]
            firsts = [outcome.ttft_s for outcome in outcomes]
            told[name] = {
                "num": len(outcomes),
                "ttft_p50": exact_quantile_ms(firsts, 0.5),
                "ttft_p99": exact_quantile_ms(firsts, 0.99),
                "gap_p50": exact_quantile_ms(gaps, 0.5),
                "gap_p99": exact_quantile_ms(gaps, 0.99),
            }
        return told


async def online(url: str, seen: Seen, over: asyncio.Event) -> None:
    """Send bursts until `over`, and wait for their ends."""
    rng, tasks = Random(0), list[asyncio.Task[None]]()
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector) as session:

        async def one(body: dict[str, object], due_s: float) -> None:
            await asyncio.sleep(max(0.0, due_s - seen.now_s))
            at_s = seen.start_s + due_s
            outcome = await request(session, url + COMPLETIONS, body, due_s=at_s)
            seen.online.append((due_s, outcome))

        while not over.is_set():
            from_s = seen.now_s
            for at_s in bursts(rng, round(PER_S * BLOCK_S), PER_S, SIZES):
                tasks.append(asyncio.create_task(one(SHAPE.body(rng), from_s + at_s)))
            await asyncio.sleep(from_s + BLOCK_S - seen.now_s)
        await asyncio.gather(*tasks)


async def batch(cluster: Cluster, seen: Seen) -> None:
    """Apply the batch after a while, kill twice, and follow it to its end."""
    await asyncio.sleep(ALONE_S)
    claim = {"claimName": VOLUME}
    given, to = {**claim, "path": "in.jsonl"}, {**claim, "path": "out"}
    seen.began_s = seen.now_s
    start(cluster, BATCH, input=given, output=to, serviceRef={"name": SERVICE})
    kills = [
        (NAMESPACE, f"app.kubernetes.io/instance={BATCH}.batch", "its pod"),
        (SYSTEM, "app.kubernetes.io/name=sluice-operator", "the operator"),
    ]
    while seen.state != "completed" and seen.now_s < LIMIT_S:
        await asyncio.sleep(LOOK_S)
        status = await asyncio.to_thread(look, cluster, BATCH)
        seen.state, num = str(status.get("state")), completed(status)
        seen.done.append((seen.now_s, num))
        print(f"{seen.now_s:6.0f}s {seen.state:12} {num:5} done", flush=True)
        if kills and num >= SHARES[len(seen.kills)] * NUM:
            namespace, selector, whom = kills.pop(0)
            await asyncio.to_thread(kill, cluster, namespace, selector)
            seen.kills.append((seen.now_s, whom))
            print(f"{seen.now_s:6.0f}s killed {whom}", flush=True)
    seen.ended_s = seen.now_s


async def run(cluster: Cluster) -> Seen:
    """Both; what was seen."""
    seen, over = Seen(), asyncio.Event()
    with cluster.kube.service_url(SERVICE) as url:
        seen.start_s = time.monotonic()
        clients = asyncio.create_task(online(url, seen, over))
        try:
            await batch(cluster, seen)
        finally:
            over.set()
            await clients
    return seen


def picture(seen: Seen, path: Path) -> None:
    """The batch's progress, first tokens and gaps of each online request, and the kills."""
    figure = Figure((10, 7), layout="constrained")
    axes = figure.subplots(3, 1, sharex=True)
    axes[0].plot(*zip(*seen.done, strict=True), color=GREEN)
    axes[0].set_ylabel("prompts of the batch done")
    times = [at_s for at_s, outcome in seen.online if outcome.is_ok]
    firsts = [1e3 * outcome.ttft_s for _, outcome in seen.online if outcome.is_ok]
    gaps = [1e3 * max(o.gaps_s, default=0.0) for _, o in seen.online if o.is_ok]
    told = seen.quantiles()
    for axis, values, name, title in (
        (axes[1], firsts, "ttft_p99", "online: first token, ms"),
        (axes[2], gaps, "gap_p99", "online: longest gap, ms"),
    ):
        axis.plot(times, values, ".", color=BLUE, markersize=3)
        axis.set_ylabel(title)
        for span, where in (((0, seen.began_s), "alone"), ((seen.began_s, seen.ended_s), "beside")):
            p99 = told[where][name] or 0.0
            axis.hlines(p99, *span, color="black", linewidth=1)
            axis.annotate(f"P99 {p99:.0f} ms", (span[0], p99), (4, 3), textcoords="offset points")
    for axis in axes:
        axis.axvline(seen.began_s, color="#999", linestyle=":")
        for at_s, _ in seen.kills:
            axis.axvline(at_s, color=RED, linewidth=0.8)
    for at_s, whom in seen.kills:
        axes[0].annotate(
            f"killed: {whom}", (at_s, 0.08 * NUM), (4, 0), textcoords="offset points", color=RED
        )
    axes[0].annotate(
        "the batch is applied", (seen.began_s, 0.9 * NUM), (4, 0), textcoords="offset points"
    )
    axes[2].set_xlabel("seconds")
    figure.suptitle("A batch of 1,000 prompts beside online requests, on one pod of one CPU")
    figure.savefig(path, dpi=110)


def main(argv: Sequence[str] | None = None) -> int:
    """0 if nothing was lost or doubled, 1 if not, 3 without a cluster."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("build/demo"))
    args = parser.parse_args(argv)
    try:
        cluster = Cluster.installed()
    except NoClusterError as missing:
        print(f"There is no cluster: {missing}")
        return 3
    files = Files(cluster)
    files.make()
    # One thread computes; the rest of the limit is for the API, so that no quota throttles both.
    hardware = {"accelerator": "cpu", "cpu": "1500m", "memory": "2Gi"}
    asked = {"name": "engine", "resources": {"requests": {"cpu": "500m"}}}
    slo = {"timeToFirstToken": "1s", "interTokenLatency": "100ms"}
    batching = {"speculation": "Never"}  # prompts that repeat themselves would flatter
    overlay = {"spec": {"containers": [asked]}}
    cluster.apply(
        SERVICE, "demo", hardware=hardware, slo=slo, batching=batching, podTemplate=overlay
    )
    cluster.wait_condition(SERVICE, "Ready", "True", 300)
    try:
        files.write("in.jsonl", lines(NUM, SERVICE, 640, ignore_eos=True))
        seen = asyncio.run(run(cluster))
        ids = [one["custom_id"] for one in files.read("out/out.0.jsonl")]
    finally:
        delete(cluster, BATCH)
        files.remove()
        cluster.delete(SERVICE)
    quantiles = seen.quantiles()
    ratios = {
        name: (quantiles["beside"][name] or 0.0) / (quantiles["alone"][name] or 1.0)
        for name in ("ttft_p99", "gap_p99")
    }
    failed = sum(not outcome.is_ok for _, outcome in seen.online)
    told = {
        "state": seen.state, "results": len(ids), "distinct": len(set(ids)), "kills": seen.kills,
        "online_failed": failed, "seconds": seen.ended_s - seen.began_s,
        "online": quantiles, "ratios": ratios, "done": seen.done,
    }  # fmt: skip
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "batch.json").write_text(json.dumps(told, indent=1) + "\n")
    picture(seen, args.out / "batch.png")
    print(json.dumps({k: v for k, v in told.items() if k != "done"}, indent=1))
    is_whole = len(ids) == len(set(ids)) == NUM and len(seen.kills) == 2
    return 0 if is_whole and not failed and seen.state == "completed" else 1


if __name__ == "__main__":
    sys.exit(main())
