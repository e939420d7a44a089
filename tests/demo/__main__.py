"""`make demo`: the whole promise on a real cluster, told while it happens.

    PYTHONPATH=cluster:tests .venv/bin/python -m demo

Installs the chart, applies a model that cannot fit and then one that can, streams a completion
through the Service, finds one pod's capacity X, and drives 0.5 X, 1.3 X and 0.3 X at it while the
table shows the object's own status. Exit 0 only if every promise was seen (`timeline.checks`).
"""

import argparse
import json
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from demo import timeline
from demo.kube import Kube, condition, wait_for
from demo.picture import timeline_png
from sluice import load
from sluice.kube import NAMESPACE, KubeError
from sluice_operator.times import milliseconds

SYSTEM = "sluice-system"
NAME = "demo"
POLL_SECONDS = 2.0
LOAD_POD = "sluice-demo-load"
SCALE_IN_SECONDS = 120.0
HIGH = "high"
"""The phase before which a second pod is allowed, and of which `timeline.checks` speaks."""


def say(text: str) -> None:
    """One line of the story."""
    print(text, flush=True)


@dataclass
class Demo:
    """The story's state: where it runs, and what it saw. `name`: of the object, and of the files.

    `manifest`: the object, as YAML.
    """

    kube: Kube
    root: Path
    images: Mapping[str, str]
    name: str
    manifest: str
    seen: list[timeline.Check] = field(default_factory=list)
    rows: list[timeline.Row] = field(default_factory=list)
    phases: list[dict[str, Any]] = field(default_factory=list)
    phase: str = "warmup"
    stopped: KubeError | None = None
    """Why the load is no longer followed."""

    def install(self) -> None:
        """`helm upgrade --install`, waiting for the operator."""
        say("\n== helm install: the CRD, its RBAC and the operator")
        self.kube.run(
            "helm", "upgrade", "--install", "sluice", str(self.root / "charts/sluice"),
            "--namespace", SYSTEM, "--create-namespace", "--wait", "--timeout", "120s",
            "--set", f"image={self.images['operator']}",
            "--set", f"worker.image={self.images['worker']}",
        )  # fmt: skip

    def refuse_too_large(self) -> None:
        """A model that cannot fit is told so before any pod exists."""
        say("\n== kubectl apply -f examples/too-large.yaml: a model that cannot fit")
        self.kube.kubectl("apply", "-f", str(self.root / "examples/too-large.yaml"))

        def refused() -> Mapping[str, Any] | None:
            fits = condition(self.kube.inference_service("too-large"), "ModelFits")
            return fits if fits.get("status") == "False" else None

        fits = wait_for("ModelFits=False", 60, refused)
        say(f"   ModelFits=False: {fits['message']}")
        if self.kube.pods("too-large"):
            raise KubeError("a pod exists for a model that cannot fit")
        say("   no pod was made")
        self.kube.kubectl("delete", "-f", str(self.root / "examples/too-large.yaml"))

    def apply(self) -> None:
        """The service of the demo, from nothing to Ready."""
        say(f"\n== kubectl apply: the InferenceService {self.name}")
        self.kube.kubectl("delete", "infs", self.name, "--ignore-not-found", "--wait=true")
        wait_for("old pods to leave", 90, lambda: True if not self.kube.pods(self.name) else None)
        self.kube.kubectl("apply", "-f", "-", stdin=self.manifest)
        last, start = "", time.monotonic()

        def ready() -> Mapping[str, Any] | None:
            nonlocal last
            now = condition(self.kube.inference_service(self.name), "Ready")
            if (text := f"   Ready={now.get('status')}: {now.get('message')}") != last:
                say(last := text)
            return now if now.get("status") == "True" else None

        wait_for("Ready=True", 240, ready)
        took = f"after {time.monotonic() - start:.0f} s"
        self.seen.append(timeline.Check("the object was Ready", True, took))

    def complete(self) -> None:
        """Stream a completion through the Service."""
        say("\n== a completion, streamed through the Service\n")
        with self.kube.service_url(self.name) as url:
            length = self._stream(url)
        self.seen.append(
            timeline.Check("it answered through the Service", length > 0, f"{length} characters")
        )

    def _stream(self, url: str) -> int:
        """Show a completion as it comes; the number of its characters."""
        prompt = "def read_lines(path):\n"
        body = {"model": self.name, "prompt": prompt, "max_tokens": 80, "stream": True,
                "temperature": 0.7, "seed": 7}  # fmt: skip
        length = 0
        sys.stdout.write("   | " + prompt.replace("\n", "\n   | "))
        with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=30) as response:
            response.raise_for_status()
            for line in response.iter_lines():
                if line.startswith("data: ") and not line.endswith("[DONE]"):
                    text = json.loads(line[6:])["choices"][0]["text"]
                    sys.stdout.write(text.replace("\n", "\n   | "))
                    sys.stdout.flush()
                    length += len(text)
        say("")
        return length

    def drive(self, phases: list[str], flags: Sequence[str] = ()) -> None:
        """Run the load and look at the object meanwhile, until the second pod has come and gone.

        `flags`: more of `sluice load`.
        """
        say("\n== load: one pod's capacity X (closed loop), then shares of X (open loop)")
        say(f"   {' '.join(phases)}\n")
        self.kube.patch("infs", self.name, {"spec": {"scaling": {"maxReplicas": 1}}})
        self.kube.kubectl("delete", "pod", LOAD_POD, "--ignore-not-found", "--wait=true")
        told = ("--phases", *phases, *flags)
        self.kube.start_load(LOAD_POD, self.images["operator"], self.name, *told)
        self.phase = phases[0].split(":")[0]
        names = [p.split(":")[0] for p in phases]
        reader = threading.Thread(target=self._follow_load, args=(names,), daemon=True)
        reader.start()
        say(timeline.Row.HEADER)
        start = time.time()
        while reader.is_alive():
            self.look(start)
            reader.join(POLL_SECONDS)
        if self.stopped is not None:
            raise self.stopped
        if len(self.phases) < len(phases):
            raise KubeError(f"pod {LOAD_POD} ended early: {self.kube.last_words(LOAD_POD)}")
        end = time.monotonic() + SCALE_IN_SECONDS
        while not timeline.scaled_in(self.rows).seen and time.monotonic() < end:
            self.look(start)
            time.sleep(POLL_SECONDS)

    def watch(self, out: Path | None, drive: Callable[[], None]) -> None:
        """Drive, and keep pictures of `sluice ui` meanwhile where `out` is given."""
        if out is None:
            drive()
            return
        from demo.screens import Watcher  # needs a browser

        watcher = Watcher(self.name, self.rows, self.kube.kubeconfig, self.kube.env, out)
        try:
            drive()
        finally:
            self.seen.append(watcher.end())

    def _follow_load(self, names: list[str]) -> None:
        try:
            self._read_load(names)
        except KubeError as e:
            self.stopped = e

    def _read_load(self, names: list[str]) -> None:
        """Follow the load's lines; before the high load, let the service have two pods, and in the
        phase of the rollout, begin it."""
        for line in self.kube.follow("kubectl", "logs", "-f", "-n", NAMESPACE, LOAD_POD):
            record = json.loads(line) if line.startswith("{") else {}
            if "phase" not in record:
                continue
            self.phases.append(record)
            following = names.index(record["phase"]) + 1
            self.phase = names[following] if following < len(names) else "idle"
            say(f"   -- {record['phase']}: {record['requests_per_s']:.1f} requests/s, P99 TTFT"
                f" {record['p99_ttft_ms']} ms, ITL {record['p99_itl_ms']} ms at the client,"
                f" {record['results']}")  # fmt: skip
            if record["phase"] == load.CAPACITY:
                say(f"   -- X = {record['capacity']:.1f} requests/s")
            # Before, the queue of the closed loop would ask for the second pod.
            if self.phase == HIGH:
                say("   -- maxReplicas: 1 -> 2")
                self.kube.patch("infs", self.name, {"spec": {"scaling": {"maxReplicas": 2}}})
            if self.phase == timeline.ROLL:
                self._roll()

    def _roll(self) -> None:
        """Edit the pods' template: a variable more for the engine."""
        say("   -- engine.env: one variable more, so every pod is replaced")
        engine = self.kube.inference_service(self.name)["spec"]["engine"]
        variables = [*engine.get("env", []), {"name": "ROLLED", "value": "1"}]
        self.kube.patch("infs", self.name, {"spec": {"engine": {"env": variables}}})

    def look(self, start: float) -> None:
        """One row of the table."""
        try:
            seen = timeline.row(
                time.time(),
                self.phase,
                self.kube.inference_service(self.name),
                self.kube.pods(self.name),
            )
        except (KubeError, json.JSONDecodeError) as e:
            say(f"   (no answer from the API server: {str(e)[:80]})")
            return
        self.rows.append(seen)
        say(seen.line(start))

    def finish(self, out: Path) -> bool:
        """Say what was seen, write the timeline, and tell whether all promises held."""
        out.mkdir(parents=True, exist_ok=True)
        slo = self.kube.inference_service(self.name)["spec"]["slo"]
        ttft_ms = milliseconds(slo["timeToFirstToken"]) or 0.0
        itl_ms = milliseconds(slo["interTokenLatency"]) or 0.0
        targets_ms = {"p99_ttft_ms": ttft_ms, "p99_itl_ms": itl_ms}
        results = [*self.seen, *timeline.checks(self.rows, self.phases, targets_ms)]
        story = timeline.as_json(self.rows, self.phases, results)
        (out / f"{self.name}.json").write_text(json.dumps(story, indent=1))
        png = out / f"{self.name}.png"
        timeline_png(self.rows, ttft_ms, itl_ms, self.name, png, self.phases)
        say("\n== what was seen")
        for check in results:
            say(f"   {'yes' if check.seen else 'NO '}  {check.claim}: {check.detail}")
        share = timeline.held_share(self.rows, ttft_ms, itl_ms)
        say(f"\n   both P99s of the object held at {100 * share:.0f} % of {len(self.rows)} looks")
        say(f"   timeline: {out / self.name}.png and .json")
        return all(check.seen for check in results)

    def invite(self) -> None:
        """Say how the reader goes on."""
        say("   the service is still up; try:")
        url = self.kube.routed_url(self.name)
        if url is None:
            url = "http://localhost:8080"
            say(f"   kubectl port-forward -n {NAMESPACE} service/{self.name} 8080:80 &")
        say(f'   curl -X POST {url}/generate -d \'{{"prompt": "import "}}\'')


