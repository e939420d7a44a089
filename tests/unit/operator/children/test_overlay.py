"""Claims on `spec.podTemplate`: what it changes in a pod, and what it may not."""

from __future__ import annotations

import copy
import json
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sluice_operator.children import manifests
from sluice_operator.spec.service import EngineName, SpecError
from unit.operator.observations import SETTINGS, create_service

ENGINES = get_args(EngineName)
OURS = ("worker", "engine")
OVERLAY: dict[str, Any] = {
    "metadata": {"labels": {"team": "a"}, "annotations": {"b": "c"}},
    "spec": {
        "serviceAccountName": "reader",
        "priorityClassName": "high",
        "affinity": {"nodeAffinity": {}},
        "nodeSelector": {"disk": "ssd"},
        "tolerations": [{"operator": "Exists"}],
        "securityContext": {"supplementalGroups": [7]},
        "volumes": [{"name": "data", "persistentVolumeClaim": {"claimName": "data"}}],
        "initContainers": [{"name": "fetch", "image": "r/f:1"}],
        "containers": [
            {
                "name": "engine",
                "env": [{"name": "NCCL_DEBUG", "value": "INFO"}],
                "envFrom": [{"secretRef": {"name": "all"}}],
                "resources": {"requests": {"cpu": "100m"}, "limits": {"rdma/hca": "1"}},
                "securityContext": {"capabilities": {"add": ["IPC_LOCK"]}},
                "volumeMounts": [{"name": "data", "mountPath": "/data"}],
            },
            {"name": "logs", "image": "r/l:1"},
        ],
    },
}


def template(engine: str, overlay: dict[str, Any] | None, **changes: Any) -> dict[str, Any]:
    """The pods' template of an object with `overlay`."""
    given = {} if overlay is None else {"podTemplate": overlay}
    service = create_service(engine={"name": engine, "image": "r/e:1"}, **given, **changes)
    manifests.check(service, SETTINGS)
    made = manifests.workload(service, SETTINGS, ceiling=4, replicas=1, live=None)
    found: dict[str, Any] = made["spec"]["template"]
    return found


def container(pod: dict[str, Any], *names: str) -> dict[str, Any]:
    """The one of that name, in either list."""
    [found] = [
        one
        for one in [*pod["spec"].get("initContainers", []), *pod["spec"]["containers"]]
        if one["name"] in names
    ]
    return dict(found)


@pytest.mark.parametrize("engine", ENGINES)
def test_each_field_of_an_overlay_is_in_the_pod_beside_ours(engine: str) -> None:
    plain, pod = template(engine, None), template(engine, OVERLAY)
    spec, given = pod["spec"], OVERLAY["spec"]
    assert pod["metadata"]["labels"] == {**plain["metadata"]["labels"], "team": "a"}
    assert pod["metadata"]["annotations"] == {**plain["metadata"]["annotations"], "b": "c"}
    for field in ("serviceAccountName", "priorityClassName", "affinity", "nodeSelector"):
        assert spec[field] == given[field]
    assert spec["tolerations"] == given["tolerations"]
    security = plain["spec"]["securityContext"]
    assert spec["securityContext"] == {**security, "supplementalGroups": [7]}
    assert spec["volumes"] == [*plain["spec"]["volumes"], *given["volumes"]]
    before, after = container(plain, *OURS), container(pod, *OURS)
    patch = given["containers"][0]
    assert after["env"] == [*before["env"], *patch["env"]]
    assert after["envFrom"] == patch["envFrom"]
    assert after["volumeMounts"] == [*before["volumeMounts"], *patch["volumeMounts"]]
    assert after["resources"]["limits"] == {**before["resources"]["limits"], "rdma/hca": "1"}
    assert after["resources"]["requests"]["cpu"] == "100m"
    assert after["securityContext"]["capabilities"] == {"drop": ["ALL"], "add": ["IPC_LOCK"]}
    for field in ("image", "args", "livenessProbe"):
        assert after[field] == before[field]
    assert spec["containers"][-1] == given["containers"][1]
    first = [one["name"] for one in spec["initContainers"]]
    assert first[0] == "fetch"
    assert first[1:] == [one["name"] for one in plain["spec"].get("initContainers", [])]


@pytest.mark.parametrize("engine", ENGINES)
def test_an_object_without_an_overlay_has_the_pods_that_it_had(engine: str) -> None:
    assert template(engine, {}) == template(engine, None)


def test_an_overlay_that_is_given_taken_away_or_changed_takes_new_pods() -> None:
    def live(overlay: dict[str, Any] | None) -> Any:
        given = {} if overlay is None else {"podTemplate": overlay}
        service = create_service(**given)
        made = manifests.workload(service, SETTINGS, ceiling=4, replicas=1, live=None)
        return made["metadata"]["annotations"][manifests.TEMPLATE_INPUTS_ANNOTATION]

    other = copy.deepcopy(OVERLAY)
    other["spec"]["containers"][0]["env"][0]["value"] = "WARN"
    assert len({live(None), live(OVERLAY), live(other)}) == 3
    assert live(OVERLAY) == live(json.loads(json.dumps(OVERLAY, sort_keys=True)))


def test_a_variable_and_a_sidecars_name_are_there_once_and_in_the_users_order() -> None:
    env = [{"name": "B", "value": "1"}, {"name": "A", "value": "$(B)"}]
    overlay = {"spec": {"containers": [{"name": "engine", "env": env}]}}
    service = {"name": "VLLM", "image": "r/e:1", "env": [{"name": "A", "value": "0"}]}
    made = create_service(engine=service, podTemplate=overlay)
    pod = manifests.workload(made, SETTINGS, ceiling=4, replicas=1, live=None)
    assert container(pod["spec"]["template"], "engine")["env"][-2:] == env


