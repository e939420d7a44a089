"""A real operator on a real API server: objects become children, and stay as they should be."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from integration.operator_runs import (
    CHILDREN,
    Namespace,
    OperatorProcess,
    create_demo,
    settle,
)
from sluice.processes import free_ports
from sluice_cluster.shell import wait_until
from unit.operator.objects import changed, static_batches, valid_object

OURS = "app.kubernetes.io/managed-by"
UNLABELLED = {"metadata": {"labels": {OURS: None}}}


def test_an_object_becomes_five_children_that_it_owns(
    operator: OperatorProcess, space: Namespace
) -> None:
    uid = create_demo(space)["metadata"]["uid"]
    settle(operator, space)
    for plural, name in CHILDREN.items():
        [owner] = space.get(plural, name)["metadata"]["ownerReferences"]
        assert (owner["uid"], owner["controller"]) == (uid, True)
    status = space.get("inferenceservices", "demo")["status"]
    assert status["url"] == f"http://demo.{space.name}.svc"
    assert space.condition("ModelFits")["status"] == "True"
    assert space.condition("Ready")["reason"] == "Starting"
    assert all(
        c["observedGeneration"] == status["observedGeneration"] for c in status["conditions"]
    )


def test_static_batches_reach_the_pods_and_the_object_settles(
    operator: OperatorProcess, space: Namespace
) -> None:
    create_demo(space, batching=static_batches(8, "250ms"))
    settle(operator, space)
    [worker] = space.get("deployments", "demo")["spec"]["template"]["spec"]["containers"]
    given = {"--batching-mode=static", "--static-batch-size=8", "--static-batch-timeout-ms=250"}
    assert given | {"--max-num-seqs=8"} <= set(worker["args"])
    assert space.get("configmaps", "demo-runtime")["data"]["cap"] == "8"
    batching = space.get("inferenceservices", "demo")["status"]["batching"]
    assert (batching["mode"], batching["ceiling"], batching["cap"]) == ("Static", 8, 8)
    versions, writes = space.versions(), operator.writes()
    operator.await_passes(5)
    assert (space.versions(), operator.writes()) == (versions, writes)


def test_a_pass_without_news_writes_nothing(operator: OperatorProcess, space: Namespace) -> None:
    create_demo(space)
    settle(operator, space)
    versions, writes = space.versions(), operator.writes()
    operator.await_passes(5)
    assert space.versions() == versions
    assert operator.writes() == writes


def test_the_way_of_a_rollout_is_edited_without_one(
    operator: OperatorProcess, space: Namespace
) -> None:
    gpu = {"accelerator": "nvidia", "memory": "24Gi", "hostMemory": "1536Mi"}
    create_demo(space, hardware=gpu)
    settle(operator, space)
    before = space.get("deployments", "demo")["spec"]
    [worker] = before["template"]["spec"]["containers"]
    assert {worker["resources"][part]["memory"] for part in ("limits", "requests")} == {"1536Mi"}
    assert before["strategy"]["rollingUpdate"] == {"maxUnavailable": 0, "maxSurge": 1}
    space.patch("inferenceservices", "demo", {"spec": {"rollout": "Replace"}})
    replaces = {"maxUnavailable": 1, "maxSurge": 0}
    operator.wait(
        "the strategy",
        lambda: space.get("deployments", "demo")["spec"]["strategy"]["rollingUpdate"] == replaces,
    )
    assert space.get("deployments", "demo")["spec"]["template"] == before["template"]
    operator.await_passes(2)
    versions = space.versions()
    operator.await_passes(3)
    assert space.versions() == versions


def test_a_pod_that_no_node_takes_holds_up_no_eviction(
    operator: OperatorProcess, space: Namespace
) -> None:
    create_demo(space)
    settle(operator, space)
    labels = space.get("deployments", "demo")["spec"]["template"]["metadata"]["labels"]
    space.patch("inferenceservices", "demo", {"spec": {"replicas": 2}}, "scale")
    spec = {"containers": [{"name": "worker", "image": "none"}]}
    for name in ("runs", "waits"):
        pod = {"metadata": {"name": name, "labels": labels}, "spec": spec}
        space.create("pods", {"apiVersion": "v1", "kind": "Pod", **pod})
    since = {"lastTransitionTime": "2026-01-01T00:00:00Z"}
    why = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", **since}
    space.patch("pods", "waits", {"status": {"conditions": [why]}}, "status")
    space.patch("pods", "runs", {"status": {"startTime": "2026-01-01T00:00:00Z"}}, "status")

    def allowed() -> int:
        number: int = space.get("poddisruptionbudgets", "demo")["spec"]["maxUnavailable"]
        return number

    operator.wait("the budget", lambda: allowed() == 2)
    operator.await_passes(2)
    versions = space.versions()
    operator.await_passes(3)
    assert space.versions() == versions
    space.delete("pods", "waits")
    operator.wait("the budget of before", lambda: allowed() == 1)


def test_kopf_leaves_no_trace_on_the_object(operator: OperatorProcess, space: Namespace) -> None:
    create_demo(space)
    settle(operator, space)
    metadata = space.get("inferenceservices", "demo")["metadata"]
    assert "finalizers" not in metadata
    assert "annotations" not in metadata


def test_a_model_that_cannot_fit_makes_no_child(
    operator: OperatorProcess, space: Namespace
) -> None:
    create_demo(space, model__uri="file:///models/huge")
    operator.wait("the verdict", lambda: space.condition("ModelFits").get("status") == "False")
    operator.await_passes(3)
    assert not any(space.find(plural, name) for plural, name in CHILDREN.items())
    said = space.condition("ModelFits")
    assert said["reason"] == "InsufficientMemory"
    assert "140.0 GiB" in said["message"]
    assert "would fit with" in said["message"]
    assert space.events("InsufficientMemory")


def test_a_pickled_checkpoint_is_refused_by_name(
    operator: OperatorProcess, space: Namespace
) -> None:
    create_demo(space, model__uri="file:///models/pickled")
    operator.wait("the verdict", lambda: space.condition("ModelFits").get("status") == "False")
    assert "pytorch_model.bin" in space.condition("ModelFits")["message"]
    assert space.find("deployments", "demo") is None


def test_an_object_that_is_made_to_fit_starts(operator: OperatorProcess, space: Namespace) -> None:
    create_demo(space, model__uri="file:///models/huge")
    operator.wait("the verdict", lambda: space.condition("ModelFits").get("status") == "False")
    space.patch("inferenceservices", "demo", {"spec": {"model": {"uri": "file:///models/demo"}}})
    settle(operator, space)
    assert space.condition("ModelFits")["status"] == "True"


def test_edited_targets_do_not_change_the_pod_template(
    operator: OperatorProcess, space: Namespace
) -> None:
    create_demo(space)
    settle(operator, space)
    before = space.get("deployments", "demo")["metadata"]["generation"]
    space.patch("inferenceservices", "demo", {"spec": {"slo": {"timeToFirstToken": "900ms"}}})
    generation = space.get("inferenceservices", "demo")["metadata"]["generation"]
    operator.wait(
        "the edit to be observed",
        lambda: space.condition("Ready")["observedGeneration"] == generation,
    )
    assert space.get("deployments", "demo")["metadata"]["generation"] == before


def test_a_target_that_the_spec_no_longer_has_leaves_the_configmap_at_once(
    operator: OperatorProcess, space: Namespace
) -> None:
    """Not with the next save of the tuner's memory, which comes twice a minute."""
    create_demo(space)
    settle(operator, space)
    assert space.get("configmaps", "demo-runtime")["data"]["slo_itl_ms"] == "50.0"
    space.patch("inferenceservices", "demo", {"spec": {"slo": {"interTokenLatency": None}}})
    operator.wait(
        "the target to go",
        lambda: "slo_itl_ms" not in space.get("configmaps", "demo-runtime")["data"],
        seconds=8.0,
    )


