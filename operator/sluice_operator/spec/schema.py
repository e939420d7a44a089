"""The structs of the spec as the CRD's schema, and the object's spelling made theirs. Pure."""

import inspect
import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal, get_args, get_origin

from msgspec import NODEFAULT, Meta, Struct, structs

from .kinds import Schema


def object_schema(cls: type[Struct]) -> Schema:
    """The structural schema of `cls`: properties with their defaults, and what is required."""
    fields = structs.fields(cls)
    lines = re.findall(r"^(\w+): (.+(?:\n +.+)*)", inspect.getdoc(cls) or "", re.MULTILINE)
    words = {name: " ".join(said.split()) for name, said in lines}
    required = [field.encode_name for field in fields if field.required]
    named = {field.encode_name: _property(field, words[field.encode_name]) for field in fields}
    needs = {"required": required} if required else {}
    return {"type": "object", **needs, "properties": named}


def choice(literal: Any) -> Schema:
    """One of the texts of a `Literal`, spelled exactly."""
    return {"type": "string", "enum": list(get_args(literal))}


def wire_form(hint: Any, value: Any, path: str, unknown: list[str]) -> Any:
    """`value` as `msgspec.convert` takes it for `hint`: amounts read, nulls left out.

    Fields that the struct has not are left out too; their paths go to `unknown`. Raises ValueError,
    worded as msgspec's: `WHAT - at $PATH`.
    """
    kind, meta = _parts(hint)
    if read := (meta.extra or {}).get("read"):
        try:
            return read(value)
        except ValueError as e:
            raise ValueError(f"{e} - at `${path}`") from e
    if isinstance(value, Mapping) and isinstance(kind, type) and issubclass(kind, Struct):
        hints = {field.encode_name: field.type for field in structs.fields(kind)}
        unknown += sorted(f"{path}.{key}" for key in value if key not in hints)
        return {
            key: wire_form(hints[key], inner, f"{path}.{key}", unknown)
            for key, inner in value.items()
            if key in hints and inner is not None
        }
    if isinstance(value, list) and get_origin(kind) is tuple:
        item = get_args(kind)[0]
        return [wire_form(item, one, f"{path}[{n}]", unknown) for n, one in enumerate(value)]
    return value


def _parts(hint: Any) -> tuple[Any, Meta]:
    """The type of a field, without None, and its Meta."""
    if type(None) in get_args(hint):
        [hint] = (one for one in get_args(hint) if one is not type(None))
    if get_origin(hint) is Annotated:
        return hint.__origin__, hint.__metadata__[0]
    return hint, Meta()


def _property(field: structs.FieldInfo, words: str) -> Schema:
    (_, meta), schema = _parts(field.type), _schema(field.type)
    made = field.default if field.default_factory is NODEFAULT else field.default_factory()
    default = (meta.extra or {}).get("default", made)
    if isinstance(default, Struct):
        # Rules are checked over a default as it is written, so it must be written in full.
        inner = schema["properties"].items()
        default = {name: value["default"] for name, value in inner if "default" in value}
    elif isinstance(default, tuple):
        default = list(default)
    given = {} if default in (NODEFAULT, None, "") else {"default": default}
    return {"description": words, **given, **schema}


def _schema(hint: Any) -> Schema:
    kind, meta = _parts(hint)
    if schema := (meta.extra or {}).get("schema"):
        return dict(schema)
    if get_origin(kind) is Literal:
        return choice(kind)
    if kind is bool:
        return {"type": "boolean"}
    if kind is int:
        return {"type": "integer", "format": "int32", "minimum": meta.ge, "maximum": meta.le}
    if kind is str:
        return {"type": "string", "minLength": meta.min_length, "maxLength": meta.max_length}
    if get_origin(kind) is tuple:
        items = {"maxItems": meta.max_length, "items": _schema(get_args(kind)[0])}
        return {"type": "array", **items, "x-kubernetes-list-type": "atomic"}
    if get_origin(kind) is dict:
        values = _schema(get_args(kind)[1])
        return {"type": "object", "maxProperties": meta.max_length, "additionalProperties": values}
    return object_schema(kind)
