"""An object asks for things of its own namespace only: the operator may do more than its user."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

CRDS = Path(__file__).parents[4] / "crds"


def _fields(schema: Any) -> Iterator[str]:
    if isinstance(schema, dict):
        yield from schema.get("properties", {})
        for inner in schema.values():
            yield from _fields(inner)
    elif isinstance(schema, list):
        for inner in schema:
            yield from _fields(inner)


@pytest.mark.parametrize("plural", ["inferenceservices", "inferencebatches"])
def test_no_field_of_an_object_names_another_namespace(plural: str) -> None:
    [version] = yaml.safe_load((CRDS / f"{plural}.yaml").read_text())["spec"]["versions"]
    fields = set(_fields(version["schema"]["openAPIV3Schema"]["properties"]["spec"]))
    assert "secretRef" in fields
    assert not {field for field in fields if "namespace" in field.lower()}
