"""JSON bytes -> one validated request, or a 4xx that names the field. Pure.

A parameter is honoured, or refused by name. A known one that is not built is accepted with its
neutral value, because clients send these. Unknown fields are ignored, as in vLLM.
"""

import json
import logging
from array import array
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct
from sluice_core.contract import MAX_MS
from sluice_core.errors import RequestError, UnsupportedParameter
from sluice_core.work import Deadlines

from . import response_types
from .json_body import convert, parse_object
from .operations import WORK_ERRORS, Counting, Operation
from .sampling_params import (
    MAX_SEQUENCES,
    OPENAI,
    Defaults,
    NumLogprobs,
    SamplingFields,
    SamplingParams,
    TokenId,
    resolve,
)

log = logging.getLogger(__name__)

GENERATE_MAX_TOKENS = 128
COMPLETION_MAX_TOKENS = 16  # OpenAI's default for completions

Tokens = Annotated[int, Meta(ge=1, le=2**31 - 1)]
TokensOrNone = Annotated[int, Meta(ge=0, le=2**31 - 1)]
Name = Annotated[str, Meta(min_length=1, max_length=256)]
ModelName = Annotated[str, Meta(max_length=256)]
"""Empty or missing: whatever is served."""
Priority = Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)]
DeadlineMs = Annotated[float, Meta(gt=0, le=MAX_MS)]
REQUEST_ID = "^[ -~]{1,128}$"
"""Pattern of a request's id, in its body or its header: printable ASCII."""
RequestId = Annotated[str, Meta(pattern=REQUEST_ID)]

# `_prompts` checks these: msgspec has no union of lists, so the document is told.
IDS = {"type": "array", "minItems": 1, "items": {"type": "integer", "minimum": 0}}
_PROMPT = {"anyOf": [{"type": "string", "minLength": 1}, IDS]}
_LISTS = [{"type": "array", "minItems": 1, "items": kind} for kind in ({"type": "string"}, IDS)]
OnePrompt = Annotated[str | list[Any], Meta(extra_json_schema=_PROMPT)]
Prompts = Annotated[
    str | list[Any], Meta(extra_json_schema={"anyOf": [*_PROMPT["anyOf"], *_LISTS]})
]


class StreamOptions(Struct, frozen=True):
    """OpenAI's stream_options; the second is vLLM's. Null is false, the default."""

    include_usage: bool | None = False
    continuous_usage_stats: bool | None = False


class AnswerFields(SamplingFields, frozen=True, kw_only=True):
    """The model, and the form of the answer: shared by completions and chats."""

    model: ModelName | None = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = False
    request_id: RequestId | None = None
    cache_salt: Name | None = None
    user: str | None = None
    service_tier: str | None = None  # a provider's prices: here all requests are of one
    priority: Priority | None = 0
    slo_ttft_ms: DeadlineMs | None = None
    slo_tpot_ms: DeadlineMs | None = None


class CompletionBody(AnswerFields, frozen=True, kw_only=True):
    """The fields of POST /v1/completions that are honoured."""

    prompt: Prompts
    max_tokens: TokensOrNone | None = COMPLETION_MAX_TOKENS
    logprobs: NumLogprobs | None = None
    echo: bool | None = False
    add_special_tokens: bool | None = True
    parse_special: bool | None = None


class GenerateFields(SamplingFields, frozen=True, kw_only=True):
    """The fields of POST /generate that are honoured, but for the prompt."""

    model: ModelName | None = None
    max_tokens: Tokens | None = GENERATE_MAX_TOKENS
    stream: bool | None = None
    do_sample: bool | None = None
    details: bool | None = None
    add_special_tokens: bool | None = True
    parse_special: bool | None = None
    return_token_ids: bool | None = False
    cache_salt: Name | None = None
    slo_ttft_ms: DeadlineMs | None = None
    slo_tpot_ms: DeadlineMs | None = None


class GenerateBody(GenerateFields, frozen=True, kw_only=True):
    """The body of POST /generate; one in text-generation-inference's form is brought to it."""

    prompt: OnePrompt


class Parameters(GenerateFields, frozen=True, kw_only=True):
    """`parameters` of an InputsBody: the names of text-generation-inference, and ours."""

    max_new_tokens: Tokens | None = None
    truncate: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = None
    ignore_eos_token: bool | None = None


