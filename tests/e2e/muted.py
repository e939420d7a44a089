"""Pods of a local cluster that cannot reach the operator, as behind a NetworkPolicy."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from e2e.kit import SYSTEM, Cluster
from sluice_cluster.settings import ClusterSettings
from sluice_cluster.shell import run
from sluice_cluster.state import State


def is_mutable(cluster: Cluster) -> bool:
    """True if the cluster's pods have their networks on this machine."""
    state = State.read(ClusterSettings.from_environment().paths.state_file)
    return state is not None and state.kind == "local"


def _network_of(address: str) -> str:
    """The network namespace that has the address."""
    for one in json.loads(run(["ip", "-json", "netns", "list"])):
        told: list[dict[str, Any]] = json.loads(run(["ip", "-n", one["name"], "-json", "address"]))
        if any(a["local"] == address for link in told for a in link.get("addr_info", ())):
            return str(one["name"])
    raise AssertionError(f"no network namespace has {address}")


@contextmanager
def mute(cluster: Cluster, name: str) -> Iterator[None]:
    """The object's only pod has no way back to the operator. The kubelet reaches it meanwhile."""
    [pod] = cluster.kube.pods(name)
    operator = "app.kubernetes.io/name=sluice-operator"
    [one] = cluster.kube.get("pods", "-n", SYSTEM, "-l", operator)["items"]
    route = ["blackhole", f"{one['status']['podIP']}/32"]
    network = _network_of(pod["status"]["podIP"])
    run(["ip", "-n", network, "route", "add", *route])
    try:
        yield
    finally:
        run(["ip", "-n", network, "route", "del", *route])
