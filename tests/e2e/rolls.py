"""Rollouts and scale-ins beneath clients that keep their connections: is any request lost?

`make rolls` does ten of each on the cluster that is up, and writes build/rolls.json and .png.
"""

import argparse
import json
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from demo.kube import wait_for
from e2e.kit import Cluster, is_ready, lost
from sluice.kube import NAMESPACE

NAME = "rolls"
NUM_PHASES = 1000
"""More than the steps take: the loads are ended when these are done."""
STEP_SECONDS = 180.0
CLIENTS = {
    "streams": ("closed:4:5", ()),
    "whole": ("open:4:5", ("--whole",)),
    "pauses": ("burst:8:7", ("--whole",)),
}
"""By the load's name: what each of its phases sends, and its flags. Four clients that ask on at
once, four requests a second at random times, and eight clients whose connections are idle for seven
seconds, which is longer than pods serve those that do not know yet that they leave."""


@dataclass
class Load:
    """What a load pod has said so far: its progress, and each phase's summary."""

    progress: list[Mapping[str, Any]] = field(default_factory=list)
    phases: list[Mapping[str, Any]] = field(default_factory=list)
    is_ended: bool = False

    def read(self, lines: Iterator[str]) -> None:
        """Read `kubectl logs -f` to its end."""
        for record in (json.loads(line) for line in lines if line.startswith("{")):
            if "phase" in record:
                self.phases.append(record)
            elif "done" in record:
                self.progress.append(record)
        self.is_ended = True


@dataclass(frozen=True)
class Step:
    """One rollout or scale-in; Unix times."""

    kind: str
    began_s: float
    ended_s: float


@dataclass
class Report:
    """What was done, and what became of each request. `pods`: time, ready ones, leaving ones."""

    steps: list[Step] = field(default_factory=list)
    pods: list[tuple[float, int, int]] = field(default_factory=list)
    loads: dict[str, Load] = field(default_factory=dict)

    @property
    def num_sent(self) -> int:
        """Requests of all loads."""
        return sum(int(phase["sent"]) for phase in self._phases)

    @property
    def num_lost(self) -> int:
        """As `lost` counts them."""
        return lost(self._phases)

    @property
    def causes(self) -> Counter[str]:
        """What clients saw of lost ones."""
        return sum((Counter(phase["details"]) for phase in self._phases), Counter())

    @property
    def _phases(self) -> list[Mapping[str, Any]]:
        return [phase for load in self.loads.values() for phase in load.phases]

    def __str__(self) -> str:
        done = [step.kind for step in self.steps]
        counts = ", ".join(f"{done.count(kind)} {kind}s" for kind in dict.fromkeys(done))
        told = f"{counts}: {self.num_lost} of {self.num_sent} requests lost"
        return "; ".join([told, *(f"{n} x {cause}" for cause, n in self.causes.items())])

    def as_json(self) -> dict[str, object]:
        """All of it, for a file."""
        return {"requests": self.num_sent, "lost": self.num_lost, **asdict(self)}


