"""JSON bytes -> one validated request, or a 4xx that names the field. Pure.

A parameter is either honoured or refused by name; a known one that is not built yet is accepted
with the value that changes nothing (clients send those). Unknown fields are ignored with a debug
log, as vLLM does, because some clients depend on that.
"""

import json
import logging
import math
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta, Struct

from .deadlines import MAX_MS, Deadlines
from .errors import RequestError, UnsupportedParameter

log = logging.getLogger(__name__)
T = TypeVar("T")

MAX_N = 128
MAX_SEQUENCES = 1024
"""Sequences of one request (prompts x n): bounded before anything is allocated for them."""
MAX_STOPS = 16
GENERATE_MAX_TOKENS = 128
COMPLETION_MAX_TOKENS = 16  # OpenAI's default for completions

Tokens = Annotated[int, Meta(ge=1, le=2**31 - 1)]
TokenId = Annotated[int, Meta(ge=0, le=2**31 - 1)]
Temperature = Annotated[float, Meta(ge=0, le=100)]
Seed = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
Stop = Annotated[str, Meta(min_length=1, max_length=1024)]
Name = Annotated[str, Meta(min_length=1, max_length=256)]
DeadlineMs = Annotated[float, Meta(gt=0, le=MAX_MS)]
RequestId = Annotated[str, Meta(pattern=r"^[A-Za-z0-9._:-]{1,128}$")]


class StreamOptions(Struct, frozen=True):
    """OpenAI's stream_options; the second is vLLM's."""

    include_usage: bool = False
    continuous_usage_stats: bool = False


class CompletionBody(Struct, frozen=True):
    """The fields of POST /v1/completions that are honoured."""

    prompt: str | list[Any]
    model: Name | None = None
    max_tokens: Tokens | None = COMPLETION_MAX_TOKENS
    temperature: Temperature | None = 1.0
    seed: Seed | None = None
    n: Annotated[int, Meta(ge=1, le=MAX_N)] | None = 1
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    stop: Stop | Annotated[list[Stop], Meta(max_length=MAX_STOPS)] | None = None
    stop_token_ids: Annotated[list[TokenId], Meta(max_length=64)] | None = None
    ignore_eos: bool = False
    min_tokens: Annotated[int, Meta(ge=0, le=2**31 - 1)] = 0
    return_token_ids: bool | None = False
    request_id: RequestId | None = None
    cache_salt: Annotated[str, Meta(min_length=1, max_length=256)] | None = None
    user: str | None = None
    slo_ttft_ms: DeadlineMs | None = None
    slo_tpot_ms: DeadlineMs | None = None


class GenerateBody(Struct, frozen=True):
    """The fields of POST /generate that are honoured, `parameters` already merged in."""

    prompt: str | list[Any]
    model: Name | None = None
    max_tokens: Tokens | None = GENERATE_MAX_TOKENS
    temperature: Temperature | None = None
    do_sample: bool | None = None
    seed: Seed | None = None
    stop: Stop | Annotated[list[Stop], Meta(max_length=MAX_STOPS)] | None = None
    ignore_eos: bool = False
    min_tokens: Annotated[int, Meta(ge=0, le=2**31 - 1)] = 0
    return_token_ids: bool | None = False
    slo_ttft_ms: DeadlineMs | None = None
    slo_tpot_ms: DeadlineMs | None = None


# Known parameters that are not built: the values that ask for nothing. Sources: OpenAI's and vLLM's
# completions body, TGI's generate body (contract: what benchmark clients send).
NEUTRAL: Mapping[str, tuple[object, ...]] = {
    "adapter_id": (None,),
    "add_special_tokens": (None, True),
    "allowed_token_ids": (None,),
    "bad_words": (None, []),
    "decoder_input_details": (None, False),
    "details": (None, False),
    "echo": (None, False),
    "frequency_penalty": (None, 0),
    "grammar": (None,),
    "guided_choice": (None,),
    "guided_grammar": (None,),
    "guided_json": (None,),
    "guided_regex": (None,),
    "include_stop_str_in_output": (None, False),
    "kv_transfer_params": (None,),
    "length_penalty": (None, 1),
    "logit_bias": (None, {}),
    "logits_processors": (None, []),
    "logprobs": (None,),
    "lora_request": (None,),
    "min_p": (None, 0),
    "presence_penalty": (None, 0),
    "priority": (None, 0),
    "prompt_embeds": (None,),
    "prompt_logprobs": (None,),
    "repetition_penalty": (None, 1),
    "response_format": (None, {"type": "text"}),
    "return_full_text": (None, False),
    "return_tokens_as_token_ids": (None, False),
    "skip_special_tokens": (None, True),
    "spaces_between_special_tokens": (None, True),
    "stream_interval": (None, 1),
    "structured_outputs": (None,),
    "suffix": (None, ""),
    "top_k": (None, -1, 0),
    "top_n_tokens": (None, 0),
    "top_p": (None, 1),
    "truncate": (None,),
    "truncate_prompt_tokens": (None,),
    "typical_p": (None, 1),
    "use_beam_search": (None, False),
    "watermark": (None, False),
}