def test_a_gate_takes_resources() -> None:
    quota = {"limits": {"cpu": "1"}, "requests": {"ephemeral-storage": "1Gi"}}
    overlay = {"spec": {"containers": [{"name": "gate", "resources": quota}]}}
    held = container(template("VLLM", overlay), "gate")["resources"]
    plain = container(template("VLLM", None), "gate")["resources"]
    assert held["limits"] == {**plain["limits"], "cpu": "1"}
    assert held["requests"] == {**plain["requests"], "ephemeral-storage": "1Gi"}


def _engine(**fields: Any) -> dict[str, Any]:
    return {"spec": {"containers": [{"name": "engine", **fields}]}}


_MINE = {"name": "mine", "emptyDir": {}}
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"metadata": {"labels": {"app.kubernetes.io/name": "x"}}}, "labels.app.kubernetes.io/name: "),
    ({"spec": {"restartPolicy": "Never"}}, "spec.restartPolicy: "),
    ({"spec": {"terminationGracePeriodSeconds": 1}}, "spec.drain.timeout sets it"),
    ({"spec": {"hostPID": True}}, "spec.hostPID: "),
    ({"spec": {"shareProcessNamespace": True}}, "spec.shareProcessNamespace: "),
    ({"spec": {"automountServiceAccountToken": True}}, "needs a serviceAccountName"),
    ({"spec": {"volumes": [{"name": "admin", "emptyDir": {}}]}}, "volumes.admin: the operator has"),
    ({"spec": {"volumes": [_MINE, _MINE]}}, "spec.volumes: mine is there twice"),
    ({"spec": {"volumes": {"name": "a"}}}, "spec.volumes: must be a list"),
    ({"spec": {"containers": [3]}}, "spec.containers[0]: must be a map"),
    ({"spec": {"containers": [{"image": "a"}]}}, "spec.containers: each needs a name"),
    ({"spec": {"initContainers": [{"name": "engine"}]}}, "the operator has that name"),
    (_engine(image="a"), "containers[engine].image: spec.engine.image sets it"),
    (_engine(args=[]), "containers[engine].args: spec.engine.args sets them"),
    (_engine(command=[]), "spec.engine.command sets it"),
    (_engine(ports=[]), "clients reach the gate alone"),
    (_engine(livenessProbe={}), "containers[engine].livenessProbe: "),
    (_engine(env=[{"name": "HF_TOKEN", "value": "a"}]), "env.HF_TOKEN: the operator sets it"),
    (_engine(env="a"), "containers[engine].env: must be a list"),
    (_engine(resources={"limits": {"memory": "1Gi"}}), "limits.memory: spec.hardware sets it"),
    (_engine(resources={"limits": {"cpu": "1"}}), "limits.cpu: spec.hardware.cpu sets it"),
    (_engine(resources=[]), "containers[engine].resources: must be a map"),
    (_engine(volumeMounts=[{"name": "mine", "mountPath": "/run/sluice"}]), "operator mounts it"),
    (_engine(volumeMounts=[{"name": "admin", "mountPath": "/a"}]), "the operator has that volume"),
    (
        {"spec": {"containers": [
            {"name": "thief", "volumeMounts": [{"name": "admin", "mountPath": "/a"}]}
        ]}},
        "containers[thief].volumeMounts.admin: the operator has that volume",
    ),
    (
        {"spec": {"containers": [{"name": "gate", "env": []}]}},
        "containers[gate].env: a gate takes resources alone",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("overlay", "says"), REFUSED)
def test_what_the_operator_owns_is_refused_with_a_sentence(
    overlay: dict[str, Any], says: str
) -> None:
    with pytest.raises(SpecError) as refused:
        template("VLLM", overlay)
    assert str(refused.value).startswith("spec.podTemplate.")
    assert says in str(refused.value)


def test_the_device_is_the_objects() -> None:
    gpu = {"accelerator": "nvidia", "memory": "24Gi"}
    for kind in ("limits", "requests"):
        overlay = _engine(resources={kind: {"nvidia.com/gpu": "2"}})
        with pytest.raises(SpecError, match=f"{kind}.nvidia.com/gpu: spec.hardware sets it"):
            template("VLLM", overlay, hardware=gpu)


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers(0, 9) | st.sampled_from(["", "a", "engine", "tmp"]),
    lambda inner: st.lists(inner, max_size=3)
    | st.dictionaries(
        st.sampled_from(
            ["name", "containers", "initContainers", "volumes", "env", "volumeMounts", "mountPath",
             "resources", "limits", "claims", "tolerations", "securityContext", "capabilities"]
        ),
        inner,
        max_size=4,
    ),
    max_leaves=12,
)  # fmt: skip


@given(st.dictionaries(st.sampled_from(["containers", "volumes", "securityContext"]), _JSON))
def test_any_overlay_is_taken_or_refused_and_the_same_one_gives_the_same_bytes(
    spec: dict[str, Any],
) -> None:
    said, first = "", {}
    try:
        first = template("VLLM", {"spec": spec})
    except SpecError as refused:
        said = str(refused)
    if said:
        assert said.startswith("spec.podTemplate.")
        return
    again = template("VLLM", json.loads(json.dumps({"spec": spec}, sort_keys=True)))
    assert json.dumps(first, sort_keys=True) == json.dumps(again, sort_keys=True)
    plain = template("VLLM", None)
    for ours in plain["spec"]["containers"]:
        assert container(first, ours["name"])["image"] == ours["image"]
