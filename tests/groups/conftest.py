"""`groups`: the cluster that is up, with the chart and LeaderWorkerSets."""

from __future__ import annotations

import pytest
from e2e.kit import Cluster
from groups import lws


@pytest.fixture(scope="session")
def groups() -> Cluster:
    """The cluster, which has LeaderWorkerSets from now on."""
    cluster = Cluster.installed()
    lws.install(cluster.kube)
    return cluster