@dataclass(frozen=True, slots=True)
class Completion:
    """One validated request; lengths are not checked against the model here.

    `prompts`: text, or token ids. `max_tokens` None: as many as the window leaves.
    `has_default_length`: the caller did not name a length, so that it may be cut to the window.
    """

    model: str | None
    prompts: tuple[str | tuple[int, ...], ...]
    n: int
    max_tokens: int | None
    has_default_length: bool
    temperature: float
    seed: int | None
    stop: tuple[str, ...]
    stop_token_ids: tuple[int, ...]
    ignore_eos: bool
    min_tokens: int
    stream: bool = False
    include_usage: bool = False
    continuous_usage: bool = False
    return_token_ids: bool = False
    request_id: str | None = None
    cache_salt: str = ""
    deadlines: Deadlines = Deadlines()


def parse_completion(body: bytes) -> Completion:
    """The request in the body of POST /v1/completions; raises RequestError naming the field."""
    fields = parse_object(body)
    _refuse_unsupported(fields, CompletionBody)
    if fields.get("best_of") not in (None, fields.get("n", 1)):
        raise UnsupportedParameter("best_of other than n is not supported", param="best_of")
    typed = _convert(fields, CompletionBody)
    options = typed.stream_options
    if options is not None and not typed.stream:
        raise RequestError("stream_options needs stream: true", param="stream_options")
    prompts = _prompts(typed.prompt, "prompt")
    n = typed.n or 1
    if len(prompts) * n > MAX_SEQUENCES:
        raise RequestError(
            f"{len(prompts)} prompts x n {n} are over the limit of {MAX_SEQUENCES} sequences",
            param="n" if len(prompts) == 1 else "prompt",
        )
    return Completion(
        model=typed.model,
        prompts=prompts,
        n=n,
        max_tokens=typed.max_tokens,
        has_default_length="max_tokens" not in fields,
        temperature=1.0 if typed.temperature is None else typed.temperature,
        seed=typed.seed,
        stop=_stops(typed.stop),
        stop_token_ids=tuple(typed.stop_token_ids or ()),
        ignore_eos=typed.ignore_eos,
        min_tokens=_min_tokens(typed.min_tokens, typed.max_tokens),
        stream=bool(typed.stream),
        include_usage=options is not None and options.include_usage,
        continuous_usage=options is not None
        and options.include_usage
        and options.continuous_usage_stats,
        return_token_ids=bool(typed.return_token_ids),
        request_id=typed.request_id,
        cache_salt=typed.cache_salt or "",
        deadlines=Deadlines(typed.slo_ttft_ms, typed.slo_tpot_ms),
    )


def parse_generate(body: bytes) -> Completion:
    """The request in the body of POST /generate: `prompt`, or `inputs` and `parameters` as TGI's.

    Greedy unless a temperature or do_sample says otherwise (TGI's default).
    """
    fields = _merge_parameters(parse_object(body))
    _refuse_unsupported(fields, GenerateBody)
    for name, neutral in (("n", 1), ("best_of", 1), ("stream", False)):
        if fields.get(name) not in (None, neutral):
            raise UnsupportedParameter(
                f"{name} is not supported by /generate; use /v1/completions", param=name
            )
    typed = _convert(fields, GenerateBody)
    prompts = _prompts(typed.prompt, "prompt")
    if len(prompts) != 1:
        raise RequestError("/generate takes one prompt", param="prompt")
    return Completion(
        model=typed.model,
        prompts=prompts,
        n=1,
        max_tokens=typed.max_tokens,
        has_default_length="max_tokens" not in fields,
        temperature=_generate_temperature(typed),
        seed=typed.seed,
        stop=_stops(typed.stop),
        stop_token_ids=(),
        ignore_eos=typed.ignore_eos,
        min_tokens=_min_tokens(typed.min_tokens, typed.max_tokens),
        return_token_ids=bool(typed.return_token_ids),
        deadlines=Deadlines(typed.slo_ttft_ms, typed.slo_tpot_ms),
    )


_RENAMED: Mapping[str, str] = {"inputs": "prompt", "max_new_tokens": "max_tokens"}


def _merge_parameters(fields: dict[str, Any]) -> dict[str, Any]:
    """TGI's nesting and names brought to ours; a field given twice is refused."""
    parameters = fields.pop("parameters", None)
    if not isinstance(parameters, dict | None):
        raise RequestError("parameters must be an object", param="parameters")
    merged: dict[str, Any] = {}
    for name, value in [*fields.items(), *(parameters or {}).items()]:
        target = _RENAMED.get(name) or name
        if target in merged:
            raise RequestError(f"{target} is given twice", param=_printable(name))
        merged[target] = value
    return merged


def _generate_temperature(body: GenerateBody) -> float:
    if body.temperature is None:
        return 1.0 if body.do_sample else 0.0
    if body.do_sample is False and body.temperature > 0:
        raise RequestError("do_sample false contradicts a temperature over 0", param="do_sample")
    return body.temperature


