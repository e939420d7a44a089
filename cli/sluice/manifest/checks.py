"""Check an object as the API server and the operator do: schema, CEL rules, parse, overlay."""

import functools
import importlib
import importlib.util
import ipaddress
from collections.abc import Callable, Iterator
from typing import Any

from sluice_operator.children import manifests
from sluice_operator.settings import Settings
from sluice_operator.spec.kinds import MEMORY, Schema
from sluice_operator.spec.service import SpecError, parse
from sluice_operator.status.crd import crd

from .draft import Object

_TYPES = {"object": dict, "array": list, "string": str, "integer": int, "boolean": bool}
_BOUNDS: dict[str, Callable[[Any, Any], bool]] = {
    "minimum": lambda value, bound: value < bound,
    "maximum": lambda value, bound: value > bound,
    "minLength": lambda value, bound: len(value) < bound,
    "maxLength": lambda value, bound: len(value) > bound,
    "maxItems": lambda value, bound: len(value) > bound,
    "maxProperties": lambda value, bound: len(value) > bound,
}


def has_rules() -> bool:
    """Return whether the library that evaluates CEL, the extra `from`, is installed."""
    return importlib.util.find_spec("cel") is not None


def refusal(body: Object) -> str | None:
    """Return the first sentence against the object, or None."""
    schema = crd()["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    spec = {"spec": schema["properties"]["spec"]}
    root = {**schema, "properties": {**spec, "metadata": _ANY, "apiVersion": {}, "kind": {}}}
    filled = _filled(root, body)
    if said := next(_refusals(root, filled, ""), None):
        return said
    if has_rules() and (said := next(_broken(root, filled, ""), None)):
        return said
    try:
        service = parse(filled)
        manifests.check(service, Settings(worker_image="sluice-worker"))
    except SpecError as e:
        return str(e)
    return f"no such field: {', '.join(service.unknown)}" if service.unknown else None


_ANY: Schema = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}


def _filled(schema: Schema, value: Any) -> Any:
    """Return `value` with the schema's defaults, as the API server checks it."""
    if isinstance(value, dict) and schema.get("properties"):
        value = {key: one for key, one in value.items() if one is not None}
        fields = schema["properties"]
        absent = {key: one["default"] for key, one in fields.items() if "default" in one}
        return {key: _filled(fields.get(key, {}), one) for key, one in {**absent, **value}.items()}
    if isinstance(value, list):
        return [_filled(schema.get("items", {}), one) for one in value]
    return value


def _children(schema: Schema, value: Any, path: str) -> Iterator[tuple[Schema, Any, str]]:
    if isinstance(value, dict):
        known, others = schema.get("properties", {}), schema.get("additionalProperties")
        for key, one in value.items():
            if key in known or others:
                yield known.get(key, others), one, f"{path}.{key}".lstrip(".")
    elif isinstance(value, list) and "items" in schema:
        for at, one in enumerate(value):
            yield schema["items"], one, f"{path}[{at}]"


def _refusals(schema: Schema, value: Any, path: str) -> Iterator[str]:
    """Yield a sentence for each value that the structural schema refuses."""
    kind = schema.get("type")
    ints = schema.get("x-kubernetes-int-or-string")
    is_int = isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**63
    right = (is_int or isinstance(value, str)) if ints else (
        is_int if kind == "integer" else not kind or isinstance(value, _TYPES[kind])
    )  # fmt: skip
    if not right:
        yield f"{path}: must be of type {'integer or string' if ints else kind}"
        return
    if value not in schema.get("enum", [value]):
        yield f"{path}: Unsupported value {value!r}: one of {', '.join(schema['enum'])}"
    for bound, exceeds in _BOUNDS.items():
        if bound in schema and exceeds(value, schema[bound]):
            yield f"{path}: {bound} is {schema[bound]}"
    if isinstance(value, dict):
        for key in schema.get("required", []):
            if key not in value:
                yield f"{path}.{key}: Required value".lstrip(".")
        open_ended = {"additionalProperties", "x-kubernetes-preserve-unknown-fields"}
        if "properties" in schema and not open_ended & schema.keys():
            yield from (
                f"{path}.{key}: no such field" for key in value.keys() - schema["properties"]
            )
    for child in _children(schema, value, path):
        yield from _refusals(*child)


def _broken(schema: Schema, value: Any, path: str) -> Iterator[str]:
    """Yield the sentences of CEL rules that do not hold, the deepest fields first."""
    for child in _children(schema, value, path):
        yield from _broken(*child)
    for one in schema.get("x-kubernetes-validations", ()):
        if "oldSelf" not in one["rule"] and not _holds(one["rule"], value):
            yield f"{path}: {one['message']}".removeprefix(": ")


def _holds(rule: str, value: Any) -> bool:
    try:
        return bool(_program(rule).execute(_context(value)))
    except (ValueError, RuntimeError, TypeError):
        return False  # a rule that fails is one that refuses, as at the API server


@functools.cache
def _program(rule: str) -> Any:
    return importlib.import_module("cel").compile(rule)


def _context(value: Any) -> Any:
    """Return `self` and the functions of Kubernetes that the rules call."""
    given = {
        "quantity": lambda text: _amount(text), "isLessThan": lambda a, b: a < b,
        "isGreaterThan": lambda a, b: a > b, "sum": sum, "isCIDR": _is_network,
        "cidr": lambda text: text, "masked": _masked,
        "replace": lambda text, old, new: text.replace(old, new),
    }  # fmt: skip
    return importlib.import_module("cel").Context({"self": value}, given)


def _amount(text: str) -> float:
    """Return a quantity in its unit: bytes, or CPUs."""
    if text.endswith("m"):
        return float(text[:-1]) / 1000
    return float(MEMORY._sum(text))


def _is_network(text: str) -> bool:
    try:
        ipaddress.ip_network(text, strict=False)
    except ValueError:
        return False
    return "/" in text


def _masked(text: str) -> str:
    return str(ipaddress.ip_network(text, strict=False))
