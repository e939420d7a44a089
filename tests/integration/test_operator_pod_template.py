"""An overlay of the pods on a real API server: what it takes, and whose mistake a refusal is."""

from __future__ import annotations

import copy
import time
from typing import Any

import pytest
from integration.operator_runs import (
    Namespace,
    OperatorProcess,
    create_demo,
    settle,
)

OVERLAY: dict[str, Any] = {
    "metadata": {"labels": {"team": "a"}},
    "spec": {
        "priorityClassName": "system-node-critical",
        "volumes": [{"name": "shm", "emptyDir": {"medium": "Memory"}}],
        "initContainers": [{"name": "fetch", "image": "r/f:1"}],
        "containers": [
            {
                "name": "engine",
                "env": [
                    {"name": "B", "valueFrom": {"secretKeyRef": {"name": "s", "key": "k"}}},
                    {"name": "A", "value": "$(B)"},
                ],
                "volumeMounts": [{"name": "shm", "mountPath": "/dev/shm"}],  # noqa: S108
                "resources": {"requests": {"cpu": "100m"}, "claims": [{"name": "gpu"}]},
            },
            {"name": "logs", "image": "r/l:1"},
        ],
        "resourceClaims": [{"name": "gpu", "resourceClaimTemplateName": "one-gpu"}],
    },
}


@pytest.mark.parametrize("engine", ["Sluice", "VLLM"])
def test_an_overlay_is_in_the_pods_and_the_server_changes_nothing_of_it(
    operator: OperatorProcess, space: Namespace, engine: str
) -> None:
    create_demo(space, podTemplate=OVERLAY, engine={"name": engine, "image": "r/e:1"})
    settle(operator, space)
    template = space.get("deployments", "demo")["spec"]["template"]
    pod = template["spec"]
    assert template["metadata"]["labels"]["team"] == "a"
    assert pod["priorityClassName"] == "system-node-critical"
    assert pod["resourceClaims"] == OVERLAY["spec"]["resourceClaims"]
    assert pod["initContainers"][0]["name"] == "fetch"
    assert pod["containers"][-1]["name"] == "logs"
    lies_in = pod["containers"][0] if engine == "Sluice" else pod["initContainers"][-1]
    patch = OVERLAY["spec"]["containers"][0]
    assert lies_in["env"][-2:] == patch["env"]
    assert lies_in["resources"]["claims"] == [{"name": "gpu"}]
    writes = operator.writes()
    operator.await_passes(3)
    assert operator.writes() == writes


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ({"prioritClassName": "a"}, ".spec.template.spec.prioritClassName: field not declared"),
        ({"priority": "high"}, ".spec.template.spec.priority"),
        ({"dnsPolicy": "Never"}, "spec.template.spec.dnsPolicy"),
        (
            {"containers": [
                {"name": "engine", "volumeMounts": [{"name": "none", "mountPath": "/a"}]}
            ]},
            'volumeMounts[3].name: Not found: "none"',
        ),
        ({"terminationGracePeriodSeconds": 9}, "spec.drain.timeout sets it"),
    ],
)  # fmt: skip
def test_a_mistake_in_an_overlay_is_the_objects_and_its_end_is_noticed_at_once(
    operator: OperatorProcess, space: Namespace, spec: dict[str, Any], says: str
) -> None:
    create_demo(space, podTemplate={"spec": spec})
    invalid = {"reason": "InvalidSpec"}
    operator.wait("the sentence", lambda: invalid.items() <= space.condition("Ready").items())
    for kind in ("Ready", "Stalled"):
        told = space.condition(kind)
        assert (told["reason"], says in told["message"]) == ("InvalidSpec", True), told
    assert space.events("InvalidSpec")
    assert space.find("deployments", "demo") is None
    operator.await_passes(1)
    began = time.monotonic()
    space.patch("inferenceservices", "demo", {"spec": {"podTemplate": None}})
    operator.wait("the pods", lambda: space.find("deployments", "demo") is not None)
    assert time.monotonic() - began < 10


def test_a_mistake_leaves_the_pods_that_are_there(
    operator: OperatorProcess, space: Namespace
) -> None:
    create_demo(space, podTemplate=OVERLAY)
    settle(operator, space)
    before = space.get("deployments", "demo")["spec"]
    wrong = copy.deepcopy(OVERLAY)
    wrong["spec"]["containers"][0]["envv"] = []
    space.patch("inferenceservices", "demo", {"spec": {"podTemplate": wrong}})
    operator.wait("the sentence", lambda: space.condition("Ready")["reason"] == "InvalidSpec")
    assert space.get("deployments", "demo")["spec"] == before
    space.patch("inferenceservices", "demo", {"spec": {"podTemplate": OVERLAY}})
    operator.wait("its end", lambda: space.condition("Ready")["reason"] != "InvalidSpec")
    assert space.get("deployments", "demo")["spec"] == before