def _create_keys(space: Namespace, **data: str) -> None:
    body = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "api-keys"}}
    space.create("secrets", {**body, "stringData": data})


def test_keys_that_are_missing_are_named_and_no_pod_is_made_until_they_come(
    operator: OperatorProcess, space: Namespace
) -> None:
    create_demo(space, apiKeySecretRef={"name": "api-keys"})
    why = "spec.apiKeySecretRef: there is no Secret api-keys"
    operator.wait("a status", lambda: bool(space.condition("Ready")))
    for kind, status in (("Ready", "False"), ("Stalled", "True")):
        told = space.condition(kind)
        assert (told["status"], told["reason"], told["message"]) == (status, "KeysMissing", why)
    assert space.condition("Reconciling")["status"] == "False"
    assert not space.ours("deployments")
    _create_keys(space, others="x")
    why = "spec.apiKeySecretRef: the Secret api-keys has no key `keys`"
    operator.wait("what lacks now", lambda: space.condition("Ready")["message"] == why)
    space.patch("secrets", "api-keys", {"stringData": {"keys": " \n"}})
    why = "spec.apiKeySecretRef: `keys` of the Secret api-keys is empty"
    operator.wait("what lacks now", lambda: space.condition("Ready")["message"] == why)
    space.patch("secrets", "api-keys", {"stringData": {"keys": "one\n"}})
    operator.wait("the pods", lambda: bool(space.ours("deployments")), seconds=12.0)
    operator.wait("the start", lambda: space.condition("Ready")["reason"] == "Starting")
    assert space.condition("Stalled")["status"] == "False"
    assert len(space.events("KeysMissing")) >= 1


