"""Reply bodies as bytes, in OpenAI's shape with vLLM's additions. Pure.

Chunks of a stream are put together from encoded pieces: a worker with half a core sends a thousand
of them a second, and all but the text is the same in each.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import msgspec
from msgspec import Struct

from ..errors import SluiceError

encode = msgspec.json.encode
DONE = b"data: [DONE]\n\n"


class CachedTokens(Struct, frozen=True):
    """Prompt tokens that the prefix cache gave."""

    cached_tokens: int


class Usage(Struct, frozen=True):
    """Token counts of a whole request."""

    prompt_tokens: int
    total_tokens: int
    completion_tokens: int
    prompt_tokens_details: CachedTokens


def usage(num_prompt: int, num_completion: int, num_cached: int) -> Usage:
    """Counts of a request, summed over its sequences."""
    total = num_prompt + num_completion
    return Usage(num_prompt, total, num_completion, CachedTokens(num_cached))


def error_body(error: SluiceError) -> bytes:
    """vLLM's error body."""
    return encode({"error": _error(error)})


def error_event(error: SluiceError) -> bytes:
    """The same as the last event of a stream that was cut; no [DONE] follows it."""
    return b"data: " + error_body(error) + b"\n\n"


def _error(error: SluiceError) -> dict[str, Any]:
    return {
        "message": error.message,
        "type": error.kind,
        "param": error.param,
        "code": error.http_status,
        "reason": error.code,
    }


def choice(
    index: int,
    text: str,
    finish_reason: str | None,
    stop_reason: str | int | None,
    token_ids: Sequence[int] | None = None,
    prompt_token_ids: Sequence[int] | None = None,
    logprobs: dict[str, Any] | None = None,
    prompt_logprobs: Sequence[object] | None = None,
) -> dict[str, Any]:
    """One choice of a reply that is not streamed."""
    fields: dict[str, Any] = {
        "index": index,
        "text": text,
        "logprobs": logprobs,
        "finish_reason": finish_reason,
        "stop_reason": stop_reason,
    }
    if token_ids is not None:
        fields |= {"token_ids": token_ids, "prompt_token_ids": prompt_token_ids}
    if prompt_logprobs is not None:
        fields["prompt_logprobs"] = prompt_logprobs
    return fields


def completion(
    reply_id: str, created: int, model: str, choices: Iterable[dict[str, Any]], counts: Usage
) -> bytes:
    """The body of a completion that is not streamed."""
    return encode(
        {
            "id": reply_id,
            "object": "text_completion",
            "created": created,
            "model": model,
            "choices": list(choices),
            "usage": counts,
        }
    )


def generated(reply_id: str, model: str, only: dict[str, Any], counts: Usage) -> bytes:
    """The body of POST /generate."""
    ids = {name: only[name] for name in ("token_ids", "prompt_token_ids") if name in only}
    return encode(
        {
            "id": reply_id,
            "model": model,
            "generated_text": only["text"],
            "finish_reason": only["finish_reason"],
            "stop_reason": only["stop_reason"],
            **ids,
            "usage": counts,
        }
    )


class Chunks:
    """The events of one stream."""

    def __init__(self, reply_id: str, created: int, model: str) -> None:
        head = encode(
            {"id": reply_id, "object": "text_completion", "created": created, "model": model}
        )
        self._head = b"data: " + head[:-1] + b',"choices":['

    def token(
        self,
        index: int,
        text: str,
        finish_reason: str | None,
        stop_reason: str | int | None,
        token_ids: Sequence[int] | None = None,
        prompt_token_ids: Sequence[int] | None = None,
        counts: Usage | None = None,
        logprobs: dict[str, Any] | None = None,
    ) -> bytes:
        """One event for one token."""
        body = b'%s{"index":%d,"text":%s,"logprobs":%s,"finish_reason":%s,"stop_reason":%s' % (
            self._head,
            index,
            encode(text),
            b"null" if logprobs is None else encode(logprobs),
            b'"%s"' % finish_reason.encode() if finish_reason else b"null",
            encode(stop_reason),
        )
        if token_ids is not None:
            body += b',"token_ids":' + encode(token_ids)
            if prompt_token_ids is not None:
                body += b',"prompt_token_ids":' + encode(prompt_token_ids)
        if counts is not None:
            return body + b'}],"usage":' + encode(counts) + b"}\n\n"
        return body + b"}]}\n\n"

    def usage(self, counts: Usage) -> bytes:
        """The event with empty choices that `stream_options.include_usage` asks for."""
        return self._head + b'],"usage":' + encode(counts) + b"}\n\n"


def models(model: str, created: int, root: str, max_model_len: int) -> bytes:
    """The body of GET /v1/models: the one model that is served."""
    card = {
        "id": model,
        "object": "model",
        "created": created,
        "owned_by": "sluice",
        "root": root,
        "parent": None,
        "max_model_len": max_model_len,
        "permission": [],
    }
    return encode({"object": "list", "data": [card]})
