"""The committed CRD is what `spec` says, and has no type that the API server would round."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
from msgspec import Struct, structs
from sluice_core.contract import TargetName
from sluice_operator.spec.service import parse
from sluice_operator.status.crd import BATCHES, SERVICES, Definition, crd, render
from sluice_operator.tuner.types import LimitedBy, Verdict
from unit.operator.objects import changed, valid_object

ROOT = Path(__file__).parents[4]
SCHEMA, BATCH_SCHEMA = (
    crd(one)["spec"]["versions"][0]["schema"]["openAPIV3Schema"] for one in (SERVICES, BATCHES)
)
each_schema = pytest.mark.parametrize("schema", [SCHEMA, BATCH_SCHEMA], ids=["service", "batch"])


def nodes(schema: dict[str, Any], path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Every schema inside `schema`, with its path."""
    yield path, schema
    for name, child in schema.get("properties", {}).items():
        yield from nodes(child, f"{path}.{name}")
    for key in ("items", "additionalProperties"):
        if isinstance(schema.get(key), dict):
            yield from nodes(schema[key], f"{path}[]")


@pytest.mark.parametrize("definition", [SERVICES, BATCHES], ids=lambda one: one.plural)
@pytest.mark.parametrize("folder", ["crds", "charts/sluice/files"])
def test_the_committed_copy_is_what_the_definition_gives(
    folder: str, definition: Definition
) -> None:
    assert (ROOT / folder / f"{definition.plural}.yaml").read_text() == render(definition)


def test_the_module_writes_the_crds(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-m", "sluice_operator.status.crd", tmp_path], check=True)
    made = {path.name: path.read_text() for path in tmp_path.iterdir()}
    assert made == {f"{one.plural}.yaml": render(one) for one in (SERVICES, BATCHES)}


@each_schema
def test_the_schema_has_no_floats(schema: dict[str, Any]) -> None:
    assert [path for path, node in nodes(schema) if node.get("type") == "number"] == []


@each_schema
def test_no_field_is_named_what_yaml_reads_as_a_boolean(schema: dict[str, Any]) -> None:
    names = {name.lower() for _, node in nodes(schema) for name in node.get("properties", {})}
    assert names.isdisjoint({"n", "y", "on", "off", "yes", "no"})


@each_schema
def test_every_field_of_the_spec_is_described(schema: dict[str, Any]) -> None:
    schema = schema["properties"]["spec"]
    bare = [
        f"{path}.{name}"
        for path, node in nodes(schema)
        for name, child in node.get("properties", {}).items()
        if not child.get("description")
    ]
    assert bare == []


@each_schema
def test_every_list_and_map_of_the_spec_is_bounded(schema: dict[str, Any]) -> None:
    for path, node in nodes(schema["properties"]["spec"]):
        if node.get("type") == "array":
            assert "maxItems" in node, path
        if "additionalProperties" in node:
            assert "maxProperties" in node, path


def test_the_schema_holds_nothing_that_helm_would_take_for_a_template() -> None:
    assert not re.search(r"\{\{|\}\}", render() + render(BATCHES))


def test_defaults_of_the_crd_are_those_of_the_structs() -> None:
    written = valid_object()
    filled = written
    for path, node in nodes(SCHEMA["properties"]["spec"], "spec"):
        if "default" in node and "[]" not in path and not path.startswith("spec.slo"):
            already = written
            for part in path.split("."):
                already = already.get(part, {}) if isinstance(already, dict) else {}
            if already == {}:
                filled = changed(filled, path, node["default"])
    assert filled != written
    assert parse(filled) == parse(written)


def test_every_struct_of_the_spec_is_frozen() -> None:
    pending: list[Struct] = [parse(valid_object()).spec]
    while pending:
        value = pending.pop()
        assert value.__struct_config__.frozen, type(value)
        inner = [getattr(value, field.name) for field in structs.fields(value)]
        pending += [one for one in inner if isinstance(one, Struct)]


def test_the_status_lists_every_word_of_the_tuner() -> None:
    properties = SCHEMA["properties"]["status"]["properties"]
    assert (
        ", ".join(get_args(LimitedBy))
        in properties["batching"]["properties"]["limitedBy"]["description"]
    )
    for name in get_args(TargetName):
        target = properties["slo"]["properties"][name]["properties"]
        assert ", ".join(get_args(Verdict)) in target["verdict"]["description"]


@each_schema
def test_a_newer_operators_status_passes_at_every_level(schema: dict[str, Any]) -> None:
    """Fields that it adds are kept, and no word of ours is of an enum, which it would outgrow."""
    levels = [(path, node) for path, node in nodes(schema["properties"]["status"], "status")]
    objects = [node for _, node in levels if "properties" in node]
    assert all(node["x-kubernetes-preserve-unknown-fields"] for node in objects)
    assert [path for path, node in levels if "enum" in node] == ["status.conditions[].status"]
