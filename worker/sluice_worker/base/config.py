"""A worker's configuration: flags spelled as vLLM's; parsing names all problems at once."""

import argparse
import os
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

from msgspec import Meta, Struct
from sluice_core.bounded import Share
from sluice_core.contract import SchedulingPolicy
from sluice_core.errors import ConfigError
from sluice_core.hub.reference import FILE, Access, HubModel, access, hub_model
from sluice_core.model.files import cause
from sluice_core.model.images import PROCESSOR
from sluice_core.model.sizing import DEFAULT_BATCHED_TOKENS
from sluice_frontend.config import (
    HOLD_SHARE_SAYS,
    VERSION,
    Milliseconds,
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

DType = Literal["auto", "float32", "bfloat16", "float16"]
Quantization = Literal["w8a8"]


class NgramSpeculation(Struct, frozen=True, forbid_unknown_fields=True):
    """vLLM's --speculative-config for method ngram: the keys that are honoured."""

    method: Literal["ngram"]
    num_speculative_tokens: Annotated[int, Meta(ge=1, le=64)]
    prompt_lookup_max: Annotated[int, Meta(ge=1, le=64)] = 4
    prompt_lookup_min: Annotated[int, Meta(ge=1, le=64)] = 3

    def __post_init__(self) -> None:
        if self.prompt_lookup_min > self.prompt_lookup_max:
            raise ValueError(
                f"prompt_lookup_min {self.prompt_lookup_min} is over prompt_lookup_max "
                f"{self.prompt_lookup_max}"
            )


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """All that the engine process needs; sent to it as its first frame (msgpack)."""

    model: str = flag("directory of a checkpoint, or hf://ORG/NAME[@REVISION] (required)", MISSING)
    dtype: DType = flag("type of weights and KV cache", "auto")
    quantization: Quantization | None = flag("int8 weights and rows in linear layers, on CPUs")
    load_format: Literal["auto", "safetensors", "dummy"] = flag("dummy: random weights", "auto")
    seed: Annotated[int, Meta(ge=0, le=2**63 - 1)] | None = flag(
        "seed of random weights and unseeded sampling"
    )
    max_model_len: Positive | None = flag("tokens of prompt plus output; default: the model's")
    max_num_seqs: Positive | None = flag(
        "the ceiling of concurrent sequences; live changes stay below; default: what memory holds, "
        "at most 256"
    )
    initial_num_seqs: Positive | None = flag(
        "the first cap; default: what the start profile predicts"
    )
    max_num_batched_tokens: Positive = flag("token budget of one step", DEFAULT_BATCHED_TOKENS)
    block_size: Positive | None = flag("tokens of one KV block; default: 16 on a GPU, 64 on a CPU")
    memory_utilization: Annotated[float, Meta(ge=0.01, le=1)] = flag(
        "share of the memory to use", 0.9, name="gpu_memory_utilization"
    )
    gpu_memory_bytes: Positive | None = flag("the GPU's memory to plan with, where it has more")
    num_gpu_blocks_override: Positive | None = flag("KV blocks, instead of what the memory gives")
    scheduling_policy: SchedulingPolicy | None = flag(
        "who is served first; deadline: who can still have a first token in time; default: "
        "deadline with --slo-ttft-ms, else fcfs"
    )
    hold_share: Share = flag(HOLD_SHARE_SAYS, 1.0)
    batching_mode: Literal["continuous", "static"] = flag(
        "static: one padded batch at a time", "continuous"
    )
    static_batch_size: Positive | None = flag("sequences of a static batch")
    static_batch_timeout_ms: Milliseconds = flag("wait for a full static batch, at most", 100.0)
    speculative_config: NgramSpeculation | None = flag(
        'JSON; {"method": "ngram", ...} drafts by lookup',
        noun="object with method ngram and the keys "
        + ", ".join(NgramSpeculation.__struct_fields__),
    )
    device: Literal["auto", "cpu", "cuda"] = flag("where the model runs", "auto")
    enable_prefix_caching: bool = True
    epoch: int = 0
    itl_ms: float | None = None
    e2e_ms: float | None = None
    ttft_ms: float | None = None


@dataclass(frozen=True, slots=True)
class TextConfig:
    """How texts become prompts, and what sampling does by default."""

    chat_template: Path | None = flag("file of a Jinja template, instead of the checkpoint's own")
    generation_config: Literal["auto", "vllm"] = flag(
        "sampling defaults; auto: the checkpoint's", "auto"
    )
    parse_special: bool = flag(
        "read control tokens in the text of a prompt, unless its request says otherwise", True
    )


class HubConfig(NamedTuple):
    """A model that must be fetched before the engine starts."""

    model: HubModel
    access: Access


@dataclass(frozen=True, slots=True)
class WorkerConfig:
    """Both processes' part of the command line. `hub`: None where --model is a directory."""

    engine: EngineConfig
    server: ServerConfig
    text: TextConfig = TextConfig()
    hub: HubConfig | None = None

    @property
    def root(self) -> str:
        """The model behind that name: the hub's ORG/NAME, or the directory's path."""
        return self.hub.model.repo if self.hub else self.engine.model

    @property
    def model_name(self) -> str:
        """The name clients use: --served-model-name, or what --model names."""
        return self.server.served_model_name or self.root

    def at(self, directory: Path) -> "WorkerConfig":
        """The same with the checkpoint in `directory`."""
        return replace(self, engine=replace(self.engine, model=str(directory)))


def _parallel(alias: str) -> Any:
    reason = ": a pod has one GPU, and more GPUs are more pods"
    return flag("GPUs of a pod: 1", alias=alias, reason=reason)


@dataclass(frozen=True, slots=True)
class _GivenFlags:
    """vLLM's flags whose one value is what this worker does anyway."""

    tensor_parallel_size: Literal["1"] | None = _parallel("-tp")
    pipeline_parallel_size: Literal["1"] | None = _parallel("-pp")
    data_parallel_size: Literal["1"] | None = _parallel("-dp")
    kv_cache_dtype: Literal["auto"] | None = flag("as --dtype")
    tokenizer_mode: Literal["auto"] | None = flag("the checkpoint's tokenizer.json")
    stream_interval: Literal["1"] | None = flag("tokens of an event of a stream")


@dataclass(frozen=True, slots=True)
class _HubFlags:
    """Which version of a model of the hub is served, and from where."""

    revision: str | None = flag("branch, tag or commit of a model of the hub")
    download_dir: Path | None = flag("where models of the hub are kept; default: HF_HUB_CACHE")


PARTS = (EngineConfig, _GivenFlags, _HubFlags, ServerConfig, TextConfig, SloFlags)
"""All that has flags, in the order of the help."""


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="sluice-worker",
        description="Serves one model over the OpenAI API, with a live max_num_seqs.",
        allow_abbrev=False,
    )
    for config in PARTS:
        for one in flags_of(config):
            one.add_to(parser)
    parser.add_argument(
        "--enable-prefix-caching",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="compute once what several prompts begin with; default: on",
    )
    parser.add_argument("--version", action="version", version=VERSION)
    # Known, so that it is refused without what follows it.
    parser.add_argument("--api-key", nargs="*", help=argparse.SUPPRESS)
    return parser


