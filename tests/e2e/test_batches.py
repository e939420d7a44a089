"""InferenceBatches on real pods: one beside a service through two kills, one with an engine."""

import json
from collections.abc import Iterator
from typing import Any

import pytest
from demo.kube import wait_for
from e2e.kit import SYSTEM, Cluster
from sluice.kube import NAMESPACE

pytestmark = [pytest.mark.timeout(900)]
SERVICE, VOLUME, FILES = "e2e-batched", "e2e-batches", "e2e-files"
NUM = 1000
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


@pytest.fixture(scope="module")
def files(cluster: Cluster) -> Iterator[Files]:
    files = Files(cluster)
    files.make()
    yield files
    files.remove()


@pytest.fixture(scope="module")
def service(cluster: Cluster) -> Iterator[Cluster]:
    cluster.apply(SERVICE, "demo")
    cluster.wait_condition(SERVICE, "Ready", "True", 300)
    yield cluster
    cluster.delete(SERVICE)


def lines(num: int, model: str, max_tokens: int) -> str:
    made = []
    for number in range(num):
        body = {"model": model, "prompt": f"def f{number}(x):", "max_tokens": max_tokens}
        line = {"custom_id": str(number), "method": "POST", "url": "/v1/completions", "body": body}
        made.append(json.dumps(line) + "\n")
    return "".join(made)


def start(cluster: Cluster, name: str, **spec: Any) -> None:
    apply(cluster, "sluice.dev/v1alpha1", "InferenceBatch", name, spec=spec)


def wait(cluster: Cluster, name: str, what: str, seconds: float, holds: Any) -> dict[str, Any]:
    """Wait until `holds(status)`; the status."""

    def look() -> dict[str, Any] | None:
        status = cluster.kube.get("infbatch", name, "-n", NAMESPACE).get("status") or {}
        print(json.dumps({k: v for k, v in status.items() if k != "conditions"}))
        return status if holds(status) else None

    return wait_for(what, seconds, look)


def kill(cluster: Cluster, namespace: str, selector: str) -> None:
    """Kill pods as if their node were lost: at once, and without a word."""
    now = ("--force", "--grace-period=0", "--wait=false")
    cluster.kube.kubectl("delete", "pod", "-n", namespace, "-l", selector, *now)


def test_a_thousand_prompts_beside_a_service_outlive_a_killed_pod_and_a_killed_operator(
    service: Cluster, files: Files
) -> None:
    files.write("in.jsonl", lines(NUM, SERVICE, 160))
    claim = {"claimName": VOLUME}
    given, to = {**claim, "path": "in.jsonl"}, {**claim, "path": "out"}
    start(service, "e2e-batch", input=given, output=to, serviceRef={"name": SERVICE})
    try:
        wait(service, "e2e-batch", "some results", 180, lambda s: completed(s) >= 50)
        kill(service, NAMESPACE, "app.kubernetes.io/instance=e2e-batch.batch")
        before = wait(service, "e2e-batch", "more of them", 180, lambda s: completed(s) >= 200)
        assert before["state"] == "in_progress"
        kill(service, SYSTEM, "app.kubernetes.io/name=sluice-operator")
        after = wait(service, "e2e-batch", "the end", 400, lambda s: s.get("state") == "completed")
        assert after["counts"] == {"total": NUM, "completed": NUM, "failed": 0}
        told = {c["type"]: (c["status"], c["reason"]) for c in after["conditions"]}
        assert told["Succeeded"] == ("True", "AllSucceeded")
        found = files.read("out/out.0.jsonl")
        assert sorted(int(one["custom_id"]) for one in found) == [*range(NUM)]
        assert {one["response"]["status_code"] for one in found} == {200}
        shown = service.kube.kubectl("get", "infbatch", "e2e-batch", "-n", NAMESPACE)
        assert "completed" in shown
    finally:
        delete(service, "e2e-batch")
    assert len(files.read("out/out.0.jsonl")) == NUM  # the output stays


def test_an_engine_of_its_own_ends_with_each_shard(cluster: Cluster, files: Files) -> None:
    apply(cluster, "v1", "ConfigMap", "e2e-lines", data={"in.jsonl": lines(20, "e2e-own", 8)})
    start(
        cluster,
        "e2e-own",
        input={"configMap": {"name": "e2e-lines", "key": "in.jsonl"}},
        output={"claimName": VOLUME, "path": "own"},
        model={"uri": "file:///models/demo"},
        engine={"name": "Sluice"},
        hardware={"accelerator": "cpu", "cpu": "500m", "memory": "2Gi"},
        shards=2,
        parallelism=2,
    )
    try:
        end = wait(cluster, "e2e-own", "the end", 400, lambda s: s.get("state") == "completed")
        assert end["counts"] == {"total": 20, "completed": 20, "failed": 0}
        assert end["shards"]["done"] == 2
        found = [one for shard in range(2) for one in files.read(f"own/out.{shard}.jsonl")]
        assert sorted(int(one["custom_id"]) for one in found) == [*range(20)]
    finally:
        delete(cluster, "e2e-own")
        cluster.kube.kubectl("delete", "configmap", "e2e-lines", "-n", NAMESPACE)


def completed(status: dict[str, Any]) -> int:
    return int((status.get("counts") or {}).get("completed") or 0)


def delete(cluster: Cluster, name: str) -> None:
    """Delete the object; its Job and pods go with it."""
    cluster.kube.kubectl("delete", "infbatch", name, "-n", NAMESPACE)

    def look() -> bool | None:
        pods = cluster.kube.get(
            "pods", "-n", NAMESPACE, "-l", f"batch.kubernetes.io/job-name={name}"
        )
        return None if pods["items"] else True

    wait_for("its pods to go", 120, look)
