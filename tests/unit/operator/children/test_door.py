"""Claims on `spec.api`: what the door of a pod is told, and which pods an edit restarts."""

from __future__ import annotations

from typing import Any

import pytest
from sluice_operator.children import manifests
from sluice_operator.children.manifests import TEMPLATE_INPUTS_ANNOTATION
from unit.operator.observations import SETTINGS, create_service

API = {"maxBodySize": "256Mi", "keepAliveTimeout": "15m", "trustedProxies": ["10.0.0.0/8"]}
OTHER = {"name": "Custom", "image": "r/e:1"}


def _made(**changes: Any) -> dict[str, Any]:
    service = create_service(**changes)
    return manifests.workload(service, SETTINGS, ceiling=8, replicas=1, live=None)


def _door(**changes: Any) -> dict[str, Any]:
    """The container that clients reach."""
    [container] = _made(**changes)["spec"]["template"]["spec"]["containers"]
    found: dict[str, Any] = container
    return found


@pytest.mark.parametrize("engine", [{"name": "Sluice"}, OTHER], ids=lambda engine: engine["name"])
def test_the_door_is_told_what_the_object_says(engine: dict[str, str]) -> None:
    said = {
        f"--max-body-bytes={256 << 20}", "--keep-alive-timeout=900",
        '--trusted-proxies=["10.0.0.0/8"]',
    }  # fmt: skip
    assert said <= set(_door(engine=engine, api=API)["args"])


def _flags(container: dict[str, Any]) -> dict[str, str]:
    given = (arg.removeprefix("--").partition("=") for arg in container["args"])
    return {name: value for name, _, value in given}


def test_a_door_that_nobody_described_is_told_nothing_but_the_body_of_another_engine() -> None:
    names = {"max-body-bytes", "keep-alive-timeout", "trusted-proxies"}
    assert names.isdisjoint(_flags(_door()))
    flags = _flags(_door(engine=OTHER))
    assert flags["max-body-bytes"] == str(64 << 20)
    assert names & flags.keys() == {"max-body-bytes"}


@pytest.mark.parametrize(
    ("size", "limit", "num_bytes"),
    [(None, "640Mi", 256 << 20), ("1Ki", "304Mi", 64 << 20), ("256Mi", "1984Mi", 1024 << 20)],
)
def test_a_gate_has_memory_for_several_of_the_largest_bodies_and_knows_how_much(
    size: str | None, limit: str, num_bytes: int
) -> None:
    gate = _door(engine=OTHER, api={"maxBodySize": size} if size else {})
    assert gate["resources"]["limits"]["memory"] == limit
    assert _flags(gate)["memory-bytes"] == str(num_bytes)


@pytest.mark.parametrize("field", API)
def test_an_edit_of_the_door_restarts_pods(field: str) -> None:
    def inputs(**changes: Any) -> str:
        hashed: str = _made(**changes)["metadata"]["annotations"][TEMPLATE_INPUTS_ANNOTATION]
        return hashed

    assert inputs(api={field: API[field]}) != inputs()
    assert inputs(api={}) == inputs(api={"trustedProxies": []}) == inputs()
