"""llama.cpp's server, which runs GGUF files. Pure."""

from .engine import LOOPBACK, ForeignEngine, Invocation, Start, flags


def _invoke(start: Start) -> Invocation:
    given = {
        "hf-repo" if start.is_hub else "model": start.model,
        "alias": start.name,
        "batch-size": start.budget,
        "no-cache-prompt": not start.prefix_caching,
    }
    # All slots share the context.
    context = start.max_model_len and start.capacity * start.max_model_len
    owned = {
        "host": LOOPBACK, "port": start.port, "parallel": start.capacity, "ctx-size": context
    }  # fmt: skip
    env = {"LLAMA_CACHE": start.cache} if start.is_hub and start.cache else {}
    return Invocation((), _apart(flags(given)), (*_apart(flags(owned)), "--metrics"), env)


def _apart(joined: tuple[str, ...]) -> tuple[str, ...]:
    """Split `--NAME=VALUE`: llama.cpp takes a flag and its value as two arguments."""
    return tuple(part for flag in joined for part in flag.split("=", 1))


ENGINE = ForeignEngine(
    name="llamacpp",
    kind="LlamaCpp",
    image="ghcr.io/ggml-org/llama.cpp:server-cuda",
    invoke=_invoke,
    capacity=4,
    owned_flags=(
        "--host", "--port", "--api-key", "--parallel", "-np", "--ctx-size", "-c", "--metrics",
    ),
    owned_variables=("LLAMA_CACHE",),
    waiting=("llamacpp:requests_deferred",),
    tokens=("llamacpp:tokens_predicted_total", "llamacpp:prompt_tokens_total"),
    about="/props",
    takes_budget=True,
    takes_gguf=True,
    slot_tokens=4096,
    program="llama-server",
    install="https://github.com/ggml-org/llama.cpp",
)  # fmt: skip
