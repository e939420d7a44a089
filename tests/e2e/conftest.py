"""`cluster`: the cluster that is up, with both of our images in it."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import pytest
from sluice_cluster import binaries
from sluice_cluster.settings import Settings
from sluice_cluster.shell import Word, run, succeeds
from sluice_cluster.state import State

HOW = "python3 cluster/cluster.py up --images"


@dataclass(frozen=True, slots=True)
class Cluster:
    """A running Kubernetes; `images` maps operator and worker to what pods pull."""

    kind: str
    kubeconfig: Path
    images: dict[str, str]
    binaries: Path  # holds kubectl and helm

    def kubectl(self, *arguments: str, stdin: str | None = None, timeout: float = 60.0) -> str:
        """Output of kubectl; ClusterError with its error output if it fails."""
        command: list[Word] = [self.binaries / "kubectl", f"--kubeconfig={self.kubeconfig}"]
        return run([*command, *arguments], stdin=stdin, timeout=timeout)

    def helm(self, *arguments: str, timeout: float = 180.0) -> str:
        """Output of helm 4."""
        command: list[Word] = [self.binaries / "helm", f"--kubeconfig={self.kubeconfig}"]
        return run([*command, *arguments], timeout=timeout)


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
    folder = binaries.folder(settings.paths)
    return Cluster(state.kind, Path(state.kubeconfig), state.images, folder)
