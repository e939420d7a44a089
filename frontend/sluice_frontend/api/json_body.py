"""The bytes of a body -> a JSON object -> a typed struct, or a 400 naming the field. Pure."""

import json
import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

import msgspec
from msgspec.inspect import ListType, LiteralType, StructType, Type, UnionType, type_info
from sluice_core.errors import RequestError

T = TypeVar("T")
MAX_CONTAINERS = 1 << 18
"""Most lists and objects of one body, and brackets in its texts. A body of only these takes twenty
times its size, and blocks all other Python code."""
MAX_VALUES = 1 << 24
"""Most values between commas: 128 prompts of 131,072 token ids."""
_PATH = re.compile(r" - at (?:`key` in )?`\$([^`]*)`$")


def parse_object(body: bytes) -> dict[str, Any]:
    """`body` as a JSON object. Raises RequestError, with the field if it has one, for bad UTF-8,
    NaN, infinity, a duplicate key, a lone surrogate, depth or digits."""
    if sum(map(body.count, (b"{", b"["))) > MAX_CONTAINERS or body.count(b",") > MAX_VALUES:
        raise RequestError(
            f"the body holds more than {MAX_CONTAINERS:,} lists and objects, or more than "
            f"{MAX_VALUES:,} values"
        )
    try:
        text = body.decode("utf-8")
    except UnicodeDecodeError as error:
        raise RequestError(f"the body is not UTF-8 (byte {error.start})") from error
    is_sound = "\\u" not in text  # else there may be a lone surrogate

    def number(digits: str) -> float:
        nonlocal is_sound
        value = float(digits)
        is_sound = is_sound and math.isfinite(value)
        return value

    try:
        value = json.loads(
            text, object_pairs_hook=_object, parse_constant=number, parse_float=number
        )
    except RecursionError as error:
        raise RequestError("the body is nested too deeply") from error
    except json.JSONDecodeError as error:
        raise RequestError(f"the body is not JSON: {error}") from error
    except ValueError as error:  # Python's bound on the digits of one integer
        raise RequestError("the body holds a number of more than 4,300 digits") from error
    if not isinstance(value, dict):
        raise RequestError("the body must be a JSON object")
    if not is_sound:
        _refuse_flaws(value)
    return value


def _refuse_flaws(fields: Mapping[str, Any]) -> None:
    """Raise for non-finite numbers and invalid texts, at any depth that could be parsed."""
    for name, value in fields.items():
        held: list[object] = [name, value]
        while held:
            item, problem = held.pop(), None
            if isinstance(item, dict):
                held += [*item, *item.values()]
            elif isinstance(item, list):
                held += item
            elif isinstance(item, str) and any("\ud800" <= char <= "\udfff" for char in item):
                problem = "a lone surrogate, which is no character"
            elif isinstance(item, float) and not math.isfinite(item):
                problem = f"{item}, which is not a finite number"
            if problem is not None:
                raise RequestError(f"{name[:64]} holds {problem}", param=name[:64])


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) != len(pairs):
        (name, _), *_ = Counter(name for name, _ in pairs).most_common(1)
        raise RequestError(f"the field {name[:64]} is given twice", param=name[:64])
    return fields


def convert(value: object, kind: type[T], param: str | None = None) -> T:
    """`value` as `kind`; raises RequestError naming the field: `param`, or the error's own."""
    try:
        return _typed(value, kind)
    except msgspec.ValidationError as error:
        if (name := param) is None:
            missing = re.search(r"missing required field `(.*?)`", str(error))
            steps = [at[1].removeprefix(".") for at in (_PATH.search(str(error)), missing) if at]
            param = ".".join(steps) or "body"
            name = re.split(r"\W", param)[0]
        raise RequestError(f"{param}: {_sentence(error, kind)}", param=name) from error


def _typed(value: Any, kind: type[T]) -> T:
    """`value` as `kind`, in which 3.0 is an integer, as in JSON Schema.

    Fields within objects stay as they came: a template may print them.
    """
    try:
        return msgspec.convert(value, type=kind, str_keys=True)
    except msgspec.ValidationError:
        is_object = isinstance(value, dict)
        whole = {k: _whole(item) for k, item in value.items()} if is_object else _whole(value)
        return msgspec.convert(whole, type=kind, str_keys=True)


def _whole(value: object, depth: int = 2) -> object:
    """`value`, or what lists of at most `depth` levels hold, with integers as such."""
    if isinstance(value, list) and depth:
        return [_whole(item, depth - 1) for item in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _sentence(error: msgspec.ValidationError, kind: object) -> str:
    """msgspec's message without its path, with the few values that a field of `kind` may have."""
    text, path = _PATH.sub("", str(error)), _PATH.search(str(error))
    if "missing required field" in text:
        return "this field is required"
    if path is not None and text.startswith("Invalid enum value"):
        steps = re.findall(r"[^\W\d]\w*|\[", path[1])
        text += f"; it may be {' or '.join(map(json.dumps, _values(type_info(kind), steps)))}"
    return text


def _values(kind: Type, steps: list[str]) -> Iterator[object]:
    """The allowed values at path `steps` of a type; a step is a field's name, or [ for items."""
    match kind:
        case UnionType():
            for each in kind.types:
                yield from _values(each, steps)
        case StructType():
            for field in kind.fields:
                if [field.encode_name] == steps[:1]:
                    yield from _values(field.type, steps[1:])
        case ListType():
            yield from _values(kind.item_type, steps[1:])
        case LiteralType():
            yield from kind.values
