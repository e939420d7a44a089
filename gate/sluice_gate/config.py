"""The gate's flags; parsing names all problems at once."""

import argparse
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit

from sluice_core.errors import ConfigError
from sluice_frontend.config import (
    VERSION,
    Parser,
    Positive,
    ServerConfig,
    SloFlags,
    api_key_of,
    contradictions,
    converted,
    file_problems,
    flag,
    flags_of,
    read_persisted,
    slo_of,
    strays,
)

from .engine.flags import EngineFlags

PROGRAM = "sluice-gate"
READER_BYTES = 64 << 20
"""Of a Python process with this package."""


@dataclass(frozen=True, slots=True)
class GateServerConfig(ServerConfig):
    """A gate's own settings: its engine takes pictures and sounds, and no plan knows its memory."""

    max_body_bytes: Positive = flag("request bodies over it get 413", 64 << 20)
    memory_bytes: Positive = flag(
        "memory for bodies and answers together, as a part of the container's", 256 << 20
    )

    @property
    def reading_bytes(self) -> int:
        """Memory of the process that reads large bodies: one at a time, with its parts."""
        return READER_BYTES + 3 * self.max_body_bytes


@dataclass(frozen=True, slots=True)
class GateConfig:
    """All of the command line."""

    engine: EngineFlags
    server: GateServerConfig

    @property
    def model_name(self) -> str:
        """The name in metrics; requests name what the engine serves."""
        return self.server.served_model_name or self.engine.upstream


PARTS = (EngineFlags, GateServerConfig, SloFlags)


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog=PROGRAM,
        description="Stands before an engine: a live max_num_seqs, a queue, deadlines, evidence.",
        allow_abbrev=False,
    )
    for config in PARTS:
        for one in flags_of(config):
            if one.field.name != "sse_keep_alive_interval":  # answers are the engine's own bytes
                one.add_to(parser)
    # Without origins of ours the engine's own answers to browsers pass.
    parser.set_defaults(sse_keep_alive_interval=None, allowed_origins="[]")
    parser.add_argument("--version", action="version", version=VERSION)
    parser.add_argument("--api-key", nargs="*", help=argparse.SUPPRESS)
    return parser


def parse(argv: Sequence[str], environ: Mapping[str, str] | None = None) -> GateConfig:
    """The configuration that `argv` asks for. Raises ConfigError with all problems."""
    environ = os.environ if environ is None else environ
    given, unknown = _parser().parse_known_args(argv)
    problems = [f"{argument} is not a flag of {PROGRAM}" for argument in strays(unknown)]
    engine, server, slo = (converted(given, part, problems) for part in PARTS)
    server |= {"flag_slo": slo_of(slo), "api_key": api_key_of(given, environ, problems)}
    files = read_persisted(server.get("runtime_config_dir"), problems)
    slo |= {name: files.pop(name) for name in list(files) if name.startswith("slo_")}
    server["slo"] = slo_of(slo)
    url = urlsplit(engine.setdefault("upstream", ""))
    if url.scheme not in ("http", "https") or not url.netloc:
        problems.append("--upstream is required: the engine's URL, as http://127.0.0.1:8100")
    told = EngineFlags(**engine)
    problems += contradictions(
        GateServerConfig(**server),
        told.max_num_seqs,
        told.initial_num_seqs,
        slo.get("slo_ttft_ms"),
        told.hold_share,
    )
    problems += file_problems(server | engine)
    if "overload" in files:
        server["overload"] = files.pop("overload")
    engine |= files
    if problems:
        raise ConfigError(problems)
    return GateConfig(EngineFlags(**engine), GateServerConfig(**server))
