"""Devices by any name: where there are none, the scheduler's words; where there are, a pod."""

import pytest
from demo.kube import wait_for
from e2e.kit import Cluster
from e2e.test_hung_engine import PROGRAM

NAME, RESOURCE = "e2e-devices", "amd.com/gpu"
pytestmark = [pytest.mark.timeout(300)]


def test_a_pod_is_placed_where_its_devices_are_and_else_says_what_is_missing(
    cluster: Cluster,
) -> None:
    engine = {
        "name": "Custom",
        "image": cluster.operator_image,
        "command": ["python3", "-c", PROGRAM],
        "port": 8100,
        "healthPath": "/",
    }
    hardware = {"accelerator": "other", "resource": RESOURCE, "gpus": 2, "memory": "64Gi",
                "hostMemory": "512Mi", "cpu": "200m"}  # fmt: skip
    cluster.delete(NAME)
    try:
        cluster.apply(NAME, "demo", engine=engine, hardware=hardware, replicas=2)
        _missing(cluster, "Ready")
        with cluster.offering(RESOURCE, 3):
            ready = cluster.wait_condition(NAME, "Ready", "True")
            assert ready["message"].startswith("1 of 2 pods serve"), "the third is for nobody"
            _missing(cluster, "Ready", serving=True)
            placed = [pod for pod in cluster.kube.pods(NAME) if "nodeName" in pod["spec"]]
            [limits] = [
                one["resources"]["limits"]
                for pod in placed
                for one in pod["spec"]["initContainers"]
                if one["name"] == "engine"
            ]
            assert limits[RESOURCE] == "2"
            cluster.patch(NAME, {"replicas": 1})
            wait_for("one pod", 60, lambda: len(cluster.kube.pods(NAME)) == 1 or None)
    finally:
        cluster.delete(NAME)


def _missing(cluster: Cluster, kind: str, *, serving: bool = False) -> None:
    """Wait for the scheduler's words in the condition."""

    def told() -> bool | None:
        found = cluster.wait_condition(NAME, kind, "True" if serving else "False")
        says = f"Insufficient {RESOURCE}" in found["message"]
        return True if says and (serving or found["reason"] == "Unschedulable") else None

    wait_for("the scheduler's words", 60, told)