def test_an_edit_to_keys_that_are_missing_leaves_the_pods_as_they_are(
    operator: OperatorProcess, space: Namespace
) -> None:
    create_demo(space)
    settle(operator, space)
    before = space.get("deployments", "demo")["spec"]["template"]
    space.patch("inferenceservices", "demo", {"spec": {"apiKeySecretRef": {"name": "api-keys"}}})
    operator.wait("the word", lambda: space.condition("Stalled")["reason"] == "KeysMissing")
    assert space.get("deployments", "demo")["spec"]["template"] == before
    _create_keys(space, keys="one")
    operator.wait(
        "the edit", lambda: space.get("deployments", "demo")["spec"]["template"] != before
    )
    operator.wait("the word", lambda: space.condition("Stalled")["status"] == "False")


@pytest.mark.parametrize("plural", sorted(CHILDREN))
def test_a_deleted_child_is_restored_and_told(
    operator: OperatorProcess, space: Namespace, plural: str
) -> None:
    create_demo(space)
    settle(operator, space)
    token = space.get("secrets", "demo-admin")["data"]["token"]
    space.delete(plural, CHILDREN[plural])
    operator.wait("the child", lambda: space.find(plural, CHILDREN[plural]) is not None)
    operator.wait("the event", lambda: bool(space.events("ChildRestored")))
    assert "was deleted" in space.events("ChildRestored")[0]
    assert space.get("secrets", "demo-admin")["data"]["token"] == token


