"""Claims on what is left out of an object that is newer than the operator."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from sluice_operator.prune import prune
from sluice_operator.spec import SpecError, parse
from unit.operator.objects import changed, valid_object, valid_objects

NEWER = {
    "spec.warmup": True,
    "spec.model.adapters": [{"name": "a"}],
    "spec.scaling.behavior.scaleUp.policies": [],
}


def test_fields_of_a_newer_crd_are_left_out_and_named() -> None:
    body = valid_object()
    for path, value in NEWER.items():
        body = changed(body, path, value)
    known, unknown = prune(body)
    assert set(unknown) == set(NEWER)
    assert parse(known) == parse(valid_object())


def test_they_are_left_out_of_lists_too() -> None:
    known = {"key": "gpu", "operator": "Exists"}
    body = changed(valid_object(), "spec.hardware.tolerations", [{**known, "since": "5m"}])
    pruned, unknown = prune(body)
    assert unknown == ("spec.hardware.tolerations[0].since",)
    assert pruned["spec"]["hardware"]["tolerations"] == [known]


def test_reading_itself_stays_strict() -> None:
    with pytest.raises(SpecError, match=r"spec\.warmup: unknown field"):
        parse(changed(valid_object(), "spec.warmup", True))


@given(valid_objects())
def test_a_valid_object_stays_as_it_is(body: dict[str, Any]) -> None:
    assert prune(body) == (body, ())


@pytest.mark.parametrize("spec", [None, [], "x", {"model": 3, "hardware": [{}]}])
def test_what_is_no_object_is_left_to_the_reader(spec: Any) -> None:
    assert prune({"spec": spec}) == ({"spec": spec}, ())
