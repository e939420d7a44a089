"""Routes of other engines, for a gate in front of one: what of a body is a sequence. Pure.

An engine may have routes that are in no table, or other names for these: vLLM's `/invocations`
takes the bodies of all. So a path without a row is counted by every field that any row counts.
"""

from .operations import NO_WORK, Counting, Operation

_INPUTS = Counting(("input", "inputs", "prompt"))
_COMPLETION = Counting(("prompt", "prompt_embeds"), has_n=True)

_COUNTED = {
    "/completions": _COMPLETION,  # llama.cpp's names
    "/completion": _COMPLETION,
    "/infill": _COMPLETION,
    "/chat/completions": Counting(has_n=True),
    "/v1/messages": Counting(has_n=True),  # Anthropic's
    "/v1/responses": Counting(chat="input", has_n=True),
    "/api/generate": Counting(("prompt",), has_n=True, is_stream=True),  # Ollama's
    "/api/chat": Counting(has_n=True, is_stream=True),
    "/api/embed": _INPUTS,
    "/api/embeddings": _INPUTS,
    "/embeddings": _INPUTS,
    "/apply-template": NO_WORK,
    "/v1/messages/count_tokens": NO_WORK,
    "/api/show": NO_WORK,
}
OPERATIONS = tuple(
    Operation("POST", path, "Of other engines.", counting=counting)
    for path, counting in _COUNTED.items()
)
