"""What passes to an Ollama that serves one model to all. Pure.

Ollama is one server for its owner: a client may pull, replace, delete, load and unload models, also
by a field of an ordinary request. Go reads a field's name in any case. So routes and fields are
listed here, and all others are refused.
"""

from collections.abc import Iterable, Mapping
from itertools import chain

from msgspec import Raw
from sluice_core.errors import ModelNotFound, NotOffered, UnsupportedParameter

from .json_object import scalar

_ANY = frozenset(("model", "options", "keep_alive", "slo_ttft_ms", "slo_tpot_ms", "priority"))
_ANSWER = frozenset(("stream", "format", "think", "truncate", "shift", "logprobs", "top_logprobs"))
_FIELDS: Mapping[str, frozenset[str]] = {
    "/api/generate": _ANY
    | _ANSWER
    | {"prompt", "suffix", "system", "template", "context", "raw", "images"},
    "/api/chat": _ANY | _ANSWER | {"messages", "tools"},
    "/api/embed": _ANY | {"input", "truncate", "dimensions"},
    "/api/embeddings": _ANY | {"prompt"},
    "/api/show": frozenset(("model", "name", "verbose")),
}
_OPENAI = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/embeddings",
    "/v1/responses",
    "/v1/messages",
)
"""Routes whose fields load no model anew. Ollama ignores what it does not know there."""
_READ = ("/", "/api/tags", "/api/ps", "/api/version", "/v1/models")
_SAMPLING = frozenset(
    (
        *("num_keep", "seed", "num_predict", "top_k", "top_p", "min_p", "tfs_z", "typical_p"),
        *("repeat_last_n", "temperature", "repeat_penalty", "presence_penalty"),
        *("frequency_penalty", "mirostat", "mirostat_tau", "mirostat_eta", "penalize_newline"),
        "stop",
    )
)
"""Options of one request. Others, as num_ctx and num_gpu, load the model anew (`api.Runner`)."""
KEPT = Raw(b"-1")
"""`keep_alive` of all requests: for ever. A client's own would unload the model of all."""


def check_route(method: str, path: str) -> None:
    """Raise NotOffered for what a service of one model has not."""
    if method in ("GET", "HEAD", "OPTIONS"):
        is_offered = path in _READ or path.startswith("/v1/models/")
    else:
        is_offered = method == "POST" and (path in _FIELDS or path in _OPENAI)
    if not is_offered:
        raise NotOffered(f"{method} {path[:128]} is not offered: this service has one model")


def checked(
    path: str,
    fields: Mapping[str, Raw],
    options: Iterable[Mapping[str, Raw]],
    model: str | None,
) -> Mapping[str, Raw]:
    """`fields` as Ollama gets them; `options`: those of the request; `model`: the one served.

    Raises UnsupportedParameter and ModelNotFound.
    """
    allowed = _FIELDS.get(path)
    for name in fields:
        if allowed is not None and name not in allowed:
            raise UnsupportedParameter(f"the field {name[:64]!a} is not offered", param=name[:64])
    for name, value in chain.from_iterable(each.items() for each in options):
        if name not in _SAMPLING and bytes(value) != b"null":
            raise UnsupportedParameter(
                f"options.{name[:64]} is not offered: it would load the model anew for everyone",
                param=f"options.{name[:64]}",
            )
    for name in ("model", "name"):
        if name in fields:
            _check_model(scalar(fields[name]), model)
    return {**fields, "keep_alive": KEPT} if "keep_alive" in fields else fields


def _check_model(asked: object, served: str | None) -> None:
    """Ollama reads a name without a tag as that of `latest`."""
    names = () if served is None else (served, f"{served}:latest", served.removesuffix(":latest"))
    if names and asked not in names:
        raise ModelNotFound(
            f"the model {str(asked)[:64]!a} does not exist; this server has {served!r}",
            param="model",
        )