class InputsBody(Struct, frozen=True, kw_only=True):
    """text-generation-inference's form of a GenerateBody."""

    inputs: OnePrompt
    parameters: Parameters | None = None
    stream: bool | None = None


# Neutral values of known parameters that are not built. Sources: OpenAI's and vLLM's completions
# body, TGI's generate body (contract: fields that benchmark clients send).
NEUTRAL: Mapping[str, tuple[object, ...]] = {
    "adapter_id": (None,),
    "decoder_input_details": (None, False),
    "details": (None, False),
    "ec_transfer_params": (None, {}),
    "grammar": (None,),
    "guided_choice": (None,),
    "guided_decoding_backend": (None,),
    "guided_grammar": (None,),
    "guided_json": (None,),
    "guided_regex": (None,),
    "guided_whitespace_pattern": (None,),
    "kv_transfer_params": (None, {}),
    "length_penalty": (None, 1),
    "logprob_token_ids": (None,),
    "logits_processors": (None, []),
    "lora_request": (None,),
    "max_repetition_pattern_size": (None, 0),
    "min_repetition_pattern_size": (None, 0),
    "prompt_embeds": (None,),
    "repetition_detection": (None,),
    "repetition_min_count": (None, 0),
    "response_format": (None, {"type": "text"}),
    "return_full_text": (None, False),
    "return_token_offsets": (None, False),
    "routed_experts_prompt_start": (None, 0),
    "stream_interval": (None, 1),
    "structured_outputs": (None,),
    "suffix": (None, ""),
    "thinking_token_budget": (None,),
    "top_n_tokens": (None, 0),
    "truncation_side": (None, "left"),
    "typical_p": (None, 1),
    "use_beam_search": (None, False),
    "vllm_xargs": (None, {}),
    "watermark": (None, False),
    "watermarking": (None, False),
}


@dataclass(frozen=True, slots=True)
class Completion:
    """One validated request; lengths are not checked against the model here.

    `prompts`: text, or token ids, from the field `prompt_field`. `max_tokens`, from the field
    `length_field`: None for as many as the window leaves. `has_default_length`: the caller named no
    length, and is not refused for it. `prompt_logprobs`: number in the reply's own field.
    `echo`: the reply begins with the prompt. `is_scoring`: the reply is only the prompt. Then
    max_tokens is 1, because the engine ends a sequence with a token; it is not sent.
    `parse_special`: texts of special tokens in a prompt are control tokens; None: server's default.
    """

    prompts: tuple[str | Sequence[int], ...]
    max_tokens: int | None
    has_default_length: bool
    sampling: SamplingParams
    model: str | None = None
    prompt_logprobs: int | None = None
    echo: bool = False
    is_scoring: bool = False
    add_special_tokens: bool = True
    parse_special: bool | None = None
    stream: bool = False
    include_usage: bool = False
    continuous_usage: bool = False
    return_token_ids: bool = False
    request_id: str | None = None
    cache_salt: str = ""
    client: str = ""
    priority: int = 0
    is_background: bool = False
    prompt_field: str = "prompt"
    length_field: str = "max_tokens"
    deadlines: Deadlines = Deadlines()


def answered(request: Completion, body: AnswerFields) -> Completion:
    """`request` with the shared fields; raises RequestError."""
    options = body.stream_options
    if options not in (None, StreamOptions()) and not body.stream:
        raise RequestError("stream_options needs stream: true", param="stream_options")
    has_usage = options is not None and bool(options.include_usage)
    is_continuous = options is not None and bool(options.continuous_usage_stats)
    return replace(
        request,
        model=body.model,
        prompt_logprobs=body.prompt_logprobs,
        stream=bool(body.stream),
        include_usage=has_usage,
        continuous_usage=has_usage and is_continuous,
        return_token_ids=bool(body.return_token_ids),
        request_id=body.request_id,
        cache_salt=body.cache_salt or "",
        priority=body.priority or 0,
        deadlines=Deadlines(body.slo_ttft_ms, body.slo_tpot_ms),
    )