def phase(text: str) -> str:
    """A phase of `sluice load`, as it is told: argparse's `type=`."""
    load.phase(text)
    return text


def refusal(phases: Sequence[str]) -> str:
    """Why the story cannot be told with these phases, "" where it can."""
    read = [load.phase(text) for text in phases]
    names = [name for name, _, _, _ in read]
    if twice := next((name for name in names if names.count(name) > 1), ""):
        return f"phase {twice} is given twice"
    measures = any(p[:2] == (load.CAPACITY, "closed") for p in read)
    if not measures or HIGH not in names[1:]:
        return (
            f"needed are a closed phase {load.CAPACITY}, which finds X, and behind it {HIGH}, "
            "before which a second pod is allowed"
        )
    return load.refusal(read, None)


def parser() -> argparse.ArgumentParser:
    """The flags of the demo."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--root", type=Path, default=Path.cwd(), help="the repository's folder")
    parser.add_argument(
        "--out", type=Path, default=Path("build/demo"), help="where PNG and JSON go"
    )
    parser.add_argument(
        "--screens", type=Path, help="watch `sluice ui` in a browser, and keep four pictures there"
    )
    parser.add_argument(
        "--phases",
        type=phase,
        nargs="+",
        metavar="PHASE",
        help=f"as `sluice load` has them, {load.CAPACITY} and {HIGH} among them",
        default=["warmup:closed:8:30", "capacity:closed:48:20", "low:open:0.5:45",
                 "high:open:1.3:120", "ebb:open:0.3:75"],
    )  # fmt: skip
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """0 if all was seen, 1 if not, 2 for phases that tell no story, 3 without a cluster."""
    args = parser().parse_args(argv)
    if why := refusal(args.phases):
        print(f"demo: --phases: {why}", file=sys.stderr)
        return 2
    state = args.root / "build/cluster/cluster.json"
    if not state.exists():
        say(f"There is no cluster: {state} is missing; `make cluster` brings one up.")
        return 3
    cluster = json.loads(state.read_text())
    images = cluster["images"]
    if not {"operator", "worker"} <= images.keys():
        say("The cluster has no images of ours yet; `make cluster` builds them.")
        return 3
    kube = Kube(Path(cluster["kubeconfig"]), Path(cluster["bin_dir"]))
    manifest = (args.root / "examples/demo.yaml").read_text()
    demo = Demo(kube, args.root, images, NAME, manifest)
    try:
        demo.install()
        demo.refuse_too_large()
        demo.apply()
        demo.look(time.time())  # the cap may rise on the first completion
        demo.complete()
        demo.watch(args.screens, lambda: demo.drive(args.phases))
        is_whole = demo.finish(args.out)
        demo.invite()
        return 0 if is_whole else 1
    except (KubeError, httpx.HTTPError) as e:
        say(f"\nThe demo stopped: {e}")
        return 1
    except KeyboardInterrupt:
        say("\nThe demo was interrupted.")
        return 130


if __name__ == "__main__":
    sys.exit(main())
