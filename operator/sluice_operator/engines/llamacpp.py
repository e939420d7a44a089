"""llama.cpp's server, which runs GGUF files. Pure."""

from .engine import LOOPBACK, PORT, Engine, Invocation, Start, flags

_SLOT_TOKENS = 4096
"""Context of a slot where `maxModelLen` is left out: `--ctx-size` is shared by all slots."""


def _invoke(start: Start) -> Invocation:
    spec = start.spec
    slot_tokens = spec.model.max_model_len or _SLOT_TOKENS
    given = {
        "hf-repo" if start.is_hub else "model": start.model,
        "alias": spec.model.name,
        "batch-size": spec.batching.max_num_batched_tokens,
        "no-cache-prompt": not spec.batching.prefix_caching,
    }
    owned = {
        "host": LOOPBACK,
        "port": PORT,
        "parallel": start.capacity,
        "ctx-size": (start.capacity or 1) * slot_tokens,
    }
    env = {"LLAMA_CACHE": start.cache} if start.is_hub else {}
    return Invocation((), _apart(flags(given)), (*_apart(flags(owned)), "--metrics"), env)


def _apart(joined: tuple[str, ...]) -> tuple[str, ...]:
    """llama.cpp takes a flag and its value as two arguments."""
    return tuple(part for flag in joined for part in flag.split("=", 1))


ENGINE = Engine(
    gate_name="llamacpp",
    image="ghcr.io/ggml-org/llama.cpp:server-cuda",
    invoke=_invoke,
    default_capacity=4,
    takes_budget=True,
    takes_gguf=True,
)
