"""Batches on the cluster: their objects, and a claim whose files can be written and read."""

import json
from typing import Any

from demo.kube import wait_for
from e2e.kit import Cluster
from sluice.kube import NAMESPACE

SERVICE, VOLUME, FILES = "e2e-batched", "e2e-batches", "e2e-files"
_WAITS = """
import os, signal
os.chmod("/data", 0o777)
signal.sigwait([signal.SIGTERM])
"""
_WRITES = "import sys; open(sys.argv[1], 'w').write(sys.stdin.read())"
_READS = "import sys; print(open(sys.argv[1]).read(), end='')"
_CLEARS = "import shutil; [shutil.rmtree(f'/data/{n}', True) for n in ('out', 'own')]"


class Files:
    """A claim, and a pod that writes to it and reads from it as root."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster

    def make(self) -> None:
        """Make both, with an empty folder."""
        size, mode = {"storage": "1Gi"}, ["ReadWriteMany"]
        where = {"path": f"/var/lib/sluice-{VOLUME}", "type": "DirectoryOrCreate"}
        volume = {"capacity": size, "accessModes": mode, "storageClassName": VOLUME}
        claim = {"accessModes": mode, "storageClassName": VOLUME, "resources": {"requests": size}}
        container = {
            "name": "files",
            "image": self._cluster.operator_image,
            "command": ["python3", "-c", _WAITS],
            "securityContext": {"runAsUser": 0},
            "volumeMounts": [{"name": "data", "mountPath": "/data"}],
        }
        data = {"name": "data", "persistentVolumeClaim": {"claimName": VOLUME}}
        pod = {"containers": [container], "volumes": [data], "terminationGracePeriodSeconds": 1}
        self._apply("PersistentVolume", VOLUME, {**volume, "hostPath": where})
        self._apply("PersistentVolumeClaim", VOLUME, claim)
        self._apply("Pod", FILES, pod)
        kube = self._cluster.kube
        kube.kubectl(
            "wait", f"pod/{FILES}", "-n", NAMESPACE, "--for=condition=Ready", "--timeout=2m"
        )
        self._run(_CLEARS)

    def remove(self) -> None:
        """Remove all three."""
        self._run(_CLEARS)
        for kind, name in (("pod", FILES), ("pvc", VOLUME), ("pv", VOLUME)):
            self._cluster.kube.kubectl("delete", kind, name, "--ignore-not-found")

    def write(self, name: str, text: str) -> None:
        """Write a file of the claim."""
        self._run(_WRITES, f"/data/{name}", stdin=text)

    def read(self, name: str) -> list[dict[str, Any]]:
        """The lines of a file of the claim."""
        return [json.loads(line) for line in self._run(_READS, f"/data/{name}").splitlines()]

    def _run(self, program: str, *argv: str, stdin: str | None = None) -> str:
        at = ("exec", "-i", "-n", NAMESPACE, FILES, "--", "python3", "-c", program)
        return self._cluster.kube.kubectl(*at, *argv, stdin=stdin)

    def _apply(self, kind: str, name: str, spec: dict[str, Any]) -> None:
        apply(self._cluster, "v1", kind, name, spec=spec)


def apply(cluster: Cluster, version: str, kind: str, name: str, **rest: Any) -> None:
    meta = {"name": name, "namespace": NAMESPACE}
    if kind == "PersistentVolume":
        del meta["namespace"]
    body = {"apiVersion": version, "kind": kind, "metadata": meta, **rest}
    cluster.kube.kubectl("apply", "-f", "-", stdin=json.dumps(body))


def lines(num: int, model: str, max_tokens: int, **more: Any) -> str:
    made = []
    for number in range(num):
        body = {"model": model, "prompt": f"def f{number}(x):", "max_tokens": max_tokens, **more}
        line = {"custom_id": str(number), "method": "POST", "url": "/v1/completions", "body": body}
        made.append(json.dumps(line) + "\n")
    return "".join(made)


def start(cluster: Cluster, name: str, **spec: Any) -> None:
    apply(cluster, "sluice.dev/v1alpha1", "InferenceBatch", name, spec=spec)


def wait(cluster: Cluster, name: str, what: str, seconds: float, holds: Any) -> dict[str, Any]:
    """Wait until `holds(status)`; the status."""

    def found() -> dict[str, Any] | None:
        status = look(cluster, name)
        return status if holds(status) else None

    return wait_for(what, seconds, found)


def look(cluster: Cluster, name: str) -> dict[str, Any]:
    """The status as it is, which is printed without its conditions."""
    status: dict[str, Any] = cluster.kube.get("infbatch", name, "-n", NAMESPACE).get("status") or {}
    print(json.dumps({k: v for k, v in status.items() if k != "conditions"}))
    return status


def kill(cluster: Cluster, namespace: str, selector: str) -> None:
    """Kill pods as if their node were lost: at once, and without a word."""
    now = ("--force", "--grace-period=0", "--wait=false")
    cluster.kube.kubectl("delete", "pod", "-n", namespace, "-l", selector, *now)


def drain(cluster: Cluster, selector: str) -> None:
    """Evict the pods as a drain of their node does, which takes pods again once they are gone."""
    [node] = cluster.kube.get("nodes")["items"]
    name = node["metadata"]["name"]
    rest = ("--ignore-daemonsets", "--delete-emptydir-data", "--timeout=120s")
    try:
        cluster.kube.kubectl("drain", name, f"--pod-selector={selector}", *rest)
    finally:
        cluster.kube.kubectl("uncordon", name)


def completed(status: dict[str, Any]) -> int:
    return int((status.get("counts") or {}).get("completed") or 0)


def delete(cluster: Cluster, name: str) -> None:
    """Delete the object; its Job and pods go with it."""
    cluster.kube.kubectl("delete", "infbatch", name, "-n", NAMESPACE)

    def is_gone() -> bool | None:
        pods = cluster.kube.get(
            "pods", "-n", NAMESPACE, "-l", f"batch.kubernetes.io/job-name={name}"
        )
        return None if pods["items"] else True

    wait_for("its pods to go", 120, is_gone)
