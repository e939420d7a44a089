"""The operations of engines, one row a path: what of a body is a sequence. Pure.

An engine may have routes that are not here, or other names for these: vLLM's `/invocations` takes
the bodies of all. So a path without a row is counted by every field that any row counts.
"""

from collections.abc import Mapping
from typing import NamedTuple


class Operation(NamedTuple):
    """How a body is read. `prompts`: fields with a prompt or a list of them; `chat`: the field of a
    conversation, which is one prompt, or of a list of conversations. `has_n`: there may be several
    answers to a prompt. `is_stream`: what a body that does not say gets. `takes_place`: False if it
    brings the engine's batch no work."""

    prompts: tuple[str, ...] = ()
    chat: str = "messages"
    has_n: bool = False
    is_stream: bool = False
    takes_place: bool = True


_CHAT = Operation(has_n=True)
_COMPLETION = Operation(("prompt", "prompt_embeds"), has_n=True)
_GENERATE = Operation(("inputs", "prompt", "text", "input_ids", "input_embeds"), has_n=True)
_INPUTS = Operation(("input", "inputs", "prompt"))
_RANKED = Operation(("documents", "texts"))
_SCORED = Operation(("documents", "items", "data_2", "text_2"))
_NO_WORK = Operation(takes_place=False)

OPERATIONS: Mapping[str, Operation] = {
    "/v1/completions": _COMPLETION,
    "/completions": _COMPLETION,  # llama.cpp's names
    "/completion": _COMPLETION,
    "/infill": _COMPLETION,
    "/v1/chat/completions": _CHAT,
    "/chat/completions": _CHAT,
    "/v1/messages": _CHAT,  # Anthropic's
    "/v1/responses": Operation(chat="input", has_n=True),
    "/generate": _GENERATE,  # TGI's, ours and SGLang's
    "/generate_stream": _GENERATE._replace(is_stream=True),
    "/api/generate": Operation(("prompt",), has_n=True, is_stream=True),  # Ollama's
    "/api/chat": Operation(has_n=True, is_stream=True),
    "/api/embed": _INPUTS,
    "/api/embeddings": _INPUTS,
    "/v1/embeddings": _INPUTS,
    "/embeddings": _INPUTS,
    "/embed": _INPUTS,
    "/classify": _INPUTS,
    "/pooling": _INPUTS,
    "/v1/rerank": _RANKED,
    "/rerank": _RANKED,
    "/v1/score": _SCORED,
    "/score": _SCORED,
    "/tokenize": _NO_WORK,
    "/detokenize": _NO_WORK,
    "/apply-template": _NO_WORK,
    "/v1/messages/count_tokens": _NO_WORK,
    "/api/show": _NO_WORK,
}
_UNKNOWN = Operation(
    prompts=tuple(
        dict.fromkeys(name for operation in OPERATIONS.values() for name in operation.prompts)
    ),
    has_n=True,
)
READING = ("GET", "HEAD", "OPTIONS")
"""Methods that bring the engine's batch no work."""


def operation_of(path: str) -> Operation:
    """The row of a path, or the one that counts all that any row counts."""
    return OPERATIONS.get(path, _UNKNOWN)


def takes_place(method: str, path: str) -> bool:
    """True if a request takes places in the engine."""
    return method not in READING and operation_of(path).takes_place
