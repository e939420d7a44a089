"""A real API server takes an InferenceBatch, or refuses it with a sentence."""

from __future__ import annotations

from typing import Any

import pytest
from integration.operator_runs import Namespace
from sluice_operator.spec.batch import BATCH_PLURAL, parse_batch
from unit.operator.batches import OWN_ENGINE, valid_batch

ON_LINES = {"configMap": {"name": "lines", "key": "a.jsonl"}}
CPU = OWN_ENGINE["hardware"]


def send(space: Namespace, body: dict[str, Any]) -> Any:
    body["metadata"]["namespace"] = space.name
    query = {"fieldValidation": "Strict"}
    return space.client.post(space.path(BATCH_PLURAL), params=query, json=body)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"input": ON_LINES, "shards": 3, "parallelism": 2, "completionWindow": "1h30m"},
        {**OWN_ENGINE, "ttlAfterFinished": "24h", "suspend": True},
        {**OWN_ENGINE, "engine": {}},
        {**OWN_ENGINE, "engine": {"name": "LlamaCpp", "image": "a/b:1"},
         "model": {"uri": "pvc://models/a.gguf"}},
    ],
)  # fmt: skip
def test_a_valid_batch_reads_the_same_after_defaulting(
    space: Namespace, changes: dict[str, Any]
) -> None:
    body = valid_batch(**changes)
    answer = send(space, body)
    assert answer.status_code == 201, answer.text
    assert parse_batch(answer.json()).spec == parse_batch(body).spec
    assert parse_batch(answer.json()).unknown == ()


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"serviceRef": None}, "exactly one of serviceRef and model must be given"),
        ({**OWN_ENGINE, "serviceRef": {"name": "a"}}, "exactly one of serviceRef and model"),
        ({**OWN_ENGINE, "engine": None}, "model, engine and hardware go together"),
        ({"hardware": CPU}, "model, engine and hardware go together"),
        ({"input": {}}, "exactly one of claimName and configMap must be given"),
        ({"input": {**ON_LINES, "path": "a"}}, "path goes with claimName"),
        ({"input__path": "../in"}, "must not contain '..'"),
        ({"output__path": "/out"}, "without a / in front"),
        ({"output__claimName": "A_b"}, "must be the name of a Kubernetes object"),
        ({"parallelism": 2}, "parallelism must not be over shards"),
        ({"shards": 257}, "256"),
        ({"completionWindow": "5s"}, "must be a duration between 1m and 720h"),
        ({**OWN_ENGINE, "hardware": {**CPU, "nodes": 2}}, "runs on one node"),
        ({**OWN_ENGINE, "engine": {"args": ["--port=1"]}}, "args: each must be --FLAG=VALUE"),
        ({**OWN_ENGINE, "engine": {"name": "VLLM"}}, "the default image needs accelerator nvidia"),
        ({**OWN_ENGINE, "model": {"uri": "s3://a/b"}}, "model.uri: only VLLM, SGLang and Custom"),
        ({"model": {"uri": "file:///a"}, "serviceRef": None}, "model, engine and hardware go"),
    ],
)
def test_an_invalid_batch_is_refused_with_a_sentence(
    space: Namespace, changes: dict[str, Any], says: str
) -> None:
    answer = send(space, valid_batch(**changes))
    assert answer.status_code in (400, 422), answer.text
    assert says in answer.json()["message"]


@pytest.mark.parametrize(
    "edit",
    [
        {"input": {"path": "other.jsonl"}},
        {"output": {"path": "other"}},
        {"serviceRef": {"name": "other"}},
        {"shards": 5},
        {"completionWindow": "1h"},
        {"ttlAfterFinished": "1h"},
        {"serviceRef": None, **{k: v for k, v in OWN_ENGINE.items() if v}},
    ],
)
def test_only_suspend_and_parallelism_can_be_changed(
    space: Namespace, edit: dict[str, Any]
) -> None:
    assert send(space, valid_batch(shards=4)).status_code == 201
    headers = {"Content-Type": "application/merge-patch+json"}
    path = space.path(BATCH_PLURAL, "docs")
    answer = space.client.patch(path, json={"spec": edit}, headers=headers)
    assert answer.status_code == 422
    assert "spec cannot be changed, but for suspend and parallelism" in answer.json()["message"]
    space.patch(BATCH_PLURAL, "docs", {"spec": {"suspend": True, "parallelism": 2}})
