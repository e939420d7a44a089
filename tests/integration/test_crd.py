"""A real API server takes the CRD and refuses with its words; what it takes, `parse` reads."""

from __future__ import annotations

import json
import ssl
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from integration.apiserver import ApiServer
from sluice_cluster.shell import Word, run, succeeds, wait_until
from sluice_operator.spec.service import parse
from unit.operator.objects import (
    INVALID,
    Invalid,
    Object,
    arbitrary_objects,
    changed,
    valid_object,
    valid_objects,
)

ROOT = Path(__file__).parents[2]
OBJECTS = "/apis/sluice.dev/v1alpha1/namespaces/default/inferenceservices"
FUZZ = settings(
    max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


def kubectl(server: ApiServer, *arguments: str) -> str:
    command: list[Word] = [server.kubectl, f"--kubeconfig={server.kubeconfig}", *arguments]
    return run(command)


@pytest.fixture(scope="session")
def with_crd(apiserver: ApiServer) -> ApiServer:
    """The API server with the committed CRD in force, also in what kubectl discovers."""
    kubectl(apiserver, "apply", "-f", str(ROOT / "crds"))
    command: list[Word] = [apiserver.kubectl, f"--kubeconfig={apiserver.kubeconfig}"]
    for short in ("infs", "infbatch"):
        wait_until(f"{short} to be known", partial(succeeds, [*command, "explain", short]), 60.0)
    return apiserver


@pytest.fixture(scope="session")
def api(with_crd: ApiServer) -> Iterator[httpx.Client]:
    """An administrator's connection."""
    context = ssl.create_default_context(cafile=str(with_crd.certificate_authority))
    context.load_cert_chain(str(with_crd.client_certificate), str(with_crd.client_key))
    made = httpx.Client(base_url=with_crd.url, verify=context, trust_env=False, timeout=30)
    with made as client:
        yield client


def send(api: httpx.Client, body: Object, *, dry_run: bool = True) -> httpx.Response:
    """POST as `kubectl apply` does: with strict validation."""
    query = {"fieldValidation": "Strict", **({"dryRun": "All"} if dry_run else {})}
    return api.post(OBJECTS, params=query, json=body)


@pytest.fixture
def stored(api: httpx.Client) -> Iterator[Object]:
    """The valid object, in the API server."""
    answer = send(api, valid_object(), dry_run=False)
    assert answer.status_code == 201, answer.text
    yield answer.json()
    api.delete(f"{OBJECTS}/demo").raise_for_status()


@pytest.mark.parametrize("plural", ["inferenceservices", "inferencebatches"])
def test_the_crd_is_structural_and_its_names_are_taken(with_crd: ApiServer, plural: str) -> None:
    crd = json.loads(kubectl(with_crd, "get", "crd", f"{plural}.sluice.dev", "-o", "json"))
    conditions = {c["type"]: c["status"] for c in crd["status"]["conditions"]}
    assert conditions == {"NamesAccepted": "True", "Established": "True"}


@pytest.mark.parametrize("case", INVALID, ids=lambda case: f"{case.path}={case.value!r:.40}")
def test_an_invalid_object_is_refused_with_its_message(api: httpx.Client, case: Invalid) -> None:
    answer = send(api, case.body)
    assert answer.status_code in (400, 422), answer.text
    assert case.says in answer.json()["message"]


def test_an_argument_without_a_value_is_not_called_one_that_is_given_twice(
    api: httpx.Client,
) -> None:
    answer = send(api, changed(valid_object(), "spec.engine.args", ["--seed 1"]))
    assert "must be --FLAG=VALUE" in answer.json()["message"]
    assert "twice" not in answer.json()["message"]


@pytest.mark.parametrize("path", sorted((ROOT / "examples").glob("*.yaml")), ids=lambda p: p.name)
def test_every_example_is_accepted(api: httpx.Client, path: Path) -> None:
    body = yaml.safe_load(path.read_text())
    plural = {"InferenceService": "inferenceservices", "InferenceBatch": "inferencebatches"}
    url = OBJECTS.replace("inferenceservices", plural[body["kind"]])
    query = {"fieldValidation": "Strict", "dryRun": "All"}
    answer = api.post(url, params=query, json=body)
    assert answer.status_code == 201, answer.text


def test_defaults_are_written_into_the_object(stored: Object) -> None:
    spec = stored["spec"]
    assert spec["model"] == {"uri": "file:///models/demo", "task": "Generate", "dtype": "auto"}
    assert spec["batching"]["maxNumSeqs"] == spec["batching"]["initialNumSeqs"] == "Auto"
    assert spec["batching"]["memoryUtilization"] == "0.90"
    assert (spec["slo"]["percentile"], spec["slo"]["window"]) == ("99", "10m")
    assert spec["scaling"]["behavior"]["scaleDown"] == {"stabilizationWindowSeconds": 300}
    assert spec["drain"] == {"timeout": "60s"}
    assert "replicas" not in spec


def test_what_the_server_stores_reads_as_what_was_written(stored: Object) -> None:
    assert parse(stored).spec == parse(valid_object()).spec


@FUZZ
@given(body=valid_objects())
def test_a_valid_object_is_accepted_and_reads_the_same_after_defaulting(
    api: httpx.Client, body: Object
) -> None:
    answer = send(api, body)
    assert answer.status_code == 201, answer.text
    assert parse(answer.json()).spec == parse(body).spec


@FUZZ
@given(body=arbitrary_objects())
def test_what_the_server_takes_of_odd_objects_is_read(api: httpx.Client, body: Object) -> None:
    answer = send(api, body)
    assert answer.status_code in (201, 400, 422), answer.text
    if answer.status_code == 201:
        assert parse(answer.json()).unknown == ()
        assert parse(body).spec == parse(answer.json()).spec


def test_an_unknown_field_is_refused_when_strict_and_pruned_otherwise(api: httpx.Client) -> None:
    body = changed(valid_object(), "spec.slo.p99", "1s")
    strict = send(api, body)
    assert strict.status_code == 400
    assert 'unknown field "spec.slo.p99"' in strict.json()["message"]
    lenient = api.post(OBJECTS, params={"dryRun": "All", "fieldValidation": "Warn"}, json=body)
    assert lenient.status_code == 201
    assert "p99" not in lenient.json()["spec"]["slo"]
    assert "unknown field" in lenient.headers["warning"]


def scale(api: httpx.Client) -> Any:
    return api.get(f"{OBJECTS}/demo/scale")


@pytest.mark.usefixtures("stored")
def test_scale_writes_replicas_and_reads_the_status(api: httpx.Client, with_crd: ApiServer) -> None:
    kubectl(with_crd, "scale", "infs/demo", "--replicas=3")
    assert api.get(f"{OBJECTS}/demo").json()["spec"]["replicas"] == 3
    patch_status(api, {"replicas": 2, "selector": "app.kubernetes.io/instance=demo"})
    answer = scale(api).json()
    assert answer["spec"]["replicas"] == 3
    assert answer["status"] == {"replicas": 2, "selector": "app.kubernetes.io/instance=demo"}


def patch_status(api: httpx.Client, status: Object) -> Object:
    answer = api.patch(
        f"{OBJECTS}/demo/status",
        content=json.dumps({"status": status}),
        headers={"Content-Type": "application/merge-patch+json"},
    )
    assert answer.status_code == 200, answer.text
    result: Object = answer.json()["status"]
    return result


@pytest.mark.usefixtures("stored")
def test_replicas_can_be_given_back_to_the_operator(api: httpx.Client) -> None:
    for replicas in (2, None):
        answer = api.patch(
            f"{OBJECTS}/demo",
            content=json.dumps({"spec": {"replicas": replicas}}),
            headers={"Content-Type": "application/merge-patch+json"},
        )
        assert parse(answer.json()).spec.replicas == replicas


STATUS: Object = {
    "observedGeneration": 1,
    "url": "http://demo.default.svc",
    "replicas": 2,
    "readyReplicas": 1,
    "model": {"name": "demo", "parameters": 4_000_000, "bytes": 16_000_000},
    "memory": {
        "planned": {"weights_bytes": 16_000_000, "kv_cache_bytes": "64Mi"},
        "measured": {"weights_bytes": 2**40},
        "kvTokens": 8192,
        "errorPercent": "1.5",
    },
    "batching": {
        "ceiling": 64,
        "cap": 12,
        "epoch": 7,
        "limitedBy": "InterTokenLatency",
        "effectiveBatch": "9.5",
        "lastChange": {"time": "2026-01-01T00:00:00Z", "from": 8, "to": 12, "reason": "Headroom"},
    },
    "slo": {
        "timeToFirstToken": {
            "target": "500ms",
            "measured": "412ms",
            "over": 3,
            "samples": 500,
            "allowedPercent": "1",
            "usedPercent": "0.6",
            "verdict": "Hold",
            "samplesNeeded": 120,
        },
        "interTokenLatency": {"target": "50ms", "measured": "31ms", "verdict": "Headroom"},
        "met": True,
    },
    "scaling": {
        "desired": 2,
        "pending": 1,
        "lastDecision": {"time": "2026-01-01T00:00:00Z", "reason": "QueueBreach"},
        "history": [{"time": "2026-01-01T00:00:00Z", "from": 1, "to": 2}] * 5,
    },
    "load": {"arrivalsPerSecond": "3.5", "cause": "cap"},
    "pods": {"silent": ["demo-a"], "noisy": []},
    "conditions": [
        {"type": "Ready", "status": "True", "reason": "Serving", "message": "1 pod serves."},
        {"type": "SLOMet", "status": "True", "reason": "Holds"},
    ],
}


@pytest.mark.usefixtures("stored")
def test_nothing_of_a_full_status_is_pruned(api: httpx.Client) -> None:
    assert patch_status(api, STATUS) == STATUS


@pytest.mark.usefixtures("stored")
def test_kubectl_shows_the_promise_in_one_line(api: httpx.Client, with_crd: ApiServer) -> None:
    patch_status(api, STATUS)
    head, row = kubectl(with_crd, "get", "infs").splitlines()
    assert head.split() == [
        "NAME",
        "READY",
        "REPLICAS",
        "MODEL",
        "ENGINE",
        "CAP",
        "TTFT",
        "ITL",
        "SLO",
        "AGE",
    ]
    assert row.split()[:9] == [
        "demo", "True", "1", "file:///models/demo", "Sluice", "12", "412ms", "31ms", "True",
    ]  # fmt: skip
    wide = kubectl(with_crd, "get", "infs", "-o", "wide").splitlines()
    assert wide[0].split()[-3:] == ["URL", "LIMITED-BY", "REASON"]
    assert wide[1].split()[-3:] == ["http://demo.default.svc", "InterTokenLatency", "Serving"]
    assert "inferenceservice.sluice.dev/demo" in kubectl(with_crd, "get", "all")


def test_kubectl_explains_a_field(with_crd: ApiServer) -> None:
    explained = kubectl(with_crd, "explain", "infs.spec.slo.window")
    assert "The promise holds over every window of this length." in explained
