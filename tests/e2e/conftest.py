"""`cluster`: the cluster that is up, with our images in it and the chart installed."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from e2e.kit import SYSTEM, Cluster
from sluice.kube import Kube
from sluice_cluster import binaries
from sluice_cluster.settings import Settings
from sluice_cluster.shell import succeeds
from sluice_cluster.state import State

HOW = "python3 cluster/cluster.py up --images"
CHART = Path(__file__).parents[2] / "charts" / "sluice"


def _missing(settings: Settings, state: State | None) -> str | None:
    if state is None:
        return f"no cluster is up ({HOW})"
    kubectl = binaries.folder(settings.paths) / "kubectl"
    if not succeeds([kubectl, f"--kubeconfig={state.kubeconfig}", "get", "--raw=/readyz"]):
        return f"the cluster does not answer ({HOW})"
    return None if state.images else f"the cluster has none of our images ({HOW})"


@pytest.fixture(scope="session")
def cluster() -> Cluster:
    """Skips where no cluster is up; with SLUICE_REQUIRE_CLUSTER=1 that is a failure."""
    settings = Settings.from_environment()
    state = State.read(settings.paths.state_file)
    missing = _missing(settings, state)
    if missing is not None and os.environ.get("SLUICE_REQUIRE_CLUSTER") == "1":
        pytest.fail(f"SLUICE_REQUIRE_CLUSTER=1, but {missing}")
    if missing is not None or state is None:
        pytest.skip(str(missing))
    kube = Kube(Path(state.kubeconfig), binaries.folder(settings.paths))
    kube.run(
        "helm", "upgrade", "--install", "sluice", str(CHART), "--namespace", SYSTEM,
        "--create-namespace", "--wait", "--timeout", "120s",
        "--set", f"image={state.images['operator']}",
        "--set", f"worker.image={state.images['worker']}",
    )  # fmt: skip
    return Cluster(kube, state.images["operator"])
