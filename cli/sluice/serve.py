"""`sluice serve MODEL`: one model on this machine, without Kubernetes, told in plain words."""

import argparse
import json
import logging
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sluice_core.engines import ENGINES
from sluice_core.words import clean, in_url
from sluice_frontend.config import API_KEY
from sluice_frontend.http.logs import EventFormatter, fields_of
from sluice_worker import __main__ as worker
from sluice_worker.base.config import WorkerConfig

from sluice import foreign

GPU_FILES = (Path("/dev/nvidiactl"), Path("/dev/dxg"))
"""Device files of a GPU driver: CUDA's own, and WSL's."""
CPU_UTILIZATION = "0.5"
"""Share of the machine's memory without a GPU: a person works on the machine too."""
GIB = 2**30
_IMAGE = (
    "data:image/png;base64,"
    "iVBORw0KGgoAAAANSUhEUgAAAAIAAAACCAIAAAD91JpzAAAAFElEQVR42mP4z8DAAMIM////ZwAAHu8E/HMcU8wAAAAASUVORK5CYII="
)
"""Four pixels."""
_EXAMPLES: Mapping[str, tuple[str, dict[str, object]]] = {
    "generate": ("/v1/completions", {"prompt": "Once upon a time", "max_tokens": 32}),
    "embed": ("/v1/embeddings", {"input": "Once upon a time"}),
    "classify": ("/classify", {"input": "Once upon a time"}),
    "embed images": ("/v1/embeddings", {"input": _IMAGE}),
    "classify images": ("/classify", {"input": _IMAGE}),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--engine",
        choices=[name for name, engine in ENGINES.items() if engine.program],
        help="another engine, behind a gate",
    )
    parser.add_argument("model", metavar="MODEL", help="a directory, ORG/NAME or hf://ORG/NAME@REV")
    parser.add_argument(
        "flags",
        metavar="FLAGS",
        nargs=argparse.REMAINDER,
        help="sluice-worker's, after MODEL, spelled as vLLM's; --max-num-seqs 1 for one user. With "
        "--engine: sluice-gate's, and after -- the engine's own",
    )


def main(args: argparse.Namespace) -> int:
    """Entry of `sluice serve`: 0 after Ctrl-C or SIGTERM, 1 if the engine died, 2 if it cannot."""
    if args.engine:
        return foreign.main(args.engine, args.model, args.flags)
    return worker.run("sluice serve", arguments(args.model, args.flags), Narration)


def arguments(model: str, flags: list[str]) -> list[str]:
    """The worker's command line; the user's flags come last and win."""
    has_gpu = any(path.exists() for path in GPU_FILES)
    gentle = [] if has_gpu else [f"--gpu-memory-utilization={CPU_UTILIZATION}"]
    return [f"--model={model}", *gentle, *flags]


class Narration(logging.Formatter):
    """The worker's events as sentences; an event without a sentence shows its name and fields."""

    def __init__(self, config: WorkerConfig) -> None:
        super().__init__()
        self._config = config
        self._url = ""

    def format(self, record: logging.LogRecord) -> str:
        """`record` as one or more lines."""
        tell = getattr(self, f"_{record.getMessage()}", None)
        return tell(record.__dict__) if tell else _plain(record)

    def _listening(self, event: dict[str, Any]) -> str:
        host = self._config.server.host
        shown = "localhost" if host in ("", "0.0.0.0", "::", "127.0.0.1") else in_url(host)  # noqa: S104
        self._url = f"http://{shown}:{event['port']}"
        admin = f"http://127.0.0.1:{event['admin_port']}"
        return (
            f"Loading {event['model']}; it will be served on port {event['port']} of "
            f"{host or 'all addresses'}.\n"
            f"Progress: {self._url}/readyz   metrics: {admin}/metrics"
        )

    def _downloading(self, event: dict[str, Any]) -> str:
        total = event["total_bytes"] / GIB
        return (
            f"Downloading {event['model']}: {event['percent']} % of {total:.2f} GiB, "
            f"{event['mib_per_s']:.0f} MiB/s"
        )

    def _ready(self, event: dict[str, Any]) -> str:
        parts = {name: size / GIB for name, size in event["memory"].items()}
        share, total = self._config.engine.memory_utilization, parts["total_bytes"]
        return (
            f"Memory: {parts['weights_bytes']:.2f} GiB of weights, "
            f"{parts['activation_bytes']:.2f} of activations, {parts['reserve_bytes']:.2f} taken "
            f"before, {parts['kv_cache_bytes']:.2f} for the KV cache of {event['kv_tokens']:,} "
            f"tokens; of {share * total:.2f} GiB, {share:g} of the {total:.2f} that there are.\n"
            f"Ready: at most {event['cap']} requests at once, each of at most "
            f"{event['max_model_len']:,} tokens. Try it:\n  {self._curl(event['task'])}"
        )

    def _curl(self, task: str) -> str:
        path, asked = _EXAMPLES[task]
        body = {"model": self._config.model_name, **asked}
        server = self._config.server
        file = shlex.quote(str(server.api_key_file))
        key = f"${API_KEY}" if server.api_key else f"$(head -n1 {file})"
        bearer = f' -H "Authorization: Bearer {key}"' if server.has_api_keys else ""
        return (
            f"curl {self._url}{path} -H 'Content-Type: application/json'{bearer} "
            f"-d {shlex.quote(json.dumps(body))}"
        )

    def _draining(self, event: dict[str, Any]) -> str:
        return f"Leaving; {event['open_requests']} open requests get {event['limit_s']:g} s."


def _plain(record: logging.LogRecord) -> str:
    """An event without a sentence of its own."""
    if record.exc_info:
        return EventFormatter().format(record)
    fields = ", ".join(f"{key}={clean(str(value))}" for key, value in fields_of(record).items())
    return f"{record.levelname.capitalize()}: {record.getMessage()}" + (fields and f" ({fields})")
