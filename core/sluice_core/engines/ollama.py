"""Ollama, which is told by variables and loads the model before the gate is ready. Pure."""

from .engine import LOOPBACK, ForeignEngine, Invocation, Start

_SERVE = """
ollama serve & server=$!
trap 'kill "$server"' TERM
until ollama list >/dev/null 2>&1; do sleep 1; done
if [ -n "$SLUICE_PULL" ]; then
  ollama pull "$SLUICE_PULL" && ollama cp "$SLUICE_PULL" "$SLUICE_NAME"
else
  printf 'FROM %s\\n' "$SLUICE_FILE" > /tmp/Modelfile && ollama create "$SLUICE_NAME" -f /tmp/Modelfile
fi && ollama run "$SLUICE_NAME" "" >/dev/null || exit 1
wait "$server"
"""  # noqa: E501 - a shell's line
"""Names come by variables, and the shell parses none of them. An empty prompt loads the model."""


def _invoke(start: Start) -> Invocation:
    source = (
        {"SLUICE_PULL": f"hf.co/{start.model}"} if start.is_hub else {"SLUICE_FILE": start.model}
    )
    length = start.max_model_len
    env = {
        "OLLAMA_HOST": f"{LOOPBACK}:{start.port}",
        "OLLAMA_NUM_PARALLEL": str(start.capacity),
        "OLLAMA_KEEP_ALIVE": "-1",
        **({"OLLAMA_MODELS": start.cache} if start.cache else {}),
        "SLUICE_NAME": start.name or start.model,
        **({} if length is None else {"OLLAMA_CONTEXT_LENGTH": str(length)}),
        **source,
    }
    return Invocation(("sh", "-c", _SERVE), env=env)


ENGINE = ForeignEngine(
    name="ollama",
    kind="Ollama",
    image="ollama/ollama:0.17.4",
    invoke=_invoke,
    capacity=4,
    owned_variables=(
        "OLLAMA_HOST", "OLLAMA_NUM_PARALLEL", "OLLAMA_KEEP_ALIVE", "OLLAMA_MODELS",
        "OLLAMA_CONTEXT_LENGTH",
    ),
    health="/api/version",
    has_metrics=False,
    takes_gguf=True,
    program="ollama",
    verb=("serve",),
    install="https://ollama.com/download",
)  # fmt: skip
