"""Two installations that watch one namespace: one cares for an object, until it is handed over."""

from __future__ import annotations

import itertools
from contextlib import AbstractContextManager
from pathlib import Path

import httpx
from integration.apiserver import ApiServer
from integration.operator_runs import (
    Namespace,
    OperatorProcess,
    create_demo,
    create_namespace,
    running_operator,
    settle,
)

_numbers = itertools.count()


def _image(space: Namespace) -> str:
    spec = space.get("deployments", "demo")["spec"]["template"]["spec"]
    found: str = spec["containers"][0]["image"]
    return found


def test_one_cares_and_the_other_tells_how_to_hand_it_over(
    apiserver: ApiServer, client: httpx.Client, models: Path, tmp_path: Path
) -> None:
    space = create_namespace(client, f"installations-{next(_numbers)}")

    def installed(name: str) -> AbstractContextManager[OperatorProcess]:
        log = tmp_path / f"{name}.log"
        flags = ("--resync-seconds=2", f"--instance={name}", f"--worker-image=registry/{name}:1")
        return running_operator(apiserver, models, log, space.name, *flags)

    create_demo(space)
    with installed("one") as one, installed("two") as two:
        one.wait("the children", space.has_children)
        owner = _image(space).removeprefix("registry/").removesuffix(":1")
        first, second = (one, two) if owner == "one" else (two, one)
        other = {"one": "two", "two": "one"}[owner]
        second.wait("the refusal", lambda: bool(space.events("OtherOperator")), 60.0)
        [said] = space.events("OtherOperator")
        assert f"installation {owner} cares for it, so {other} leaves it alone" in said
        settle(first, space)
        generation = space.get("deployments", "demo")["metadata"]["generation"]
        for operator in (first, second):
            operator.await_passes(3)
        assert space.get("deployments", "demo")["metadata"]["generation"] == generation
        first.kill()
        second.await_passes(3)
        assert _image(space) == f"registry/{owner}:1", "nothing changes hands by time"
        name, _, value = said.rpartition(" ")[2].partition("=")
        space.patch("configmaps", "demo-runtime", {"metadata": {"annotations": {name: value}}})
        second.wait("the other's image", lambda: _image(space) == f"registry/{other}:1")
