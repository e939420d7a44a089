"""Reply bodies as bytes, of the types in `response_types`. Pure."""

import msgspec
from sluice_core.errors import SluiceError

from .response_types import CachedTokens, ErrorInfo, ErrorReply, Usage

encode = msgspec.json.encode
DONE = b"data: [DONE]\n\n"


def usage(num_prompt: int, num_completion: int, num_cached: int) -> Usage:
    """Counts of one sequence, or of a request, summed over its sequences."""
    total = num_prompt + num_completion
    return Usage(num_prompt, total, num_completion, CachedTokens(num_cached))


def error_body(error: SluiceError) -> bytes:
    return encode(
        ErrorReply(ErrorInfo(error.message, error.kind, error.param, error.http_status, error.code))
    )


def error_event(error: SluiceError) -> bytes:
    """The last event of a stream that was cut; no [DONE] follows it."""
    return event(error_body(error))


def event(data: bytes) -> bytes:
    return b"data: %s\n\n" % data
