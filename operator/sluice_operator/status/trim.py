"""Of a status, what the CRD in force does not know is left out, and named. Pure."""

from collections.abc import Mapping, Sequence
from typing import Any

from ..cluster.observed import Object
from ..spec.kinds import Schema


def prune_status(status: Object, schema: Schema) -> tuple[Object, tuple[str, ...]]:
    """`status` without the fields, and the words, that the CRD's `schema` does not know, and their
    paths. Nothing is left out where the schema is not known either."""
    unknown: list[str] = []
    return _known(status, schema, "status", unknown), tuple(unknown)


def _known(value: Any, schema: Schema, path: str, unknown: list[str]) -> Any:
    """`value` without what `schema` does not know, the paths of which go to `unknown`."""
    properties = schema.get("properties")
    if properties and isinstance(value, Mapping):
        kept = {
            key: inner
            for key, inner in value.items()
            if key in properties and not _is_new_word(inner, properties[key])
        }
        unknown += [f"{path}.{key}" for key in value if key not in kept]
        return {
            key: _known(inner, properties[key], f"{path}.{key}", unknown)
            for key, inner in kept.items()
        }
    if "items" in schema and isinstance(value, Sequence) and not isinstance(value, str):
        items = schema["items"]
        return [_known(inner, items, f"{path}[{n}]", unknown) for n, inner in enumerate(value)]
    return value


def _is_new_word(value: Any, schema: Schema) -> bool:
    return "enum" in schema and value not in schema["enum"]
