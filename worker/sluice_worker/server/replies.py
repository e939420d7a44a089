"""Reply bodies as bytes, in the shapes of `shapes`. Pure.

Chunks of a stream are put together from encoded pieces: a worker with half a core sends a thousand
of them a second, and all but the text is the same in each.
"""

import msgspec

from ..errors import SluiceError
from .shapes import CachedTokens, ErrorInfo, ErrorReply, Usage

encode = msgspec.json.encode
DONE = b"data: [DONE]\n\n"


def usage(num_prompt: int, num_completion: int, num_cached: int) -> Usage:
    """Counts of one sequence, or of a request, summed over its sequences."""
    total = num_prompt + num_completion
    return Usage(num_prompt, total, num_completion, CachedTokens(num_cached))


def error_body(error: SluiceError) -> bytes:
    """vLLM's error body."""
    return encode(
        ErrorReply(ErrorInfo(error.message, error.kind, error.param, error.http_status, error.code))
    )


def error_event(error: SluiceError) -> bytes:
    """The same as the last event of a stream that was cut; no [DONE] follows it."""
    return event(error_body(error))


def event(data: bytes) -> bytes:
    """One server-sent event."""
    return b"data: %s\n\n" % data


class Chunks:
    """The events of one stream of `kind`, which is their `object`."""

    def __init__(self, reply_id: str, created: int, model: str, kind: str) -> None:
        head = encode({"id": reply_id, "object": kind, "created": created, "model": model})
        self._head = b"data: " + head[:-1] + b',"choices":['

    def token(
        self,
        index: int,
        said: bytes,
        finish_reason: str | None,
        stop_reason: str | int | None,
        *,
        logprobs: object = None,
        in_choice: bytes = b"",
        behind: bytes = b"",
    ) -> bytes:
        """One event for one token. `said`, `in_choice`, `behind`: further fields, as JSON."""
        return b'%s{"index":%d,%s,"logprobs":%s,"finish_reason":%s,"stop_reason":%s%s}]%s}\n\n' % (
            self._head,
            index,
            said,
            b"null" if logprobs is None else encode(logprobs),
            b'"%s"' % finish_reason.encode() if finish_reason else b"null",
            encode(stop_reason),
            in_choice,
            behind,
        )

    def usage(self, counts: Usage) -> bytes:
        """The event with empty choices that `stream_options.include_usage` asks for."""
        return self._head + b'],"usage":' + encode(counts) + b"}\n\n"
