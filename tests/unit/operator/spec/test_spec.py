"""The object is read whole or refused with a sentence; `parse` does nothing else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from sluice_operator.spec.batch import parse_batch
from sluice_operator.spec.service import InferenceService, SloSpec, SpecError, parse
from unit.operator.objects import (
    REMOVED,
    Invalid,
    Object,
    arbitrary_objects,
    changed,
    valid_object,
    valid_objects,
)

ROOT = Path(__file__).parents[4]


def outcome_of(body: Object) -> InferenceService | str:
    try:
        return parse(body)
    except SpecError as e:
        return str(e)


def problem(body: Object) -> str:
    with pytest.raises(SpecError) as caught:
        parse(body)
    return str(caught.value)


def test_a_short_object_gets_every_default() -> None:
    service = parse(valid_object())
    spec = service.spec
    assert (service.name, service.namespace, spec.model.name) == ("demo", "default", "demo")
    assert (spec.model.scheme, spec.model.directory) == ("file", "/models/demo")
    assert (spec.hardware.memory_bytes, spec.hardware.cpu_millis) == (1500 << 20, 500)
    assert (spec.slo.ttft_ms, spec.slo.itl_ms, spec.slo.e2e_ms) == (500.0, 50.0, None)
    assert (spec.slo.window_s, spec.slo.percentile, spec.drain.timeout_s) == (600.0, "99", 60.0)
    assert spec.slo.hold_share == 1
    assert spec.scaling.behavior.scale_down.stabilization_window_s == 300
    assert (spec.batching.max_num_seqs, spec.batching.memory_utilization) == (None, 0.9)
    assert spec.replicas is None


def test_an_object_without_slo_promises_nothing() -> None:
    body = valid_object()
    del body["spec"]["slo"]
    slo = parse(body).spec.slo
    assert slo == SloSpec()
    assert not slo.has_target


@pytest.mark.parametrize(
    ("accelerator", "gpus", "expected"), [("nvidia", None, 1), ("nvidia", 1, 1), ("cpu", None, 0)]
)
def test_gpus_follow_the_accelerator(accelerator: str, gpus: int | None, expected: int) -> None:
    body = changed(valid_object(), "spec.hardware.accelerator", accelerator)
    assert parse(changed(body, "spec.hardware.gpus", gpus)).spec.hardware.num_gpus == expected


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ("24Gi", 24 << 30),
        ("1500Mi", 1500 << 20),
        ("0.5Ki", 512),
        ("3M", 3_000_000),
        (7, 7),
        (2**50, 2**50),
    ],
)
def test_memory_is_read_in_bytes(written: Any, expected: int) -> None:
    body = changed(valid_object(), "spec.hardware.memory", written)
    assert parse(body).spec.hardware.memory_bytes == expected


@pytest.mark.parametrize(
    ("written", "expected_ms"),
    [("1ms", 1), ("0.5s", 500), ("1m30s", 90_000), ("1h", 3_600_000), ("1.5m1ms", 90_001)],
)
def test_durations_add_their_parts_up(written: str, expected_ms: float) -> None:
    body = changed(valid_object(), "spec.slo.timeToFirstToken", written)
    assert parse(body).spec.slo.ttft_ms == expected_ms


@pytest.mark.parametrize("path", ["spec.engine.image", "spec.hardware.runtimeClassName"])
def test_what_may_be_left_out_may_be_empty(path: str) -> None:
    assert parse(changed(valid_object(), path, "")) == parse(valid_object())


def test_a_percentile_without_quotes_is_taken() -> None:
    assert parse(changed(valid_object(), "spec.slo.percentile", 95)).spec.slo.percentile == "95"


@pytest.mark.parametrize(("written", "share"), [("0.25", 0.25), ("0", 0.0), (0, 0.0), (1, 1.0)])
def test_a_share_is_a_text_and_needs_no_quotes_where_it_is_whole(
    written: Any, share: float
) -> None:
    body = changed(valid_object(), "spec.slo.holdShare", written)
    assert parse(body).spec.slo.hold_share == share


def test_tolerations_come_back_as_a_pod_wants_them() -> None:
    wire = {"key": "gpu", "operator": "Exists", "effect": "NoSchedule"}
    body = changed(valid_object(), "spec.hardware.tolerations", [wire])
    assert [t.manifest() for t in parse(body).spec.hardware.tolerations] == [wire]


_DURATION = "must be a duration between"
UNREADABLE = [
    Invalid("spec", 3, "spec: Expected `object`"),
    Invalid("spec.model", REMOVED, "spec: Object missing required field `model`"),
    Invalid("spec.model.uri", 7, "spec.model.uri: Expected `str`"),
    Invalid("spec.model.uri", "a" * 300, "spec.model.uri: Expected `str` of length <= 253"),
    Invalid("spec.model.task", "Sing", "spec.model.task: Invalid enum value 'Sing'"),
    Invalid("spec.model.maxModelLen", 0, "spec.model.maxModelLen: Expected `int` >= 1"),
    Invalid("spec.engine.args", ["--seed=1"] * 129, "spec.engine.args: Expected `array` of length"),
    Invalid("spec.hardware.memory", "24GB", "spec.hardware.memory: must be bytes over zero"),
    Invalid("spec.hardware.memory", "0Gi", "spec.hardware.memory: must be bytes over zero"),
    Invalid("spec.hardware.memory", -1, "spec.hardware.memory: must be bytes over zero"),
    Invalid("spec.hardware.cpu", "0.5m", "spec.hardware.cpu: must be CPUs from 1m to 1024"),
    Invalid("spec.hardware.tolerations", [{"key": 1}], "spec.hardware.tolerations[0].key: Expect"),
    Invalid("spec.batching.maxNumSeqs", "Many", "spec.batching.maxNumSeqs: Expected `int | null`"),
    Invalid("spec.batching.memoryUtilization", "1.5", 'must be a string from "0.01" to "1"'),
    Invalid("spec.slo.percentile", "100", 'must be a string from "50" to "99.99"'),
    Invalid("spec.slo.timeToFirstToken", "half a second", f"timeToFirstToken: {_DURATION}"),
    Invalid("spec.slo.holdShare", "-1", 'spec.slo.holdShare: must be a string from "0" to "1"'),
    Invalid("spec.slo.window", "1h", "workers keep evidence of half an hour"),
    Invalid("spec.drain.timeout", "2h", f"spec.drain.timeout: {_DURATION}"),
]


@pytest.mark.parametrize("case", UNREADABLE, ids=lambda case: f"{case.path}={case.value!r:.40}")
def test_what_cannot_be_read_is_refused_with_its_path(case: Invalid) -> None:
    assert case.says in problem(case.body)


NEWER = {
    "spec.warmup": True,
    "spec.model.weights": "x",
    "spec.engine.volumes": [{"name": "a"}],
    "spec.scaling.behavior.scaleUp.policies": [],
}


def test_fields_of_a_newer_crd_are_left_out_and_named() -> None:
    body = valid_object()
    for path, value in NEWER.items():
        body = changed(body, path, value)
    service = parse(body)
    assert set(service.unknown) == set(NEWER)
    assert service.spec == parse(changed(valid_object(), "spec.engine", {})).spec


def test_they_are_left_out_of_lists_too() -> None:
    known = {"key": "gpu", "operator": "Exists"}
    body = changed(valid_object(), "spec.hardware.tolerations", [{**known, "since": "5m"}])
    service = parse(body)
    assert service.unknown == ("spec.hardware.tolerations[0].since",)
    assert [t.manifest() for t in service.spec.hardware.tolerations] == [known]


@given(valid_objects())
@settings(max_examples=1000)
def test_every_valid_object_is_read(body: Object) -> None:
    service = parse(body)
    spec = service.spec
    assert service.unknown == ()
    assert service.name == "demo"
    assert spec.model.name
    assert spec.hardware.memory_bytes > 0
    assert spec.hardware.cpu_millis > 0
    assert spec.scaling.min_replicas <= spec.scaling.max_replicas


@given(arbitrary_objects())
@settings(max_examples=1000)
def test_an_odd_object_is_read_or_refused_and_never_a_traceback(body: Object) -> None:
    outcome = outcome_of(body)
    assert isinstance(outcome, InferenceService) or outcome.startswith("spec")


@pytest.mark.parametrize("body", [{}, {"metadata": None}])
def test_an_object_without_a_body_is_refused(body: Object) -> None:
    assert problem(body) == "spec: Object missing required field `model`"


@pytest.mark.parametrize("path", sorted((ROOT / "examples").glob("*.yaml")), ids=lambda p: p.name)
def test_every_example_is_valid(path: Path) -> None:
    body = yaml.safe_load(path.read_text())
    read = parse if body["kind"] == "InferenceService" else parse_batch
    found = read(body)
    assert (found.name, found.unknown) == (path.stem, ())


def test_the_batch_of_the_docs_is_the_example() -> None:
    page = (ROOT / "docs/batch.md").read_text()
    block = page.split("```yaml\n")[1].split("```")[0]
    assert yaml.safe_load(block) == yaml.safe_load((ROOT / "examples/batch.yaml").read_text())