def parse_completion(body: bytes, defaults: Defaults = OPENAI) -> Completion:
    """The request in the body of POST /v1/completions; raises RequestError naming the field."""
    fields = _without_null_length(parse_object(body))
    refuse_unsupported(fields, (*CompletionBody.__struct_fields__, "best_of"))
    if fields.get("best_of") not in (None, 1 if fields.get("n") is None else fields["n"]):
        raise UnsupportedParameter("best_of other than n is not supported", param="best_of")
    typed = convert(fields, CompletionBody)
    prompts = _prompts(typed.prompt)
    sampling = _completion_sampling(typed, defaults)
    if len(prompts) * sampling.n > MAX_SEQUENCES:
        raise RequestError(
            f"{len(prompts)} prompts x n {sampling.n} are over the limit of {MAX_SEQUENCES} "
            "sequences",
            param="n" if len(prompts) == 1 else "prompt",
        )
    request = Completion(
        prompts=prompts,
        max_tokens=1 if typed.max_tokens == 0 else typed.max_tokens,
        has_default_length="max_tokens" not in fields,
        sampling=sampling,
        echo=bool(typed.echo),
        is_scoring=typed.max_tokens == 0,
        add_special_tokens=typed.add_special_tokens is not False,
        parse_special=typed.parse_special,
    )
    return answered(request, typed)


def _completion_sampling(body: CompletionBody, defaults: Defaults) -> SamplingParams:
    if body.max_tokens == 0 and not body.echo:
        raise RequestError("max_tokens 0 needs echo: true", param="max_tokens")
    refuse_streamed_scores(body.stream, body.prompt_logprobs)
    return resolve(
        body,
        max_tokens=body.max_tokens,
        logprobs=body.logprobs,
        prompt_logprobs=body.logprobs if body.echo else None,
        defaults=defaults,
    )


_NOT_GENERATE: Mapping[str, object] = {
    "n": 1,
    "best_of": 1,
    "echo": False,
    "logprobs": None,
    "prompt_logprobs": None,
    "return_tokens_as_token_ids": False,
}


def parse_generate_stream(body: bytes, defaults: Defaults = OPENAI) -> Completion:
    """As `parse_generate`, for the route whose name asks for a stream."""
    request = parse_generate(body, defaults, default_stream=True)
    if not request.stream:
        raise RequestError("stream false contradicts /generate_stream", param="stream")
    return request


def parse_generate(
    body: bytes, defaults: Defaults = OPENAI, *, default_stream: bool = False
) -> Completion:
    """The request in the body of POST /generate: `prompt`, or `inputs` and `parameters` as TGI's.

    Greedy unless a temperature or do_sample says otherwise (TGI's default).
    """
    fields = _without_null_length(_merge_parameters(parse_object(body)))
    refuse_unsupported(fields, (*GenerateBody.__struct_fields__, *_NOT_GENERATE))
    for name, neutral in _NOT_GENERATE.items():
        if fields.get(name) not in (None, neutral):
            raise UnsupportedParameter(
                f"{name} is not supported by /generate; use /v1/completions", param=name
            )
    typed = convert(fields, GenerateBody)
    prompts = _prompts(typed.prompt)
    if len(prompts) != 1:
        raise RequestError("/generate takes one prompt", param="prompt")
    return Completion(
        model=typed.model,
        prompts=prompts,
        max_tokens=typed.max_tokens,
        has_default_length="max_tokens" not in fields,
        sampling=resolve(
            typed,
            max_tokens=typed.max_tokens,
            logprobs=0 if typed.details else None,
            defaults=_generate_defaults(typed, defaults),
        ),
        add_special_tokens=typed.add_special_tokens is not False,
        parse_special=typed.parse_special,
        stream=default_stream if typed.stream is None else typed.stream,
        return_token_ids=bool(typed.return_token_ids),
        cache_salt=typed.cache_salt or "",
        deadlines=Deadlines(typed.slo_ttft_ms, typed.slo_tpot_ms),
    )


def refuse_streamed_scores(is_stream: bool | None, prompt_logprobs: int | None) -> None:
    """Raises RequestError for a prompt's scores in a stream; 0 is allowed there, as in vLLM."""
    if is_stream and prompt_logprobs:
        raise RequestError(
            "prompt_logprobs are not available with stream: true", param="prompt_logprobs"
        )


def _without_null_length(fields: dict[str, Any]) -> dict[str, Any]:
    """`fields` without a null length, for which the default holds, as in vLLM."""
    if fields.get("max_tokens", 0) is None:
        del fields["max_tokens"]
    return fields


_RENAMED: Mapping[str, str] = {
    "inputs": "prompt",
    "max_new_tokens": "max_tokens",
    "ignore_eos_token": "ignore_eos",
    "truncate": "truncate_prompt_tokens",
}