@pytest.mark.parametrize(
    ("plural", "edit", "named"),
    [
        ("deployments", {"spec": {"replicas": 7}}, "spec.replicas"),
        (
            "services",
            {"spec": {"selector": {"app.kubernetes.io/instance": "other"}}},
            "spec.selector",
        ),
        ("services", {"spec": {"selector": {"track": "canary"}}}, "spec.selector"),
        (
            "services",
            {"spec": {"ports": [{"name": "http", "port": 81, "targetPort": "http"}]}},
            "spec.ports[http].port",
        ),
        (
            "poddisruptionbudgets",
            {"spec": {"minAvailable": 1, "maxUnavailable": None}},
            "spec.maxUnavailable",
        ),
        ("configmaps", {"data": {"epoch": "99"}}, "data.epoch"),
        ("deployments", UNLABELLED, f"metadata.labels.{OURS}"),
        ("configmaps", UNLABELLED, f"metadata.labels.{OURS}"),
    ],
)
def test_what_a_person_edits_is_put_back_and_the_event_names_it(
    operator: OperatorProcess, space: Namespace, plural: str, edit: dict[str, Any], named: str
) -> None:
    create_demo(space)
    settle(operator, space)
    wanted = space.get(plural, CHILDREN[plural])
    space.patch(plural, CHILDREN[plural], edit)
    operator.wait("the event", lambda: bool(space.events("ChildRestored")))
    [said] = space.events("ChildRestored")
    assert said.endswith(f" {CHILDREN[plural]} was edited: put back {named}")

    def restored() -> bool:
        now = space.get(plural, CHILDREN[plural])
        same_labels = now["metadata"]["labels"] == wanted["metadata"]["labels"]
        return same_labels and all(now.get(k) == wanted.get(k) for k in ("spec", "data"))

    operator.wait("the child as it was", restored)


@pytest.mark.parametrize("plural", ["configmaps", "services"])
def test_a_child_that_is_labelled_as_anothers_is_put_back(
    operator: OperatorProcess, space: Namespace, plural: str
) -> None:
    create_demo(space)
    settle(operator, space)
    label, name = "app.kubernetes.io/instance", CHILDREN[plural]
    space.patch(plural, name, {"metadata": {"labels": {label: "another"}}})

    def is_back() -> bool:
        found: str = space.get(plural, name)["metadata"]["labels"][label]
        return found == "demo"

    operator.wait("the label", is_back)


def test_fields_of_others_on_a_child_stay(operator: OperatorProcess, space: Namespace) -> None:
    create_demo(space)
    settle(operator, space)
    space.patch("services", "demo", {"metadata": {"annotations": {"team": "search"}}})
    writes = operator.writes()
    operator.await_passes(3)
    assert space.get("services", "demo")["metadata"]["annotations"]["team"] == "search"
    assert operator.writes() == writes


def test_spec_replicas_belong_to_whoever_sets_them(
    operator: OperatorProcess, space: Namespace
) -> None:
    create_demo(space)
    settle(operator, space)
    space.patch("inferenceservices", "demo", {"spec": {"replicas": 3}}, "scale")
    operator.wait(
        "three replicas", lambda: space.get("deployments", "demo")["spec"]["replicas"] == 3
    )
    operator.wait(
        "the owner's name",
        lambda: (
            space.get("inferenceservices", "demo")["status"]["scaling"]["replicasOwner"]
            == "External"
        ),
    )


def test_two_objects_are_looked_after_side_by_side(
    operator: OperatorProcess, space: Namespace
) -> None:
    create_demo(space)
    body = changed(valid_object("other"), "metadata.namespace", space.name)
    space.create("inferenceservices", body)
    settle(operator, space)
    operator.wait("the other", lambda: space.find("deployments", "other") is not None)
    one, two = (space.get("secrets", f"{name}-admin")["data"] for name in ("demo", "other"))
    assert one["token"] != two["token"]


def test_a_deleted_object_is_forgotten(operator: OperatorProcess, space: Namespace) -> None:
    create_demo(space)
    settle(operator, space)
    space.delete("inferenceservices", "demo")
    everywhere = "/apis/sluice.dev/v1alpha1/inferenceservices"

    def only_the_others_are_left() -> bool:
        there = len(space.client.get(everywhere).json()["items"])
        return operator.metric("sluice_operator_objects") == there

    operator.wait("it to be forgotten", only_the_others_are_left)


