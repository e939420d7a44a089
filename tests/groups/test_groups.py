"""Two groups of two pods behind one Service: edits, an eviction and a lost part beneath clients."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from demo.kube import wait_for
from e2e.kit import Cluster
from e2e.rolls import NAME, Rolls
from groups import engine
from groups.lws import IN_DNS
from sluice.kube import NAMESPACE, KubeError

pytestmark = [pytest.mark.timeout(900)]
_END = "import os, signal; os.kill(1, signal.SIGTERM)"


def spec_of(image: str) -> dict[str, Any]:
    """The demo model on two nodes, by an engine in parts, with small requests."""
    args = ["--model=$(SLUICE_MODEL)", "--served-model-name=$(SLUICE_MODEL_NAME)", "--device=cpu",
            "--host=127.0.0.1", "--port=8100", "--admin-port=0", "--max-num-seqs=8"]  # fmt: skip
    program = Path(engine.__file__).read_text()
    small = {"requests": {"cpu": "50m"}}
    containers = [{"name": "engine", "resources": small}, {"name": "gate", "resources": small}]
    return {
        "engine": {
            "name": "Custom",
            "image": image,
            "command": ["python3", "-c", program],
            "args": args,
            "healthPath": "/readyz",
        },
        "hardware": {"accelerator": "cpu", "cpu": "400m", "memory": "2Gi", "nodes": 2},
        "podTemplate": {"spec": {**IN_DNS, "containers": containers}},
    }


def names(cluster: Cluster, role: str) -> dict[str, str]:
    """Name and uid of the pods that lead or follow."""
    meta = [pod["metadata"] for pod in cluster.kube.pods(NAME)]
    kind = {"lead": "sluice-worker", "follow": "sluice-follower"}[role]
    picked = [one for one in meta if one["labels"]["app.kubernetes.io/name"] == kind]
    return {one["name"]: one["uid"] for one in picked}


def test_groups_are_replaced_evicted_and_scaled_in_without_a_lost_request(groups: Cluster) -> None:
    rolls = Rolls(groups, pods_each=2)
    try:
        rolls.start(**spec_of(groups.worker_image))
        assert len(names(groups, "lead")) == len(names(groups, "follow")) == 2
        groups.wait_status(NAME, "2 groups", 60, lambda now: now["readyReplicas"] == 2)
        ready = groups.wait_condition(NAME, "Ready", "True")
        assert ready["message"].startswith("2 of 2 pods serve")
        with rolls.loaded():
            seeded = [*spec_of(groups.worker_image)["engine"]["args"], "--seed=7"]
            rolls.roll({"engine": {"args": seeded}})
            evict(groups, rolls)
            rolls.scale_in()
        report = rolls.report
        assert (report.num_lost, report.num_sent > 100) == (0, True), str(report)
    finally:
        groups.delete(NAME)


def evict(cluster: Cluster, rolls: Rolls) -> None:
    """As `kubectl drain` does with a first pod's node; until both groups serve again."""
    name, uid = next(iter(names(cluster, "lead").items()))
    path = f"/api/v1/namespaces/{NAMESPACE}/pods/{name}/eviction"
    asked = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": name}}
    cluster.kube.kubectl("create", "--raw", path, "-f", "-", stdin=json.dumps(asked))
    rolls.settled(2, {uid})


def test_a_group_that_lost_a_part_restarts_as_one(groups: Cluster) -> None:
    rolls = Rolls(groups, pods_each=2)
    try:
        rolls.start(**spec_of(groups.worker_image))
        lead, follow = names(groups, "lead"), names(groups, "follow")
        lost = sorted(follow)[0]
        told = ("exec", "-n", NAMESPACE, lost, "-c", "engine", "--", "python3", "-c", _END)
        with suppress(KubeError):  # it may end with its container, before it has an exit code
            groups.kube.kubectl(*told)
        its_lead = lost.rpartition("-")[0]
        rolls.settled(2, {lead[its_lead], follow[lost]})
        kept = names(groups, "lead").keys() - {its_lead}
        assert all(names(groups, "lead")[name] == lead[name] for name in kept), "only one restarts"
    finally:
        groups.delete(NAME)


def test_a_first_pod_says_that_another_of_its_group_has_no_node(groups: Cluster) -> None:
    name, spec = "groups-waiting", spec_of(groups.worker_image)
    hardware = {"accelerator": "other", "resource": "sluice.dev/fake", "cpu": "200m",
                "memory": "2Gi", "nodes": 2}  # fmt: skip

    def told() -> bool | None:
        ready = groups.wait_condition(name, "Ready", "False")
        said = "of its group: " in ready["message"] and "sluice.dev/fake" in ready["message"]
        return True if ready["reason"] == "Unschedulable" and said else None

    try:
        with groups.offering("sluice.dev/fake", 1):
            groups.apply(name, "demo", **{**spec, "hardware": hardware})
            wait_for("the reason", 120, told)
    finally:
        groups.delete(name)