class Rolls:
    """Two replicas of the demo model, and what is done to them. `pods_each`: of a replica."""

    def __init__(self, cluster: Cluster, pods_each: int = 1) -> None:
        self._cluster, self._pods_each = cluster, pods_each
        self._num_rolls = 0
        self.report = Report()

    def start(self, **spec: object) -> None:
        """Apply the object, with `spec` more, and wait until both replicas serve."""
        drafts = {} if "engine" in spec else {"speculation": "Never"}
        batching = {"initialNumSeqs": 8, "maxNumSeqs": 8, **drafts}
        self._cluster.delete(NAME)
        self._cluster.apply(
            NAME, "demo", replicas=2, **{"batching": batching, "drain": {"timeout": "30s"}, **spec}
        )
        self.settled(2)

    @contextmanager
    def loaded(self) -> Iterator[None]:
        """Clients from before the block to the end of the phases that it ended in."""
        threads = [self._start_load(name) for name in CLIENTS]
        try:
            self._end_phases()  # then their clients' connections are there
            yield
            self._end_phases()
        finally:
            for name in CLIENTS:
                self._cluster.kube.kubectl("delete", "pod", f"rolls-{name}", "--wait=false")
            for thread in threads:
                thread.join(60)

    def roll(self, spec: Mapping[str, object] | None = None) -> None:
        """Replace two pods, by an edit of their template; None: of the engine's arguments."""
        self._cluster.patch(NAME, {"replicas": 2})
        self.settled(2)
        old = set(self._cluster.identities(NAME))
        self._num_rolls += 1
        args = [f"--seed={self._num_rolls}"]
        self._step("roll", spec or {"engine": {"args": args}}, 2, old)

    def scale_in(self) -> None:
        """Take one of two pods."""
        self._step("scale-in", {"replicas": 1}, 1)

    def _step(
        self, kind: str, spec: Mapping[str, object], num: int, old: Set[str] = frozenset()
    ) -> None:
        began_s = time.time()
        self._cluster.patch(NAME, spec)
        self.settled(num, old)
        self.report.steps.append(Step(kind, began_s, time.time()))
        print(self.report, flush=True)

    def settled(self, num: int, old: Set[str] = frozenset()) -> None:
        """Wait until there are `num` replicas, all ready, and no pod of `old`."""
        num_pods = num * self._pods_each

        def look() -> bool | None:
            pods = self._cluster.kube.pods(NAME)
            ready = sum(map(is_ready, pods))
            leaving = sum("deletionTimestamp" in pod["metadata"] for pod in pods)
            self.report.pods.append((time.time(), ready, leaving))
            is_new = old.isdisjoint(pod["metadata"]["uid"] for pod in pods)
            return True if is_new and len(pods) == ready == num_pods and not leaving else None

        wait_for(f"{num_pods} pods", self._pods_each * STEP_SECONDS, look)

    def _start_load(self, name: str) -> threading.Thread:
        sends, flags = CLIENTS[name]
        phases = [f"{i}:{sends}" for i in range(NUM_PHASES)]
        lengths = ("--prompt-tokens", "16", "64", "--max-tokens", "8", "64")
        pod, load = f"rolls-{name}", self.report.loads.setdefault(name, Load())
        kube, image = self._cluster.kube, self._cluster.operator_image

        def follow() -> None:
            kube.kubectl("delete", "pod", pod, "--ignore-not-found", "--wait=true")
            kube.start_load(pod, image, NAME, *lengths, *flags, "--phases", *phases)
            with closing(kube.follow("kubectl", "logs", "-f", "-n", NAMESPACE, pod)) as lines:
                load.read(lines)

        thread = threading.Thread(target=follow)
        thread.start()
        return thread

    def _end_phases(self) -> None:
        """Wait until each load has ended the phase that it is in."""
        loads = self.report.loads.values()
        before = [len(load.phases) for load in loads]

        def look() -> bool | None:
            assert not any(load.is_ended for load in loads), "a load ended early"
            done = [len(load.phases) for load in loads]
            return True if all(n > b for n, b in zip(done, before, strict=True)) else None

        wait_for("the phases to end", 120, look)


def run(cluster: Cluster, num_each: int) -> Report:
    """`num_each` rollouts and as many scale-ins, in turns."""
    rolls = Rolls(cluster)
    try:
        rolls.start()
        with rolls.loaded():
            for _ in range(num_each):
                rolls.roll()
                rolls.scale_in()
    finally:
        cluster.delete(NAME)
    return rolls.report


def rates(progress: Sequence[Mapping[str, Any]]) -> list[tuple[float, float]]:
    """Answers a second at each of a load's progress lines but the first of each phase."""
    pairs = zip(progress, progress[1:], strict=False)
    return [
        (b["t_s"], (b["done"] - a["done"]) / (b["t_s"] - a["t_s"]))
        for a, b in pairs
        if a["name"] == b["name"]
    ]


def draw(report: Report, path: Path) -> None:
    """Answers and pods over time, with the steps shaded."""
    from matplotlib.figure import Figure

    figure = Figure((12, 6))
    above, below = figure.subplots(2, 1, sharex=True)
    start_s = report.pods[0][0]
    for name, load in report.loads.items():
        times_s, per_s = zip(*rates(load.progress), strict=True)
        above.plot([t - start_s for t in times_s], per_s, label=name, linewidth=1)
    for step in report.steps:
        color = "C1" if step.kind == "roll" else "C2"
        for axes in (above, below):
            axes.axvspan(step.began_s - start_s, step.ended_s - start_s, color=color, alpha=0.15)
    times_s, ready, leaving = zip(*report.pods, strict=True)
    for label, counts in (("ready", ready), ("leaving", leaving)):
        below.step([t - start_s for t in times_s], counts, where="post", label=label)
    above.set(ylabel="answers a second", title=str(report))
    below.set(ylabel="pods", xlabel="seconds; shaded: rolls (orange), scale-ins (green)")
    for axes in (above, below):
        axes.legend(loc="upper right")
    figure.savefig(path, dpi=100, bbox_inches="tight")


def main() -> int:
    """1 if a request was lost, or fewer than `--requests` were sent."""
    parser = argparse.ArgumentParser(prog="make rolls", description=__doc__)
    parser.add_argument("--each", type=int, default=10, help="rolls, and scale-ins; default: 10")
    parser.add_argument("--requests", type=int, default=5000, help="at least; default: 5000")
    parser.add_argument("--out", type=Path, default=Path("build/rolls.json"))
    args = parser.parse_args()
    began_s = time.monotonic()
    report = run(Cluster.installed(), args.each)
    args.out.write_text(json.dumps(report.as_json(), indent=1) + "\n")
    draw(report, args.out.with_suffix(".png"))
    print(f"{report}; {time.monotonic() - began_s:.0f} s; {args.out}")
    return 0 if report.num_lost == 0 and report.num_sent >= args.requests else 1


if __name__ == "__main__":
    sys.exit(main())
