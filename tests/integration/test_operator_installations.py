"""Two installations that watch one namespace: one cares for an object, and the other takes over."""

from __future__ import annotations

import itertools
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import httpx
import pytest
from integration.apiserver import ApiServer
from integration.operator_runs import (
    Namespace,
    OperatorProcess,
    api_client,
    create_demo,
    create_namespace,
    running_operator,
    settle,
)
from sluice_operator.cluster.client import Cluster, ClusterError
from sluice_operator.loop.ownership import ASKING_MANAGER, question
from sluice_operator.metrics import Metrics

_numbers = itertools.count()


def _image(space: Namespace) -> str:
    spec = space.get("deployments", "demo")["spec"]["template"]["spec"]
    found: str = spec["containers"][0]["image"]
    return found


async def test_a_question_never_makes_a_configmap(
    apiserver: ApiServer, client: httpx.Client
) -> None:
    space = create_namespace(client, f"installations-{next(_numbers)}")
    made = space.create("configmaps", {"metadata": {"name": "demo-runtime"}})
    cluster = Cluster(api_client(apiserver), Metrics())
    made |= {"kind": "ConfigMap"}
    await cluster.apply(question(made, "two"), manager=ASKING_MANAGER)
    assert "two" in space.get("configmaps", "demo-runtime")["metadata"]["annotations"].values()
    space.delete("configmaps", "demo-runtime")
    with pytest.raises(ClusterError) as refused:
        await cluster.apply(question(made, "two"), manager=ASKING_MANAGER)
    assert refused.value.status == 409
    assert space.find("configmaps", "demo-runtime") is None


def test_one_cares_and_the_other_takes_over_when_it_is_gone(
    apiserver: ApiServer, client: httpx.Client, models: Path, tmp_path: Path
) -> None:
    space = create_namespace(client, f"installations-{next(_numbers)}")

    def installed(name: str) -> AbstractContextManager[OperatorProcess]:
        log = tmp_path / f"{name}.log"
        flags = ("--resync-seconds=2", f"--instance={name}", f"--worker-image=registry/{name}:1")
        return running_operator(apiserver, models, log, space.name, *flags)

    def stalled() -> dict[str, Any]:
        return space.condition("Stalled")

    create_demo(space)
    with installed("two") as two:
        settle(two, space)
        two.kill()
    with installed("one") as one:
        one.wait("the take-over", lambda: _image(space) == "registry/one:1", 60.0)
        with installed("two") as two:
            two.wait("the answer", lambda: bool(space.events("OtherOperator")), 60.0)
            assert "operator one cares for it" in space.events("OtherOperator")[0]
            one.wait("the rival's name", lambda: stalled().get("reason") == "OtherOperator")
            assert "operator two asks for it too" in stalled()["message"]
            generation = space.get("deployments", "demo")["metadata"]["generation"]
            two.await_passes(3)
            one.await_passes(3)
            assert _image(space) == "registry/one:1"
            assert space.get("deployments", "demo")["metadata"]["generation"] == generation
            one.kill()
            two.wait("the take-over", lambda: _image(space) == "registry/two:1", 120.0)
            asked = "sluice.dev/asked-by"

            def is_answered() -> bool:
                meta = space.get("configmaps", "demo-runtime")["metadata"]
                return asked not in meta["annotations"]

            two.wait("the end of the question", is_answered)
