"""Pods of a local cluster that cannot reach the operator, as behind a NetworkPolicy."""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from e2e.kit import SYSTEM, Cluster
from sluice_cluster.settings import ClusterSettings
from sluice_cluster.shell import run
from sluice_cluster.state import State


def is_mutable(cluster: Cluster) -> bool:
    """True if the cluster's pods have their networks on this machine."""
    state = State.read(ClusterSettings.from_environment().paths.state_file)
    return state is not None and state.kind == "local"


def _process_of(pod: dict[str, Any]) -> str:
    """The id of a process in the pod."""
    for told in Path("/proc").glob("[0-9]*/cgroup"):
        with suppress(OSError):  # it has just ended
            if pod["metadata"]["uid"] in told.read_text():
                return told.parent.name
    raise AssertionError("no process is in the pod")


@contextmanager
def mute(cluster: Cluster, name: str) -> Iterator[None]:
    """The object's only pod has no way back to the operator. The kubelet reaches it meanwhile."""
    [pod] = cluster.kube.pods(name)
    operator = "app.kubernetes.io/name=sluice-operator"
    [one] = cluster.kube.get("pods", "-n", SYSTEM, "-l", operator)["items"]
    inside = ("nsenter", "-t", _process_of(pod), "-n", "ip", "route")
    route = ("blackhole", f"{one['status']['podIP']}/32")
    run([*inside, "add", *route])
    try:
        yield
    finally:
        run([*inside, "del", *route])
