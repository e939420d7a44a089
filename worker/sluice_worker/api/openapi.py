"""The OpenAPI document of the API port, made from the types of its bodies. Pure."""

import re
from collections.abc import Collection, Iterable, Mapping
from typing import Any, TypeGuard

import msgspec
from msgspec import Struct
from sluice_frontend.api.operations import JSON, Kinds, Operation
from sluice_frontend.api.response_types import ErrorReply

Schema = dict[str, Any]
SSE = "text/event-stream"
REF = "#/components/schemas/{name}"

_WORDS: Mapping[int, str] = {
    400: "The request cannot be right; `param` names the field.",
    401: "A valid bearer token is required.",
    404: "The model, or what the path names, is not here.",
    408: "The body did not arrive in time.",
    409: "It is over already.",
    413: "The body is too large.",
    429: "Too much work; Retry-After says when to come back.",
    500: "This request failed.",
    507: "The directory of files cannot be written.",
    503: "This worker does not serve now; Retry-After says when it may.",
}
_ABOUT = (
    "One model over OpenAI's API, with vLLM's additions. Parameters are honoured or refused by "
    "name; fields that nobody knows are left alone, as clients depend on that."
)
_NEUTRAL = "Not built: only the value that asks for nothing is accepted."


def document(
    operations: Iterable[Operation], *, version: str, has_keys: bool, open_paths: Collection[str]
) -> Schema:
    """The whole document. `has_keys`: all but `open_paths` ask for a bearer token."""
    operations = list(operations)
    paths: dict[str, Schema] = {}
    for operation in operations:
        is_open = not has_keys or operation.path in open_paths
        path = operation.path.replace(":path", "")
        paths.setdefault(path, {})[operation.method.lower()] = _operation(operation, is_open)
    components: Schema = {"schemas": _schemas(operations)}
    if has_keys:
        components["securitySchemes"] = {"bearer": {"type": "http", "scheme": "bearer"}}
    return {
        "openapi": "3.2.0",  # the first that can say what the items of a stream are
        "info": {"title": "Sluice", "version": version, "description": _ABOUT},
        "paths": paths,
        "components": components,
    }


def _operation(operation: Operation, is_open: bool) -> Schema:
    answers: dict[str, Schema] = {
        str(status): {"description": "The answer.", "content": _content(operation)}
        for status in operation.answers
    }
    for status in (*operation.errors, *(() if is_open else (401,))):
        answers[str(status)] = {
            "description": _WORDS[status],
            "content": {JSON: {"schema": _ref(ErrorReply)}},
        }
    found: Schema = {"summary": operation.summary, "responses": answers}
    if not is_open:
        found["security"] = [{"bearer": []}]
    if operation.bodies:
        body: Schema = {"schema": _one_of("anyOf", [_body(kinds) for kinds in operation.bodies])}
        if operation.example is not None:
            body["example"] = operation.example
        found["requestBody"] = {"required": True, "content": {operation.accepts: body}}
    names = re.findall(r"\{(\w+)", operation.path)
    if names:
        found["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
            for name in names
        ]
    return found


def _content(operation: Operation) -> Schema:
    content: Schema = {}
    if _is_struct(operation.reply):
        content[operation.media_type] = {"schema": _ref(operation.reply)}
    elif operation.reply is not None:
        (found,), _ = msgspec.json.schema_components([operation.reply], ref_template=REF)
        content[operation.media_type] = {"schema": found}
    elif operation.event is None:
        content[operation.media_type] = {"schema": {"type": "string"}}
    if operation.event is not None:
        content[SSE] = {"itemSchema": _event(operation.event)}
    return content


def _event(kind: type[Struct]) -> Schema:
    """One server-sent event. A stream that breaks off ends with an ErrorReply instead of [DONE]."""
    parsed = {"anyOf": [_ref(kind), _ref(ErrorReply)]}
    json = {"contentMediaType": JSON, "contentSchema": parsed}
    data = {"type": "string", "anyOf": [json, {"const": "[DONE]"}]}
    return {"type": "object", "required": ["data"], "properties": {"data": data}}


def _schemas(operations: list[Operation]) -> dict[str, Schema]:
    kinds: list[Any] = [ErrorReply]
    for operation in operations:
        kinds += [kind for body in operation.bodies for kind in body]
        kinds += [kind for kind in (operation.reply, operation.event) if kind is not None]
    _, schemas = msgspec.json.schema_components(kinds, ref_template=REF)
    for operation in operations:
        for body in operation.bodies:
            known = {name for kind in body for name in kind.__struct_fields__}
            properties = schemas[body[-1].__name__]["properties"]
            for name, values in operation.neutral.items():
                if name not in known:
                    properties[name] = {"enum": list(values), "description": _NEUTRAL}
    return schemas


def _is_struct(kind: Any) -> TypeGuard[type[Struct]]:
    return isinstance(kind, type) and issubclass(kind, Struct)


def _body(kinds: Kinds) -> Schema:
    return _one_of("allOf", [_ref(kind) for kind in kinds])


def _one_of(word: str, schemas: list[Schema]) -> Schema:
    return schemas[0] if len(schemas) == 1 else {word: schemas}


def _ref(kind: type[Struct]) -> Schema:
    return {"$ref": REF.format(name=kind.__name__)}
