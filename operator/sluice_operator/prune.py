"""Fields of an object that this operator does not know are left out, and named. Pure.

A newer CRD has them while the operator is the old one: during an upgrade, or rolled back. Whoever
writes an object by hand is told of them by the API server and by `sluice`, which read strictly.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from .children import digest
from .events import Notice
from .fields import Schema, object_schema
from .observed import Object
from .reasons import Reason
from .spec import Spec

_SCHEMA = object_schema(Spec)


def prune(body: Object) -> tuple[Object, tuple[str, ...]]:
    """The object with the known fields of its spec, and the paths of the others."""
    unknown: list[str] = []
    spec = _known(body.get("spec", {}), _SCHEMA, "spec", unknown)
    return ({**body, "spec": spec} if unknown else body), tuple(unknown)


def notice(unknown: tuple[str, ...], generation: int) -> Notice:
    """That the fields `unknown` are left out, told once for each edit."""
    text = f"left out, as this operator does not know them: {', '.join(unknown)}"
    key = f"unknown/{digest(unknown)}/{generation}"
    return Notice(True, Reason.UNKNOWN_FIELDS, text, key)


def _known(value: Any, schema: Schema, path: str, unknown: list[str]) -> Any:
    """`value` without what `schema` does not know, the paths of which go to `unknown`."""
    properties = schema.get("properties")
    if properties and isinstance(value, Mapping):
        unknown += [f"{path}.{key}" for key in value if key not in properties]
        return {
            key: _known(inner, properties[key], f"{path}.{key}", unknown)
            for key, inner in value.items()
            if key in properties
        }
    if "items" in schema and isinstance(value, Sequence) and not isinstance(value, str):
        items = schema["items"]
        return [_known(inner, items, f"{path}[{n}]", unknown) for n, inner in enumerate(value)]
    return value