def test_an_object_made_anew_waits_for_the_children_of_the_former_to_go(
    operator: OperatorProcess, space: Namespace
) -> None:
    """As after `kubectl replace --force`; the test deletes them, in the collector's place."""
    create_demo(space)
    settle(operator, space)
    space.delete("inferenceservices", "demo")
    uid = create_demo(space)["metadata"]["uid"]

    def waits() -> bool:
        return space.condition("Reconciling").get("reason") == "AwaitingDeletion"

    operator.wait("it to wait", waits)
    assert space.condition("Stalled")["status"] == "False"
    assert space.events("NameTaken") == []
    for plural, name in CHILDREN.items():
        space.delete(plural, name)

    def are_its_own() -> bool:
        found = [space.find(plural, name) for plural, name in CHILDREN.items()]
        return all(
            child and child["metadata"]["ownerReferences"][0]["uid"] == uid for child in found
        )

    operator.wait("its own", are_its_own)
    settle(operator, space)


def test_one_refused_child_is_told_and_holds_back_no_other(
    operator: OperatorProcess, space: Namespace
) -> None:
    create_demo(space)
    settle(operator, space)
    with webhook_of_services_that_is_down(space):
        space.delete("services", "demo")
        operator.wait("the refusal", lambda: space.condition("Stalled").get("status") == "True")
        assert "failed calling webhook" in space.condition("Stalled")["message"]
        space.patch("inferenceservices", "demo", {"spec": {"replicas": 3}})

        def is_scaled_out() -> bool:
            found: int = space.get("deployments", "demo")["spec"]["replicas"]
            return found == 3

        operator.wait("the scale-out", is_scaled_out, 120.0)
    operator.wait("the service", lambda: space.find("services", "demo") is not None, 120.0)


@contextmanager
def webhook_of_services_that_is_down(space: Namespace) -> Iterator[None]:
    """Nobody answers where the API server asks whether services of the namespace are fine."""
    hooks = "/apis/admissionregistration.k8s.io/v1/validatingwebhookconfigurations"
    [port] = free_ports(1)
    hook = {
        "name": f"{space.name}.sluice.test",
        "clientConfig": {"url": f"https://127.0.0.1:{port}/"},
        "rules": [
            {
                "apiGroups": [""],
                "apiVersions": ["v1"],
                "operations": ["CREATE"],
                "resources": ["services"],
            }
        ],
        "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": space.name}},
        "failurePolicy": "Fail",
        "sideEffects": "None",
        "admissionReviewVersions": ["v1"],
        "timeoutSeconds": 1,
    }
    body = {"metadata": {"name": space.name}, "webhooks": [hook]}
    assert space.client.post(hooks, json=body).is_success
    try:
        wait_until("the webhook to be asked", lambda: not _may_create_service(space), 30.0)
        yield
    finally:
        assert space.client.delete(f"{hooks}/{space.name}").is_success


def _may_create_service(space: Namespace) -> bool:
    body = {"metadata": {"generateName": "probe-"}, "spec": {"ports": [{"port": 80}]}}
    asked = space.client.post(space.path("services"), params={"dryRun": "All"}, json=body)
    return asked.is_success


def test_a_child_name_that_somebody_else_has_is_never_written_over(
    operator: OperatorProcess, space: Namespace
) -> None:
    theirs = {"selector": {"app": "theirs"}, "ports": [{"port": 81}]}
    space.create("services", {"metadata": {"name": "demo"}, "spec": theirs})
    create_demo(space)
    operator.wait("the refusal", lambda: space.condition("Stalled").get("status") == "True")
    assert space.condition("Stalled")["reason"] == "NameTaken"
    assert "Service demo" in space.condition("Stalled")["message"]
    assert space.get("services", "demo")["spec"]["selector"] == {"app": "theirs"}
    assert space.find("deployments", "demo") is None
    space.delete("services", "demo")
    operator.wait("the children", space.has_children)
    operator.wait("calm", lambda: space.condition("Stalled")["status"] == "False")
