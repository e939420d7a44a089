"""Fields of an object that this operator does not know are left out, and named. Pure.

A newer CRD has them while the operator is the old one: during an upgrade, or rolled back. Whoever
writes an object by hand is told of them by the API server and by `sluice`, which read strictly.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from .children import digest
from .events import Notice
from .fields import Schema, object_schema
from .reasons import Reason
from .spec import Spec

Object = Mapping[str, Any]

_SCHEMA = object_schema(Spec)


def prune(body: Object) -> tuple[Object, tuple[str, ...]]:
    """The object with the known fields of its spec, and the paths of the others."""
    spec = body.get("spec", {})
    unknown = tuple(_unknown(spec, _SCHEMA, "spec"))
    return ({**body, "spec": _known(spec, _SCHEMA)} if unknown else body), unknown


def notice(unknown: tuple[str, ...], generation: int) -> Notice:
    """That the fields `unknown` are left out, told once for each edit."""
    text = f"left out, as this operator does not know them: {', '.join(unknown)}"
    key = f"unknown/{digest(unknown)}/{generation}"
    return Notice(True, Reason.UNKNOWN_FIELDS, text, key)


def _unknown(value: Any, schema: Schema, path: str) -> Iterator[str]:
    properties = schema.get("properties")
    if properties and isinstance(value, Mapping):
        for key, inner in value.items():
            if key in properties:
                yield from _unknown(inner, properties[key], f"{path}.{key}")
            else:
                yield f"{path}.{key}"
    elif _is_list(value, schema):
        for index, inner in enumerate(value):
            yield from _unknown(inner, schema["items"], f"{path}[{index}]")


def _known(value: Any, schema: Schema) -> Any:
    properties = schema.get("properties")
    if properties and isinstance(value, Mapping):
        return {k: _known(v, properties[k]) for k, v in value.items() if k in properties}
    if _is_list(value, schema):
        return [_known(inner, schema["items"]) for inner in value]
    return value


def _is_list(value: Any, schema: Schema) -> bool:
    return "items" in schema and isinstance(value, Sequence) and not isinstance(value, str)
