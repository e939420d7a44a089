"""The gate's flags; parsing names all problems at once."""

import argparse
import os
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass
from importlib.metadata import version
from pathlib import Path
from urllib.parse import urlsplit

from sluice_core.contract import SchedulingPolicy
from sluice_core.errors import ConfigError
from sluice_frontend.config import (
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

from .engines import ENGINES, EngineFacts, EngineName

PROGRAM = "sluice-gate"
DEFAULT_CAPACITY = 256
READER_BYTES = 64 << 20
"""Of a Python process with this package."""


@dataclass(frozen=True, slots=True)
class EngineFlags:
    """The engine behind the gate. `epoch`: of the first cap."""

    upstream: str = flag("the engine's URL, as http://127.0.0.1:8100 (required)", MISSING)
    engine: EngineName = flag("which engine; custom: any OpenAI server", "custom")
    max_num_seqs: Positive | None = flag(
        "the most sequences that the engine runs at once; live caps stay below; default: as the "
        f"engine tells, else {DEFAULT_CAPACITY}"
    )
    initial_num_seqs: Positive | None = flag("the first cap; default: all that the engine runs")
    max_num_batched_tokens: Positive = flag("the engine's own token budget of one step", 2048)
    scheduling_policy: SchedulingPolicy | None = flag(
        "who is served first; default: deadline with --slo-ttft-ms, else fcfs"
    )
    health_path: str | None = flag("a path that answers 200 while the engine serves")
    engine_admin_key_file: Path | None = flag("file of SGLang's admin key, for its live cap")
    engine_socket: Path | None = flag("Unix socket on which sluice_vllm inside vLLM finds the gate")
    served_file: Path | None = flag(
        "file that is there once the engine has served, for a gate that starts again beside it"
    )
    epoch: int = 0

    def capacity(self, told: int | None) -> int:
        """The most sequences that the engine runs; `told`: by itself."""
        return self.max_num_seqs or told or DEFAULT_CAPACITY

    @property
    def facts(self) -> EngineFacts:
        return ENGINES[self.engine]

    @property
    def health(self) -> str:
        """The path of the engine's health."""
        return self.health_path or self.facts.health


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
    parser.add_argument("--version", action="version", version=version("sluice"))
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
    most, initial = engine.get("max_num_seqs"), engine.get("initial_num_seqs")
    problems += contradictions(GateServerConfig(**server), most, initial, slo.get("slo_ttft_ms"))
    problems += file_problems(server | engine)
    if "overload" in files:
        server["overload"] = files.pop("overload")
    engine |= files
    if problems:
        raise ConfigError(problems)
    return GateConfig(EngineFlags(**engine), GateServerConfig(**server))
