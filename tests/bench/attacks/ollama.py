"""Kind A: what a client of Ollama may ask for. Its server is Go: names of fields in any case."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bench.attacks.table import Came, attack, came, stage, statuses
from strangers.client import Reply, ask, request
from strangers.engine import Answer, Seen, whole
from strangers.stage import until

FLAGS = ("--engine", "ollama", "--served-model-name", "tiny")
MODELS = ("tiny", "tiny:latest")
RUNNER = ("num_ctx", "num_batch", "num_gpu", "main_gpu", "use_mmap", "num_thread")
"""Options by which Ollama loads the model anew (api.Runner of its 0.17)."""
ROUTES = ("/api/generate", "/api/chat", "/v1/chat/completions", "/v1/completions", "/api/embed")
"""Routes at which a model answers; all others change what is served."""
CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "a"}], "stream": False}
UNLOADING: tuple[Mapping[str, object], ...] = (
    *({name: 0} for name in ("keep_alive", "KEEP_ALIVE", "\u212aeep_alive")),  # a Kelvin sign
    *({"keep_alive": value} for value in (0.5, "1ns", "1s", "0h0m", "1e-9s")),
    *({name: {"num_ctx": 64}} for name in ("options", "Options")),
    {"options": {"NUM_CTX": 64}},
)
"""Fields by which the model of all goes or is loaded anew. Go folds names as Unicode does."""
CHANGING: tuple[tuple[str, str, object], ...] = (
    ("DELETE", "/api/delete", {"model": "tiny"}),
    ("POST", "/api/pull", {"model": "other"}),
    ("POST", "/api/create", {"model": "tiny", "from": "other"}),
    ("POST", "/api/copy", {"source": "tiny", "destination": "x"}),
    ("POST", "/api/push", {"model": "tiny"}),
    ("POST", "/api/blobs/sha256:0", {}),
)


def _folded(value: object) -> object:
    """The same as Go reads it: names of fields without their case."""
    if isinstance(value, dict):
        return {name.casefold(): _folded(inner) for name, inner in value.items()}
    return value


def harm(seen: Seen) -> str | None:
    """Why a request that reached Ollama harms others; None if it does not."""
    if seen.method in ("GET", "HEAD"):
        return None
    if seen.path not in (*ROUTES, "/api/show"):
        return f"{seen.method} {seen.path}"
    try:
        fields: Any = _folded(json.loads(seen.body))
    except ValueError:
        return None  # Go refuses it too
    if not isinstance(fields, dict):
        return None
    if fields.get("keep_alive") not in (None, -1):
        return f"keep_alive {fields['keep_alive']!r}"
    if fields.get("model", "tiny") not in MODELS:
        return f"model {fields['model']!r}"
    options = fields.get("options")
    found = [name for name in RUNNER if isinstance(options, dict) and name in options]
    return f"options.{found[0]}" if found else None


async def _sent(directory: Path, sent: list[bytes]) -> Came:
    with stage(directory, *FLAGS) as at:
        replies: list[Reply] = [await ask(at.gate.address, each) for each in sent]
        harms = [found for seen in at.reached() if (found := harm(seen))]
        shown = f", as {', '.join(harms[:2])}" if harms else ""
        text = f"{len(harms)} of {len(sent)} reach Ollama{shown}; {statuses(replies)}"
        return came(at.gate, not harms, text, harmful_at_engine=len(harms))


@attack(
    "A",
    "ollama-unload",
    'KEEP_ALIVE: 0, keep_alive 0.5, "1ns", "1s", Options: {num_ctx}, a Kelvin sign for K ...',
    "none of them reaches Ollama",
)
async def unload(directory: Path) -> Came:
    bodies = [CHAT | dict(more) for more in UNLOADING]
    return await _sent(directory, [request("POST", "/api/chat", body) for body in bodies])


@attack(
    "A",
    "ollama-other-model",
    "another model's name on /api/chat, /api/generate, /v1/chat/completions, /api/embed",
    "refused: a service serves its model",
)
async def other_model(directory: Path) -> Came:
    body = CHAT | {"model": "other", "prompt": "a", "input": "a"}
    return await _sent(directory, [request("POST", path, body) for path in ROUTES])


@attack(
    "A",
    "ollama-change",
    "DELETE /api/delete, /api/pull, /api/create, /api/copy, /api/push, /api/blobs",
    "none of them reaches Ollama",
)
async def change(directory: Path) -> Came:
    return await _sent(directory, [request(*each) for each in CHANGING])


@attack(
    "A",
    "ollama-model-gone",
    "the model is gone: /api/ps is empty, and chats get 404",
    "not ready within 10 s, and the reason names the model",
)
async def model_gone(directory: Path) -> Came:
    error = b'{"error":"model \'tiny\' not found"}'
    gone = [
        Answer(path=path, status=404, pieces=[error])
        for path in ("/api/generate", "/api/chat", "/api/show")
    ]
    gone.append(whole({"models": []}, path="/api/ps"))
    gone.append(whole({"models": []}, path="/api/tags"))
    with stage(directory, *FLAGS) as at:
        at.engine.answers(*gone)
        reply = await ask(at.gate.address, request("POST", "/api/chat", CHAT))
        took_s = until(lambda: at.gate.probe("/readyz")[0] != 200, 10)
        status, reason = at.gate.probe("/readyz")
        when = f"not ready after {took_s:.1f} s: {reason}" if took_s else "ready for ever"
        text = f"a chat gets {reply.status}; {when}"
        return came(at.gate, status == 503 and "tiny" in reason, text)
