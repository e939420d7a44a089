"""What the end-to-end tests share: objects, and looks at a real cluster. No sleeps but polling."""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from demo.kube import Kube, condition, wait_for
from sluice.kube import NAMESPACE, KubeError
from sluice_cluster import binaries
from sluice_cluster.settings import ClusterSettings
from sluice_cluster.shell import succeeds
from sluice_cluster.state import State

SYSTEM = "sluice-system"
HOW = "python3 cluster/cluster.py up --images"
CHART = Path(__file__).parents[2] / "charts" / "sluice"
_SIGNAL = """
import os, signal, sys
for pid in {*filter(str.isdigit, os.listdir("/proc"))} - {str(os.getpid())}:
    with open(f"/proc/{pid}/cmdline") as words:
        if sys.argv[2] in words.read().split(chr(0)):
            os.kill(int(pid), signal.Signals[sys.argv[1]])
"""
ENGINE = "sluice_worker.engine.process"


class NoClusterError(Exception):
    """No cluster is up, or it has none of our images; the message says which, and what helps."""


@dataclass(frozen=True)
class Cluster:
    """A running cluster with the chart installed; `operator_image` also holds `sluice load`."""

    kube: Kube
    operator_image: str
    worker_image: str

    @classmethod
    def installed(cls) -> "Cluster":
        """The cluster that is up, with the chart and our images; raises NoClusterError."""
        settings = ClusterSettings.from_environment()
        state = State.read(settings.paths.state_file)
        if state is None:
            raise NoClusterError(f"no cluster is up ({HOW})")
        kubectl = binaries.folder(settings.paths) / "kubectl"
        if not succeeds([kubectl, f"--kubeconfig={state.kubeconfig}", "get", "--raw=/readyz"]):
            raise NoClusterError(f"the cluster does not answer ({HOW})")
        if not state.images:
            raise NoClusterError(f"the cluster has none of our images ({HOW})")
        kube = Kube(Path(state.kubeconfig), binaries.folder(settings.paths))
        kube.run(
            "helm", "upgrade", "--install", "sluice", str(CHART), "--namespace", SYSTEM,
            "--create-namespace", "--wait", "--timeout", "120s",
            "--set", f"image={state.images['operator']}",
            "--set", f"worker.image={state.images['worker']}",
        )  # fmt: skip
        return cls(kube, state.images["operator"], state.images["worker"])

    def apply(self, name: str, checkpoint: str, **spec: object) -> None:
        """Apply an InferenceService on CPU; `spec` holds further top-level fields."""
        body: dict[str, object] = {
            "model": {"uri": f"file:///models/{checkpoint}"},
            "hardware": {"accelerator": "cpu", "cpu": "500m", "memory": "2Gi"},
            **spec,
        }
        manifest = {
            "apiVersion": "sluice.dev/v1alpha1",
            "kind": "InferenceService",
            "metadata": {"name": name, "namespace": NAMESPACE},
            "spec": body,
        }
        self.kube.kubectl("apply", "-f", "-", stdin=json.dumps(manifest))

    def patch(self, name: str, spec: Mapping[str, object]) -> None:
        """Merge `spec` into the object's."""
        self.kube.patch("infs", name, {"spec": spec})

    def wait_condition(
        self, name: str, kind: str, status: str, seconds: float = 180
    ) -> Mapping[str, Any]:
        """Wait for a condition's status; the condition."""

        def look() -> Mapping[str, Any] | None:
            seen = condition(self.kube.inference_service(name), kind)
            return seen if seen.get("status") == status else None

        try:
            return wait_for(f"{name} {kind}={status}", seconds, look)
        except KubeError as e:
            raise AssertionError(f"{e}; the object says {self.status(name)}") from e

    def wait_status(self, name: str, what: str, seconds: float, holds: Any) -> dict[str, Any]:
        """Wait until `holds(status)`; the status."""
        try:
            return wait_for(what, seconds, lambda: s if holds(s := self.status(name)) else None)
        except KubeError as e:
            raise AssertionError(f"{e}; the object says {self.status(name)}") from e

    def status(self, name: str) -> dict[str, Any]:
        """The object's status."""
        return dict(self.kube.inference_service(name).get("status") or {})

    def identities(self, name: str) -> dict[str, int]:
        """Pod UID -> restarts."""
        return {
            pod["metadata"]["uid"]: sum(
                c["restartCount"] for c in pod["status"].get("containerStatuses", [])
            )
            for pod in self.kube.pods(name)
        }

    @contextmanager
    def offering(self, resource: str, count: int) -> Iterator[None]:
        """A node that has `count` of an extended resource, in name only."""
        node = self.kube.get("nodes")["items"][0]["metadata"]["name"]
        path = f"/status/capacity/{resource.replace('/', '~1')}"
        patch = ("patch", "node", node, "--subresource=status", "--type=json", "-p")
        added = {"op": "add", "path": path, "value": str(count)}
        self.kube.kubectl(*patch, json.dumps([added]))
        try:
            yield
        finally:
            self.kube.kubectl(*patch, json.dumps([{"op": "remove", "path": path}]))

    def signal_engine(
        self, name: str, signal: str, *, container: str = "worker", word: str = ENGINE
    ) -> None:
        """Send `signal` to the process in the object's only pod that has `word` in its command."""
        [pod] = [pod["metadata"]["name"] for pod in self.kube.pods(name)]
        command = ("python3", "-c", _SIGNAL, signal, word)
        self.kube.kubectl("exec", "-n", NAMESPACE, pod, "-c", container, "--", *command)

    def delete(self, name: str) -> None:
        """Delete the object and wait until its pods are gone."""
        self.kube.kubectl("delete", "infs", name, "--ignore-not-found", "--wait=true")
        wait_for("the pods to go", 90, lambda: True if not self.kube.pods(name) else None)

    def complete(self, name: str, body: Mapping[str, object]) -> dict[str, Any]:
        """POST /v1/completions through the Service."""
        with self.kube.service_url(name) as url:
            response = httpx.post(f"{url}/v1/completions", json=body, timeout=60)
        assert response.status_code == 200, response.text
        return dict(response.json())

    def events(self, name: str) -> list[dict[str, Any]]:
        """Events of the object, oldest first."""
        return self.kube.events(name)

    def load(self, pod: str, name: str, *phases: str, **flags: object) -> list[dict[str, Any]]:
        """Run `sluice load` in a pod to its end; its phase summaries."""
        self.start_load(pod, name, *phases, **flags)
        return self.finish_load(pod)

    def start_load(self, pod: str, name: str, *phases: str, **flags: object) -> None:
        """Start `sluice load` in a pod. Flags: capacity=3.0 is `--capacity 3.0`."""
        self.kube.kubectl("delete", "pod", pod, "--ignore-not-found", "--wait=true")
        argv = [w for k, v in flags.items() for w in (f"--{k.replace('_', '-')}", *str(v).split())]
        self.kube.start_load(pod, self.operator_image, name, "--phases", *phases, *argv)

    def finish_load(self, pod: str) -> list[dict[str, Any]]:
        """Follow a load pod to its end; its phase summaries."""
        lines = self.kube.follow("kubectl", "logs", "-f", "-n", NAMESPACE, pod)
        records = [json.loads(line) for line in lines if line.startswith("{")]
        self.kube.kubectl("delete", "pod", pod, "--wait=false")
        return [record for record in records if "phase" in record]


def is_ready(pod: Mapping[str, Any]) -> bool:
    """Whether a live pod is Ready, also one that is leaving."""
    conditions = pod["status"].get("conditions", ())
    return any(c["type"] == "Ready" and c["status"] == "True" for c in conditions)


def lost(phases: Sequence[Mapping[str, Any]]) -> int:
    """Tries that brought no whole answer: those of requests that never got one, and those that
    their client had to repeat."""
    failed = sum(int(p["sent"]) - int(p["results"].get("ok", 0)) for p in phases)
    return failed + sum(int(p["retries"]) for p in phases)