def parse(argv: Sequence[str], environ: Mapping[str, str] | None = None) -> WorkerConfig:
    """The configuration that `argv` asks for, files checked.

    `environ` (default: the process's own) says how the hub is reached: HF_ENDPOINT, HF_TOKEN,
    HF_HUB_OFFLINE, HF_HUB_CACHE, HF_HOME, HF_HUB_DOWNLOAD_TIMEOUT. VLLM_API_KEY is the API's key
    where no file holds it. Raises ConfigError with all problems, one sentence each.
    """
    environ = os.environ if environ is None else environ
    given, unknown = _parser().parse_known_args(argv)
    problems = [f"{argument} is not a flag of sluice-worker" for argument in strays(unknown)]
    engine, _, hub, server, text, slo = (converted(given, part, problems) for part in PARTS)
    server |= {"flag_slo": slo_of(slo), "api_key": api_key_of(given, environ, problems)}
    files = read_persisted(server.get("runtime_config_dir"), problems)
    slo |= {name: files.pop(name) for name in list(files) if name.startswith("slo_")}
    server["slo"] = slo_of(slo)
    engine |= {"itl_ms": slo.get("slo_itl_ms"), "ttft_ms": slo.get("slo_ttft_ms")}
    engine |= {"e2e_ms": slo.get("slo_e2e_ms")}
    engine["enable_prefix_caching"] = given.enable_prefix_caching
    if engine.get("batching_mode") == "static":  # a batch is of those that came first
        engine.setdefault("scheduling_policy", "fcfs")
    engine.setdefault("model", "")
    problems += _contradictions(EngineConfig(**engine), ServerConfig(**server), given)
    server["overload"] = files.pop("overload", server.get("overload", ServerConfig().overload))
    download = None
    try:
        download = _hub(given.model, hub, environ)
    except ValueError as error:
        problems.append(str(error))
    else:
        if download is None:
            problems += _checkpoint_problems(given.model, engine.get("load_format", "auto"))
    problems += file_problems(server)
    if problems:
        raise ConfigError(problems)
    config = EngineConfig(**engine | files)
    return WorkerConfig(config, ServerConfig(**server), TextConfig(**text), download)