def _merge_parameters(fields: dict[str, Any]) -> dict[str, Any]:
    """Convert TGI's nesting and names to ours; a field given twice is refused."""
    parameters = fields.pop("parameters", None)
    if not isinstance(parameters, dict | None):
        raise RequestError("parameters must be an object", param="parameters")
    merged: dict[str, Any] = {}
    for name, value in [*fields.items(), *(parameters or {}).items()]:
        target = _RENAMED.get(name) or name
        if target in merged:
            raise RequestError(f"{target} is given twice", param=name)
        merged[target] = value
    return merged


def _generate_defaults(body: GenerateBody, defaults: Defaults) -> Defaults:
    """`defaults`, but greedy unless a field asks to sample; top_k and the like do, as in TGI."""
    if body.do_sample is False and body.temperature:
        raise RequestError("do_sample false contradicts a temperature over 0", param="do_sample")
    is_narrowed = (body.top_k or 0) > 0 or bool(body.min_p) or (body.top_p or 1.0) < 1
    if body.do_sample or (body.do_sample is None and is_narrowed):
        return defaults
    return msgspec.structs.replace(defaults, temperature=0.0)


def _prompts(prompt: str | list[Any]) -> tuple[str | Sequence[int], ...]:
    """The four forms of OpenAI's `prompt` as a tuple of texts, or of token ids: in arrays, as a
    list of them takes ten times the memory."""
    if isinstance(prompt, str):
        return (prompt,)
    if not prompt:
        raise RequestError("prompt is an empty list", param="prompt")
    first = prompt[0]
    if isinstance(first, str | list) and len(prompt) > MAX_SEQUENCES:  # before each is looked at
        raise RequestError(
            f"{len(prompt)} prompts are over the limit of {MAX_SEQUENCES} sequences", param="prompt"
        )
    if isinstance(first, str):
        return tuple(convert(prompt, list[str], "prompt"))
    if isinstance(first, list):
        return tuple(array("i", ids) for ids in convert(prompt, list[list[TokenId]], "prompt"))
    return (array("i", convert(prompt, list[TokenId], "prompt")),)


def refuse_unsupported(
    fields: Mapping[str, Any],
    known: Collection[str],
    neutral: Mapping[str, tuple[object, ...]] = NEUTRAL,
) -> None:
    """Raise UnsupportedParameter for a known field that is not built and asks for something."""
    for name, value in fields.items():
        if name in known:
            continue
        if name not in neutral:
            log.debug("unknown field ignored", extra={"field": name[:64]})
        elif not any(_is_same(value, item) for item in neutral[name]):
            accepted = " or ".join(json.dumps(item) for item in neutral[name])
            raise UnsupportedParameter(
                f"{name} is not supported by this server; leave it out or send {accepted}",
                param=name,
            )


def _is_same(value: object, item: object) -> bool:
    """True if both are equal as JSON: true is not 1."""
    return value == item and isinstance(value, bool) == isinstance(item, bool)


_INPUTS = {"inputs": "def add(a, b):", "parameters": {"max_new_tokens": 8}}
_GENERATE = Counting(("inputs", "prompt", "text", "input_ids", "input_embeds"), has_n=True)
COMPLETIONS = Operation(
    "POST",
    "/v1/completions",
    "Text that follows a prompt.",
    response_types.CompletionReply,
    bodies=((CompletionBody,),),
    neutral=NEUTRAL,
    event=response_types.CompletionChunk,
    errors=WORK_ERRORS,
    example={"prompt": "def add(a, b):", "max_tokens": 8},
    counting=Counting(("prompt", "prompt_embeds"), has_n=True),
)
GENERATE = Operation(
    "POST",
    "/generate",  # TGI's, ours and SGLang's
    "Text that follows one prompt; greedy if nothing else is asked for.",
    response_types.GenerateReply,
    bodies=((GenerateBody,), (InputsBody,)),
    neutral=NEUTRAL,
    event=response_types.GenerateChunk,
    errors=WORK_ERRORS,
    example=_INPUTS,
    counting=_GENERATE,
)
GENERATE_STREAM = replace(
    GENERATE,
    path="/generate_stream",
    summary="As /generate, streamed.",
    reply=None,
    counting=_GENERATE._replace(is_stream=True),
)
OPERATIONS = (COMPLETIONS, GENERATE, GENERATE_STREAM)
