"""`make demo-texts`: a service of vectors whose cap moves live while the end of texts is late.

    PYTHONPATH=tests .venv/bin/python -m demo.texts --out docs

Applies examples/embed.yaml to the cluster that `make cluster` brings up and the chart is installed
in, and drives lists of texts at it: few, then as many as its clients can, then few again. The
table and the picture show the object's own status. Exit 0 only if the end was late, and the cap
moved in the same pod.
"""

import argparse
import json
import random
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import httpx
from demo.kube import Kube
from e2e.kit import Cluster, NoClusterError
from matplotlib.figure import Figure
from sluice_operator.times import milliseconds

NAME = "embed"
LOOK_S = 2.0
WORDS = ("the", "quick", "brown", "fox", "jumps", "over", "a", "lazy", "dog", "and", "runs", "on")


@dataclass(frozen=True)
class Phase:
    """`clients` that each keep one request of `texts` texts open."""

    name: str
    clients: int
    texts: int
    seconds: float


PHASES = (
    Phase("few", 1, 2, 30),
    Phase("many", 8, 3, 90),
    Phase("few again", 1, 2, 45),
)


@dataclass(frozen=True)
class Row:
    """One look at the object. `p99_ms`: of whole requests in its window, None without any."""

    t_s: float
    phase: str
    cap: int
    batch: float
    ready: int
    arrivals_per_s: float
    p99_ms: float | None
    is_met: bool
    reason: str
    pods: tuple[str, ...]


def texts(rng: random.Random, num: int) -> list[str]:
    """Texts of 4 to 16 words."""
    return [" ".join(rng.choices(WORDS, k=rng.randint(4, 16))) for _ in range(num)]


class Clients:
    """Threads that keep requests open at a URL while the phase lasts."""

    def __init__(self, url: str) -> None:
        self._url, self.counts, self._lock = url, {"ok": 0, "failed": 0}, threading.Lock()

    def run(self, phase: Phase) -> list[threading.Thread]:
        """Start a phase's clients; they end by themselves."""
        end = time.monotonic() + phase.seconds
        threads = [
            threading.Thread(target=self._client, args=(number, phase.texts, end), daemon=True)
            for number in range(phase.clients)
        ]
        for thread in threads:
            thread.start()
        return threads

    def _client(self, number: int, num_texts: int, end: float) -> None:
        rng = random.Random(number)
        with httpx.Client(timeout=60) as client:
            while time.monotonic() < end:
                body = {"input": texts(rng, num_texts)}
                answer = client.post(f"{self._url}/v1/embeddings", json=body)
                with self._lock:
                    self.counts["ok" if answer.is_success else "failed"] += 1


def look(kube: Kube, start: float, phase: str) -> Row:
    """The object as it is."""
    status = kube.inference_service(NAME).get("status") or {}
    batching, load = status.get("batching") or {}, status.get("load") or {}
    judged = (status.get("slo") or {}).get("endToEnd") or {}
    return Row(
        time.time() - start,
        phase,
        int(batching.get("cap") or 0),
        float(batching.get("effectiveBatch") or 0),
        int(status.get("readyReplicas") or 0),
        float(load.get("arrivalsPerSecond") or 0),
        milliseconds(judged.get("measured")),
        bool((status.get("slo") or {}).get("met")),
        str((batching.get("lastChange") or {}).get("reason") or "-"),
        tuple(sorted(pod["metadata"]["uid"] for pod in kube.pods(NAME))),
    )


def picture(rows: Sequence[Row], target_ms: float, path: Path) -> None:
    """Three panels: arrivals, cap and batch, P99 against the target."""
    figure = Figure(figsize=(10, 7), layout="constrained")
    axes = figure.subplots(3, 1, sharex=True)
    t = [row.t_s for row in rows]
    axes[0].plot(t, [row.arrivals_per_s for row in rows], color="#444")
    axes[0].set_ylabel("texts / s")
    axes[1].step(t, [row.cap for row in rows], where="post", label="cap", color="#1f6fb4")
    axes[1].plot(t, [row.batch for row in rows], label="effective batch", color="#e08214")
    axes[1].set_ylabel("texts in a step")
    axes[1].legend(loc="upper left")
    p99 = [row.p99_ms if row.p99_ms is not None else float("nan") for row in rows]
    axes[2].plot(t, p99, color="#7b3294", label="P99 of whole requests, last 30 s")
    axes[2].axhline(target_ms, color="#7b3294", linestyle="--", linewidth=0.8, label="target")
    axes[2].set_ylabel("ms")
    axes[2].set_xlabel("seconds")
    axes[2].legend(loc="lower center")
    for before, after in zip(rows, rows[1:], strict=False):
        if before.phase != after.phase:
            for axis in axes:
                axis.axvline(after.t_s, color="#999", linestyle=":")
            axes[0].annotate(after.phase, (after.t_s, axes[0].get_ylim()[1]), (4, -12),
                             textcoords="offset points")  # fmt: skip
    figure.suptitle("A service of vectors: load, cap, P99 of the end")
    figure.savefig(path, dpi=110)


def moved_live(rows: Sequence[Row]) -> list[tuple[int, int]]:
    """Changes of the cap while one pod stayed."""
    pairs = zip(rows, rows[1:], strict=False)
    return [(a.cap, b.cap) for a, b in pairs if a.cap != b.cap > 0 and set(a.pods) & set(b.pods)]


def drive(cluster: Cluster) -> tuple[list[Row], dict[str, int]]:
    """All phases; what was seen, and how requests ended."""
    rows, start = list[Row](), time.time()
    with cluster.kube.service_url(NAME) as url:
        clients = Clients(url)
        for phase in PHASES:
            threads = clients.run(phase)
            while any(thread.is_alive() for thread in threads):
                row = look(cluster.kube, start, phase.name)
                rows.append(row)
                print(
                    f"{row.t_s:6.0f}s {row.phase:10} cap {row.cap:4d} batch {row.batch:6.1f}  "
                    f"{row.arrivals_per_s:6.1f} texts/s  P99 {row.p99_ms or 0:7.0f} ms  "
                    f"{'held' if row.is_met else 'late':5} {row.reason}",
                    flush=True,
                )
                threads[0].join(LOOK_S)
    return rows, clients.counts


def main(argv: Sequence[str] | None = None) -> int:
    """0 if the end was late and the cap moved live, 1 if not, 3 without a cluster."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("build/demo"))
    args = parser.parse_args(argv)
    try:
        cluster = Cluster.installed()
    except NoClusterError as missing:
        print(f"There is no cluster: {missing}")
        return 3
    manifest = Path("examples/embed.yaml").read_text()
    cluster.delete(NAME)
    cluster.kube.kubectl("apply", "-f", "-", stdin=manifest)
    cluster.wait_condition(NAME, "Ready", "True", 300)
    rows, counts = drive(cluster)
    slo = cluster.kube.inference_service(NAME)["spec"]["slo"]
    target_ms = milliseconds(slo["endToEnd"]) or 0.0
    late = [row for row in rows if row.p99_ms is not None and row.p99_ms > target_ms]
    moves = moved_live(rows)
    args.out.mkdir(parents=True, exist_ok=True)
    told = {"rows": [asdict(row) for row in rows], "results": counts, "moves": moves}
    (args.out / "texts.json").write_text(json.dumps(told, indent=1))
    picture(rows, target_ms, args.out / "texts.png")
    print(f"late at {len(late)} of {len(rows)} looks; cap moves in one pod: {moves}; {counts}")
    return 0 if late and moves and not counts["failed"] else 1


if __name__ == "__main__":
    sys.exit(main())
