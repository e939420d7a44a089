"""InferenceBatches for tests, and Jobs and pods of them as the API server shows them."""

from __future__ import annotations

import json
from typing import Any

from sluice_operator.cluster.jobs import ShardEnd, shard_end_of
from sluice_operator.spec.batch import InferenceBatch, parse_batch
from unit.operator.objects import changed

Object = dict[str, Any]
OWN_ENGINE: Object = {
    "serviceRef": None,
    "model": {"uri": "file:///models/demo"},
    "engine": {"name": "Sluice"},
    "hardware": {"accelerator": "cpu", "cpu": "500m", "memory": "1500Mi"},
}


def valid_batch(name: str = "docs", **changes: Any) -> Object:
    """A complete valid object as a user writes it; fields of its spec given as paths with __ for
    the dot, None removes one."""
    body: Object = {
        "apiVersion": "sluice.dev/v1alpha1",
        "kind": "InferenceBatch",
        "metadata": {"name": name, "namespace": "default"},
        "spec": {
            "input": {"claimName": "docs", "path": "in.jsonl"},
            "output": {"claimName": "docs", "path": "out"},
            "serviceRef": {"name": "demo"},
        },
    }
    for path, value in changes.items():
        body = changed(body, "spec." + path.replace("__", "."), value)
    body["spec"] = {key: value for key, value in body["spec"].items() if value is not None}
    return body


def create_batch(labels: dict[str, str] | None = None, **changes: Any) -> InferenceBatch:
    """The valid object as the operator reads it."""
    body = valid_batch(**changes)
    body["metadata"] |= {"uid": "uid-1", "generation": 3, "labels": labels or {}}
    return parse_batch(body)


def shard_pod(shard: int, name: str = "", **status: Any) -> Object:
    """A pod of a shard."""
    name = name or f"docs-{shard}-abcde"
    labels = {"batch.kubernetes.io/job-completion-index": str(shard)}
    return {
        "metadata": {"name": name, "uid": f"uid-{name}", "labels": labels, "resourceVersion": "1"},
        "status": {"podIP": "10.0.0.7", **status},
    }


def end(shard: int, code: int, at: str = "2025-10-09T08:00:00Z", **report: Any) -> ShardEnd:
    """How a shard's pod ended, and what it told; nothing if it was killed."""
    message = json.dumps(report) if report else "a line of its log"
    terminated = {"exitCode": code, "message": message, "finishedAt": at}
    container = {"name": "batch", "state": {"terminated": terminated}}
    found = shard_end_of(shard_pod(shard, containerStatuses=[container]), "batch")
    assert found is not None
    return found
