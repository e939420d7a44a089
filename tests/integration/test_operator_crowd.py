"""Objects of others that bear our label: an operator starts beside them, and in its memory."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from integration.apiserver import ApiServer
from integration.operator_runs import Namespace, create_demo, create_namespace, running_operator
from sluice_operator.children.manifests import INSTANCE_LABEL, MANAGED_BY, MANAGED_BY_LABEL

LABELS = {MANAGED_BY_LABEL: MANAGED_BY, INSTANCE_LABEL: "demo"}
NUM_LARGE, LARGE = 150, "x" * 1_000_000
NUM_SMALL = 1500


@pytest.fixture(scope="module")
def space(client: httpx.Client) -> Namespace:
    """With an object, and beside it what anybody may make who may make ConfigMaps and pods."""
    space = create_namespace(client, "crowd")

    def create(number: int) -> None:
        name = {"metadata": {"name": f"other-{number}", "labels": LABELS}}
        if number < NUM_LARGE:
            space.create("configmaps", {**name, "data": {"x": LARGE}})
            return
        space.create("configmaps", name)
        if number % 10 == 0:
            large = [{"name": "X", "value": LARGE[:500_000]}]
            spec = {"containers": [{"name": "worker", "image": "none", "env": large}]}
            space.create("pods", {**name, "spec": spec})

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(create, range(NUM_SMALL)))
    create_demo(space)
    return space


def _peak_mib(pid: int) -> int:
    [line] = [s for s in Path(f"/proc/{pid}/status").read_text().splitlines() if "VmHWM" in s]
    return int(line.split()[1]) >> 10


def test_an_operator_starts_beside_a_crowd_and_keeps_nothing_of_it(
    apiserver: ApiServer, space: Namespace, models: Path, tmp_path: Path
) -> None:
    """With kopf's indices it took all of them into memory, 784 MiB here and more than the chart's
    limit with twice as many, and began after 22 s; now after 3."""
    with running_operator(apiserver, models, tmp_path / "log", space.name) as operator:
        operator.wait("the children", space.has_children)
        operator.await_passes(3)
        assert _peak_mib(operator.process.pid) < 400