def _hub(model: str | None, values: dict[str, Any], environ: Mapping[str, str]) -> HubConfig | None:
    """Which model of which hub, if it is one; ValueError with a sentence if it contradicts."""
    wanted = hub_model(model, values.get("revision")) if model is not None else None
    directory: Path | None = values.get("download_dir")
    if wanted is not None:
        return HubConfig(wanted, access(environ, directory))
    if directory is not None:
        raise ValueError(f"--download-dir {directory} belongs to models of the hub, not to {model}")
    return None


def _contradictions(
    engine: EngineConfig, server: ServerConfig, given: argparse.Namespace
) -> list[str]:
    """Flags that are sound alone, but not together."""
    ceiling = engine.max_num_seqs
    problems = contradictions(
        server, ceiling, engine.initial_num_seqs, engine.ttft_ms, engine.hold_share
    )
    if ceiling is not None and engine.max_num_batched_tokens < ceiling:
        problems.append(
            f"--max-num-batched-tokens {engine.max_num_batched_tokens} is under --max-num-seqs "
            f"{ceiling}; a step could not decode all sequences"
        )
    return problems + _static_problems(engine, server, given)


def _static_problems(
    engine: EngineConfig, server: ServerConfig, given: argparse.Namespace
) -> list[str]:
    """Flags of static batching without it, or it without them."""
    if engine.batching_mode != "static":
        return [
            f"--static-batch-{name} needs --batching-mode static"
            for name in ("size", "timeout-ms")
            if getattr(given, f"static_batch_{name.replace('-', '_')}") is not None
        ]
    problems = []
    if engine.static_batch_size is None:
        problems.append("--batching-mode static needs --static-batch-size")
    if engine.static_batch_timeout_ms > 1000 * server.liveness_timeout / 2:
        problems.append(
            f"--static-batch-timeout-ms {engine.static_batch_timeout_ms:g} is over half of "
            "--liveness-timeout; a worker that waits for its batch would be taken for dead"
        )
    return problems


def _checkpoint_problems(model: str | None, load_format: str) -> list[str]:
    """Why `model` cannot be a checkpoint directory, as far as a look at its names tells."""
    path = (model or "").removeprefix(FILE)
    if not path:
        return ["--model is required: a checkpoint's directory, or hf://ORG/NAME"]
    try:
        names = os.listdir(path)
    except (FileNotFoundError, NotADirectoryError):
        return [f"--model {model} is not a directory, nor hf://ORG/NAME"]
    except OSError as error:
        return [f"--model {model} cannot be read: {cause(error)}"]
    reads_images = PROCESSOR in names  # and perhaps no texts: the engine says
    needed = ("config.json",) if reads_images else ("config.json", "tokenizer.json")
    problems = [f"--model {model} has no {name}" for name in needed if name not in names]
    if load_format != "dummy" and not any(n.endswith(".safetensors") for n in names):
        problems.append(
            f"--model {model} has no *.safetensors; other formats are not loaded, because "
            "they can run code"
        )
    return problems
