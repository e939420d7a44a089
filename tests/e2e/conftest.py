"""`cluster`: the cluster that is up, with our images in it and the chart installed."""

from __future__ import annotations

import os

import pytest
from e2e.kit import Cluster, NoClusterError


@pytest.fixture(scope="session")
def cluster() -> Cluster:
    """Skips where no cluster is up; with SLUICE_REQUIRE_CLUSTER=1 that is a failure."""
    try:
        return Cluster.installed()
    except NoClusterError as missing:
        if os.environ.get("SLUICE_REQUIRE_CLUSTER") == "1":
            pytest.fail(f"SLUICE_REQUIRE_CLUSTER=1, but {missing}")
        pytest.skip(str(missing))
