"""What the operator takes for granted of LeaderWorkerSets, seen on pods that only wait."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from demo.kube import wait_for
from e2e.kit import Cluster, is_ready
from groups.lws import IN_DNS
from sluice.kube import NAMESPACE

pytestmark = [pytest.mark.timeout(180)]
NAME, SELECTOR = "e2e-lws", "leaderworkerset.sigs.k8s.io/name=e2e-lws"
LEADER, WORKER = f"{NAME}-0", f"{NAME}-0-1"
_DRAIN_S = 4
_WAITS = """
import os, signal, socket, sys, time
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
print(*(os.environ[f"LWS_{name}"] for name in ("LEADER_ADDRESS", "GROUP_SIZE", "WORKER_INDEX")))
while sys.argv[1] == "finds":
    try:
        print(socket.gethostbyname(os.environ["LWS_LEADER_ADDRESS"]), flush=True)
        break
    except OSError:
        time.sleep(0.5)
sys.stdout.flush()
signal.sigwait([signal.SIGTERM])
time.sleep(float(sys.argv[2]))
"""


def _container(name: str, image: str, *args: str, **more: object) -> dict[str, Any]:
    return {"name": name, "image": image, "command": ["python3", "-c", _WAITS, *args], **more}


def _pods(cluster: Cluster) -> dict[str, dict[str, Any]]:
    items = cluster.kube.get("pods", "-n", NAMESPACE, "-l", SELECTOR)["items"]
    return {pod["metadata"]["name"]: pod for pod in items}


def _ids(pods: dict[str, dict[str, Any]]) -> set[str]:
    return {pod["metadata"]["uid"] for pod in pods.values()}


def _leaving(pods: dict[str, dict[str, Any]]) -> set[str]:
    return {name for name, pod in pods.items() if "deletionTimestamp" in pod["metadata"]}


def _all_ready(cluster: Cluster, not_of: set[str]) -> dict[str, dict[str, Any]]:
    """Wait for the pods of the group, none of which is one of `not_of`."""

    def look() -> dict[str, dict[str, Any]] | None:
        pods = _pods(cluster)
        are = pods.keys() == {LEADER, WORKER} and not _leaving(pods) and not _ids(pods) & not_of
        return pods if are and all(map(is_ready, pods.values())) else None

    return wait_for("a whole group", 60, look)


@pytest.fixture
def group(groups: Cluster) -> Iterator[Cluster]:
    """The cluster with one group of two pods."""
    image = groups.operator_image
    engine = _container("engine", image, "waits", "0", restartPolicy="Always")
    gate = _container("gate", image, "waits", str(_DRAIN_S))
    follower = _container("engine", image, "finds", "0")
    template = {
        "size": 2,
        "leaderTemplate": {"spec": {**IN_DNS, "initContainers": [engine], "containers": [gate]}},
        "workerTemplate": {"spec": {**IN_DNS, "containers": [follower]}},
    }
    manifest = {
        "apiVersion": "leaderworkerset.x-k8s.io/v1",
        "kind": "LeaderWorkerSet",
        "metadata": {"name": NAME, "namespace": NAMESPACE},
        "spec": {"replicas": 1, "leaderWorkerTemplate": template},
    }
    groups.kube.kubectl("apply", "--server-side", "-f", "-", stdin=json.dumps(manifest))
    yield groups
    groups.kube.kubectl("delete", "lws", "-n", NAMESPACE, NAME)
    wait_for("the pods to go", 60, lambda: True if not _pods(groups) else None)


def test_a_group_knows_its_leader_restarts_as_one_and_drains_before_it_breaks(
    group: Cluster,
) -> None:
    pods = _all_ready(group, set())
    logs = ("logs", "-n", NAMESPACE)
    address = f"{LEADER}.{NAME}.{NAMESPACE}"
    assert group.kube.kubectl(*logs, LEADER, "-c", "engine").split() == [address, "2", "0"]
    told = group.kube.kubectl(*logs, WORKER).split()
    assert told == [address, "2", "1", pods[LEADER]["status"]["podIP"]]

    ends = ("python3", "-c", "import os; os.kill(1, 15)")
    group.kube.kubectl("exec", "-n", NAMESPACE, LEADER, "-c", "engine", "--", *ends)
    _all_ready(group, _ids(pods))

    group.kube.kubectl("scale", "lws", "-n", NAMESPACE, NAME, "--replicas=0")
    seen = []

    def gone() -> bool | None:
        seen.append(_leaving(now := _pods(group)))
        return None if LEADER in now else True

    wait_for("the first pod to go", 60, gone)
    assert {LEADER} in seen, "it leaves"
    assert all(WORKER not in leaving for leaving in seen[:-1]), "while it does, the other stays"
