"""`cluster`: as of the end-to-end tests. `watch`: a Prometheus that scrapes it."""

from __future__ import annotations

from collections.abc import Iterator

import prometheus
import pytest
from e2e.kit import Cluster
from prometheus import Prometheus
from sluice.processes import free_ports

WINDOWS = {"15m": "15s"}
"""Half a minute without a result is as good as half an hour."""


@pytest.fixture(scope="session")
def cluster() -> Cluster:
    """The cluster that is up, with the chart."""
    return Cluster.installed()


@pytest.fixture(scope="session")
def watch(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    """It waits a second, not minutes, before an alert fires."""
    assert not (why := prometheus.lacks()), why
    [port] = free_ports(1)
    folder = tmp_path_factory.mktemp("prometheus")
    with prometheus.watching(cluster.kube, folder, port, WINDOWS) as one:
        yield one
