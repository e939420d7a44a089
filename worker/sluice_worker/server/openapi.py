"""The OpenAPI document of the API port, made from the types of its bodies. Pure."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec
from msgspec import Struct

from . import shapes

Schema = dict[str, Any]
JSON, SSE, TEXT = "application/json", "text/event-stream", "text/plain"
_REF = "#/components/schemas/{name}"
_WORDS: Mapping[int, str] = {
    400: "The request cannot be right; `param` names the field.",
    401: "A valid bearer token is required.",
    404: "The model is not the one served here.",
    408: "The body did not arrive in time.",
    413: "The body is too large.",
    429: "Too much work; Retry-After says when to come back.",
    500: "This request failed in the engine.",
    503: "This worker does not serve now; Retry-After says when it may.",
}
BODY_ERRORS = (400, 404, 408, 413, 503)
WORK_ERRORS = (400, 404, 408, 413, 429, 500, 503)


@dataclass(frozen=True, slots=True)
class Operation:
    """One route as the document shows it.

    `bodies`: types of which the request's body is one, with the parameters that are accepted only
    at values that ask for nothing; `event`: the type of a stream's events; `answers`: the statuses
    of which the body is `reply`; `errors`: those whose body is an ErrorReply.
    """

    method: str
    path: str
    summary: str
    reply: type[Struct] | None
    bodies: tuple[type[Struct], ...] = ()
    neutral: Mapping[str, tuple[object, ...]] = field(default_factory=dict)
    event: type[Struct] | None = None
    media_type: str = JSON
    answers: tuple[int, ...] = (200,)
    errors: tuple[int, ...] = ()
    example: object = None


def document(operations: Iterable[Operation], *, version: str, has_keys: bool) -> Schema:
    """The whole document. `has_keys`: the API asks for a bearer token."""
    operations = list(operations)
    paths: dict[str, Schema] = {}
    for operation in operations:
        errors = (*operation.errors, *((401,) if has_keys else ()))
        paths.setdefault(operation.path, {})[operation.method] = _operation(operation, errors)
    components: Schema = {"schemas": _schemas(operations)}
    found: Schema = {
        "openapi": "3.1.0",
        "info": {"title": "Sluice", "version": version, "description": _ABOUT},
        "paths": paths,
        "components": components,
    }
    if has_keys:
        components["securitySchemes"] = {"bearer": {"type": "http", "scheme": "bearer"}}
        found["security"] = [{"bearer": []}]
    return found


_ABOUT = (
    "One model over OpenAI's API, with vLLM's additions. Parameters are honoured or refused by "
    "name; fields that nobody knows are left alone, as clients depend on that."
)


def _operation(operation: Operation, errors: tuple[int, ...]) -> Schema:
    answers: dict[str, Schema] = {
        str(status): {"description": "The answer.", "content": _content(operation)}
        for status in operation.answers
    }
    for status in errors:
        answers[str(status)] = {
            "description": _WORDS[status],
            "content": {JSON: {"schema": _ref(shapes.ErrorReply)}},
        }
    found: Schema = {"summary": operation.summary, "responses": answers}
    if operation.bodies:
        kinds = [_ref(body) for body in operation.bodies]
        body: Schema = {"schema": kinds[0] if len(kinds) == 1 else {"anyOf": kinds}}
        if operation.example is not None:
            body["example"] = operation.example
        found["requestBody"] = {"required": True, "content": {JSON: body}}
    names = [part[1:-1] for part in operation.path.split("/") if part.startswith("{")]
    if names:
        found["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
            for name in names
        ]
    return found


def _content(operation: Operation) -> Schema:
    if operation.reply is None:
        return {operation.media_type: {"schema": {"type": "string"}}}
    content: Schema = {operation.media_type: {"schema": _ref(operation.reply)}}
    if operation.event is not None:
        name = operation.event.__name__
        about = f"`data:` lines, each with a {name}, then `data: [DONE]` if all went well."
        content[SSE] = {"schema": {"type": "string", "description": about}}
    return content


def _schemas(operations: list[Operation]) -> dict[str, Schema]:
    kinds: list[type[Struct]] = [shapes.ErrorReply]
    for operation in operations:
        kinds += [*operation.bodies, *(k for k in (operation.reply, operation.event) if k)]
    _, schemas = msgspec.json.schema_components(kinds, ref_template=_REF)
    for operation in operations:
        for body in operation.bodies:
            properties = schemas[body.__name__]["properties"]
            for name, values in operation.neutral.items():
                properties.setdefault(name, {"enum": list(values), "description": _NEUTRAL})
    return schemas


_NEUTRAL = "Not built: only the value that asks for nothing is accepted."


def _ref(kind: type[Struct]) -> Schema:
    return {"$ref": _REF.format(name=kind.__name__)}