def _min_tokens(min_tokens: int, max_tokens: int | None) -> int:
    if max_tokens is not None and min_tokens > max_tokens:
        raise RequestError(
            f"min_tokens {min_tokens} is over max_tokens {max_tokens}", param="min_tokens"
        )
    return min_tokens


def _stops(stop: str | list[str] | None) -> tuple[str, ...]:
    if stop is None:
        return ()
    return (stop,) if isinstance(stop, str) else tuple(stop)


def _prompts(prompt: str | list[Any], param: str) -> tuple[str | tuple[int, ...], ...]:
    """The four forms of OpenAI's `prompt` as a tuple of texts or token-id tuples."""
    if isinstance(prompt, str):
        return (prompt,)
    if not prompt:
        raise RequestError("prompt is an empty list", param=param)
    first = prompt[0]
    if isinstance(first, str):
        return tuple(_checked(prompt, list[str], param))
    if isinstance(first, list):
        return tuple(tuple(ids) for ids in _checked(prompt, list[list[TokenId]], param))
    return (tuple(_checked(prompt, list[TokenId], param)),)


def _checked(value: object, kind: type[T], param: str) -> T:
    try:
        return msgspec.convert(value, type=kind)
    except msgspec.ValidationError as error:
        raise RequestError(f"{param}: {_sentence(error)}", param=param) from error


def _refuse_unsupported(fields: Mapping[str, Any], kind: type[Struct]) -> None:
    known = kind.__struct_fields__
    for name, value in fields.items():
        neutral = NEUTRAL.get(name)
        if neutral is None:
            if name not in known and name not in ("best_of", "n", "stream"):
                log.debug("unknown field ignored", extra={"field": name[:64]})
        elif value not in neutral:
            accepted = " or ".join(json.dumps(item) for item in neutral)
            raise UnsupportedParameter(
                f"{name} is not supported by this server; leave it out or send {accepted}",
                param=name,
            )


_PATH = re.compile(r" - at `\$([^`]*)`$")


def _convert(fields: Mapping[str, Any], kind: type[T]) -> T:
    try:
        return msgspec.convert(fields, type=kind)
    except msgspec.ValidationError as error:
        text = str(error)
        path = re.search(r"missing required field `(.*)`", text) or _PATH.search(text)
        param = path[1].removeprefix(".") if path else "body"
        name = re.split(r"\W", param)[0]
        raise RequestError(f"{param}: {_sentence(error)}", param=name) from error


def _sentence(error: msgspec.ValidationError) -> str:
    """msgspec's message without its path, which the caller puts in front."""
    text = _PATH.sub("", str(error))
    return "this field is required" if "missing required field" in text else text


class _NotFinite:
    """Stands for NaN or an infinity until the hook below can name the field that holds it."""


def parse_object(body: bytes) -> dict[str, Any]:
    """`body` as a JSON object, strictly: UTF-8, no NaN, no infinity, no duplicate key, no lone
    surrogate, bounded depth and digits; raises RequestError naming the field where there is one.
    """
    try:
        text = body.decode("utf-8")
    except UnicodeDecodeError as error:
        raise RequestError(f"the body is not UTF-8 (byte {error.start})") from error
    strays: list[str] = []

    def stray(digits: str) -> object:
        strays.append(digits)
        return _NotFinite

    def finite(digits: str) -> object:
        value = float(digits)
        return value if math.isfinite(value) else stray(digits)

    try:
        value = json.loads(
            text,
            object_pairs_hook=_object_with_surrogates if "\\u" in text else _object,
            parse_constant=stray,
            parse_float=finite,
        )
    except RecursionError as error:
        raise RequestError("the body is nested too deeply") from error
    except json.JSONDecodeError as error:
        raise RequestError(f"the body is not JSON: {error}") from error
    except ValueError as error:  # Python's bound on the digits of one integer
        raise RequestError("the body holds a number of more than 4,300 digits") from error
    if strays:
        raise RequestError("the body holds a number that is not finite")
    if not isinstance(value, dict):
        raise RequestError("the body must be a JSON object")
    return value


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) != len(pairs):
        (name, _), *_ = Counter(name for name, _ in pairs).most_common(1)
        raise RequestError(f"the field {_printable(name)} is given twice", param=_printable(name))
    for name, value in pairs:
        if value is _NotFinite or (isinstance(value, list) and _NotFinite in value):
            raise RequestError(f"{_printable(name)} is not a finite number", param=_printable(name))
    return fields


def _object_with_surrogates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """As `_object`, for texts with escapes: a lone surrogate is no text and cannot be encoded."""
    for name, value in pairs:
        items = value if isinstance(value, list) else (value,)
        if any(_has_surrogate(text) for text in (name, *items)):
            raise RequestError(
                f"{_printable(name)} holds a lone surrogate, which is no character",
                param=_printable(name),
            )
    return _object(pairs)


def _has_surrogate(value: object) -> bool:
    return isinstance(value, str) and any("\ud800" <= char <= "\udfff" for char in value)


def _printable(name: str) -> str:
    return name[:64].encode("ascii", "backslashreplace").decode()
