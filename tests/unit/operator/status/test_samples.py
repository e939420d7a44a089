"""Objects as Prometheus reads them: what their status says, and nothing once they are gone."""

from __future__ import annotations

from typing import Any

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from sluice_operator.spec.batch import BATCH_KIND
from sluice_operator.spec.service import KIND
from sluice_operator.status.samples import FAMILIES, ObjectCollector, Shown, seconds, share
from unit.operator.observations import create_service

STATUS: dict[str, Any] = {
    "replicas": 2,
    "readyReplicas": 1,
    "batching": {
        "cap": 8, "ceiling": 64, "limitedBy": "VRAM",
        "lastChange": {"time": "2025-10-09T08:53:20Z", "reason": "Headroom", "from": 4, "to": 8},
    },
    "scaling": {"desired": 3},
    "memory": {"errorPercent": "-12.5"},
    "slo": {
        "timeToFirstToken": {
            "target": "500ms", "measured": "51.3ms", "bound": "60ms", "samples": 400, "over": 2,
            "allowedPercent": "1", "usedPercent": "0.5",
        },
    },
    "conditions": [
        {"type": "Ready", "status": "True", "reason": "Serving", "message": "1 of 2"},
        {"type": "SLOMet", "status": "Unknown", "reason": 'a "word"\\n', "message": ""},
    ],
}  # fmt: skip
BATCH = {"state": "in_progress", "counts": {"total": 9, "completed": 4, "failed": 1}}


def read(*shown: Shown) -> dict[tuple[str, ...], float]:
    """Samples by name, namespace, object and own labels in the family's order."""
    registry = CollectorRegistry()
    registry.register(ObjectCollector(lambda: shown))
    text = generate_latest(registry).decode()
    order = {family.name: ("namespace", "name", *family.labels) for family in FAMILIES}
    return {
        (s.name, *(s.labels[label] for label in order[s.name])): s.value
        for family in text_string_to_metric_families(text)
        for s in family.samples
    }


def test_a_service_is_shown_as_its_status_says() -> None:
    shown = Shown(KIND, "ns", "demo", STATUS, create_service(), "10.96.0.9")
    me, target = ("ns", "demo"), "timeToFirstToken"
    assert read(shown) == {
        ("sluice_condition", *me, KIND, "Ready", "True", "Serving"): 1,
        ("sluice_condition", *me, KIND, "SLOMet", "Unknown", 'a "word"\\n'): 1,
        ("sluice_service_info", *me, "Sluice", "Generate", "cpu", "10.96.0.9"): 1,
        ("sluice_service_pod_units", *me, "CPU"): 0.5,
        ("sluice_service_cap", *me): 8,
        ("sluice_service_cap_ceiling", *me, "VRAM"): 64,
        ("sluice_service_replicas", *me, "current"): 2,
        ("sluice_service_replicas", *me, "ready"): 1,
        ("sluice_service_replicas", *me, "desired"): 3,
        ("sluice_service_target_seconds", *me, target): 0.5,
        ("sluice_service_target_allowed_ratio", *me, target): 0.01,
        ("sluice_service_target_used_ratio", *me, target): 0.005,
        ("sluice_service_latency_seconds", *me, target): pytest.approx(0.0513),
        ("sluice_service_latency_bound_seconds", *me, target): 0.06,
        ("sluice_service_latency_samples", *me, target): 400,
        ("sluice_service_memory_error_ratio", *me): -0.125,
        ("sluice_service_change_timestamp_seconds", *me, "cap", "Headroom"): 1_760_000_000,
    }


def test_a_batch_is_shown_with_its_state_and_counts() -> None:
    me = ("ns", "many")
    assert read(Shown(BATCH_KIND, *me, BATCH)) == {
        ("sluice_batch_state", *me, "in_progress"): 1,
        ("sluice_batch_requests", *me, "total"): 9,
        ("sluice_batch_requests", *me, "completed"): 4,
        ("sluice_batch_requests", *me, "failed"): 1,
    }


def test_an_object_without_a_status_has_no_series() -> None:
    assert read(Shown(KIND, "ns", "demo", {}), Shown(BATCH_KIND, "ns", "many", {})) == {}


def test_devices_of_all_pods_of_a_replica_are_counted() -> None:
    hardware = {"accelerator": "nvidia", "memory": "24Gi", "gpus": 4, "nodes": 2}
    service = create_service(hardware=hardware, engine={"name": "VLLM"})
    units = read(Shown(KIND, "ns", "demo", {}, service))
    assert units["sluice_service_pod_units", "ns", "demo", "GPU"] == 8


@pytest.mark.parametrize(
    ("text", "expected"),
    [("51.3ms", 0.0513), ("1200s", 1200.0), ("", None), ("fast", None), (None, None), (5, None)],
)
def test_a_duration_is_read_or_left_out(text: object, expected: float | None) -> None:
    assert seconds(text) == (None if expected is None else pytest.approx(expected))


@pytest.mark.parametrize(
    ("text", "expected"), [("12.5", 0.125), ("-3", -0.03), ("0", 0.0), ("--1", None), (None, None)]
)
def test_a_percentage_is_read_with_its_sign_or_left_out(
    text: object, expected: float | None
) -> None:
    assert share(text) == expected
