"""What a worker is started with: flags spelled as vLLM's; parsing names all problems at once."""

import argparse
import os
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, get_args

from msgspec import Meta, Struct, structs
from sluice_core.contract import SchedulingPolicy
from sluice_core.errors import ConfigError
from sluice_core.hub.reference import FILE, Access, HubModel, access, hub_model
from sluice_core.model.files import cause
from sluice_core.model.sizing import DEFAULT_BATCHED_TOKENS
from sluice_frontend.config import (
    MILLISECONDS,
    OVERLOAD,
    POLICY,
    POSITIVE,
    SERVER_FLAGS,
    SLO_FLAGS,
    Flag,
    Parser,
    ServerConfig,
    api_key_of,
    choice,
    converted,
    file_problems,
    help_of,
    json_value,
    number,
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


class EngineConfig(Struct, frozen=True):
    """All that the engine process needs; sent to it as its first frame (msgpack)."""

    model: str
    dtype: DType = "auto"
    load_format: Literal["auto", "safetensors", "dummy"] = "auto"
    seed: int | None = None
    max_model_len: int | None = None
    max_num_seqs: int | None = None
    initial_num_seqs: int | None = None
    max_num_batched_tokens: int = DEFAULT_BATCHED_TOKENS
    block_size: int | None = None
    memory_utilization: float = 0.9
    gpu_memory_bytes: int | None = None
    num_gpu_blocks_override: int | None = None
    enable_prefix_caching: bool = True
    itl_ms: float | None = None
    ttft_ms: float | None = None
    scheduling_policy: SchedulingPolicy | None = None
    epoch: int = 0
    device: Literal["auto", "cpu", "cuda"] = "auto"
    batching_mode: Literal["continuous", "static"] = "continuous"
    static_batch_size: int | None = None
    static_batch_timeout_ms: float = 100.0
    speculative_config: NgramSpeculation | None = None
    quantization: Quantization | None = None


class HubConfig(NamedTuple):
    """A model that must be fetched before the engine starts."""

    model: HubModel
    access: Access


class WorkerConfig(Struct, frozen=True):
    """Both processes' part of the command line. `hub`: None where --model is a directory."""

    engine: EngineConfig
    server: ServerConfig
    hub: HubConfig | None = None

    @property
    def root(self) -> str:
        """What is served under that name: the hub's ORG/NAME, or the directory's path."""
        return self.hub.model.repo if self.hub else self.engine.model

    @property
    def model_name(self) -> str:
        """The name clients use: --served-model-name, or what --model names."""
        return self.server.served_model_name or self.root

    def at(self, directory: Path) -> "WorkerConfig":
        """The same with the checkpoint in `directory`."""
        engine = structs.replace(self.engine, model=str(directory))
        return structs.replace(self, engine=engine)


def _one_gpu(text: str) -> None:
    if text.strip() != "1":
        raise ValueError(f"must be 1, not {text!r}: a pod has one GPU, and more GPUs are more pods")


_speculation = json_value(
    NgramSpeculation,
    f"object with method ngram and the keys {', '.join(NgramSpeculation.__struct_fields__)}",
)
ENGINE_FLAGS = (
    Flag("model", str, "directory of a checkpoint, or hf://ORG/NAME[@REVISION] (required)"),
    choice("dtype", get_args(DType), "type of weights and KV cache"),
    choice(
        "quantization", get_args(Quantization), "int8 weights and rows in linear layers, on CPUs"
    ),
    choice("load-format", ("auto", "safetensors", "dummy"), "dummy: random weights"),
    Flag("seed", number(int, 0, 2**63 - 1), "seed of random weights and unseeded sampling"),
    Flag("max-model-len", POSITIVE, "window in tokens, prompt plus output; default: the model's"),
    Flag(
        "max-num-seqs",
        POSITIVE,
        "the ceiling of concurrent sequences; live changes stay below; default: what memory holds, "
        "at most 256",
    ),
    Flag("initial-num-seqs", POSITIVE, "the first cap; default: what the start profile predicts"),
    Flag("max-num-batched-tokens", POSITIVE, "token budget of one step"),
    Flag("block-size", POSITIVE, "tokens of one KV block; default: 16 on a GPU, 64 on a CPU"),
    Flag("gpu-memory-utilization", number(float, 0.01, 1), "share of the memory to use"),
    Flag("gpu-memory-bytes", POSITIVE, "the GPU's memory to plan with, where it has more"),
    Flag("num-gpu-blocks-override", POSITIVE, "KV blocks, instead of what the memory gives"),
    POLICY,
    choice("batching-mode", ("continuous", "static"), "static: one padded batch at a time"),
    Flag("static-batch-size", POSITIVE, "sequences of a static batch"),
    Flag("static-batch-timeout-ms", MILLISECONDS, "wait for a full static batch, at most"),
    Flag("speculative-config", _speculation, 'JSON; {"method": "ngram", ...} drafts by lookup'),
    choice("device", ("auto", "cpu", "cuda"), "where the model runs"),
)
# vLLM's, which is to say what is so here anyway.
_PARALLEL = ("tensor", "pipeline", "data")
GIVEN_FLAGS = (
    *(Flag(f"{kind}-parallel-size", _one_gpu, "GPUs of a pod: 1") for kind in _PARALLEL),
    choice("kv-cache-dtype", ("auto",), "as --dtype"),
    choice("tokenizer-mode", ("auto",), "the checkpoint's tokenizer.json"),
    choice("stream-interval", ("1",), "tokens of an event of a stream"),
)
SHORT_NAMES = {f"{kind}-parallel-size": (f"-{kind[0]}p",) for kind in _PARALLEL}
HUB_FLAGS = (
    Flag("revision", str, "branch, tag or commit of a model of the hub"),
    Flag("download-dir", Path, "where models of the hub are kept; default: HF_HUB_CACHE"),
)


def _parser() -> argparse.ArgumentParser:
    structures = (EngineConfig, ServerConfig)
    fields = {f.name: f.default for struct in structures for f in structs.fields(struct)}
    fields["gpu_memory_utilization"] = fields["memory_utilization"]
    parser = Parser(
        prog="sluice-worker",
        description="Serves one model over the OpenAI API, with a live max_num_seqs.",
        allow_abbrev=False,
    )
    for flag in (*ENGINE_FLAGS, *GIVEN_FLAGS, *HUB_FLAGS, *SERVER_FLAGS, *SLO_FLAGS):
        names = [f"--{flag.name}", *SHORT_NAMES.get(flag.name, ())]
        parser.add_argument(*names, help=help_of(flag, fields), metavar=flag.metavar)
    parser.add_argument(
        "--enable-prefix-caching",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="compute once what several prompts begin with; default: on",
    )
    parser.add_argument("--version", action="version", version=version("sluice"))
    # Known, so that it is refused without what follows it.
    parser.add_argument("--api-key", nargs="*", help=argparse.SUPPRESS)
    return parser


def parse(argv: Sequence[str], environ: Mapping[str, str] | None = None) -> WorkerConfig:
    """The configuration that `argv` asks for, files checked.

    `environ` (the process's own if left out) says how the hub is reached: HF_ENDPOINT, HF_TOKEN,
    HF_HUB_OFFLINE, HF_HUB_CACHE, HF_HOME, HF_HUB_DOWNLOAD_TIMEOUT; and the API's key where no file
    holds it: VLLM_API_KEY. Raises ConfigError with all problems, one sentence each.
    """
    environ = os.environ if environ is None else environ
    given, unknown = _parser().parse_known_args(argv)
    problems = [f"{argument} is not a flag of sluice-worker" for argument in strays(unknown)]
    converted(given, GIVEN_FLAGS, problems)
    engine = converted(given, ENGINE_FLAGS, problems)
    server = converted(given, SERVER_FLAGS, problems)
    slo = converted(given, SLO_FLAGS, problems)
    engine["enable_prefix_caching"] = given.enable_prefix_caching
    if "gpu_memory_utilization" in engine:
        engine["memory_utilization"] = engine.pop("gpu_memory_utilization")
    server["flag_slo"] = slo_of(slo)
    persisted = read_persisted(server.get("runtime_config_dir"), problems)
    slo |= {name: persisted.pop(name) for name in list(persisted) if name.startswith("slo_")}
    problems += _contradictions(engine, server, slo)
    server["api_key"] = api_key_of(given, environ, problems)
    if OVERLOAD.name in persisted:
        server["overload"] = persisted.pop(OVERLOAD.name)
    server["slo"] = slo_of(slo)
    engine["itl_ms"], engine["ttft_ms"] = slo.get("slo_itl_ms"), slo.get("slo_ttft_ms")
    if engine.get("batching_mode") == "static":  # a batch is of those that came first
        engine.setdefault("scheduling_policy", "fcfs")
    hub = None
    try:
        hub = _hub(given.model, converted(given, HUB_FLAGS, problems), environ)
    except ValueError as error:
        problems.append(str(error))
    else:
        if hub is None:
            problems += _checkpoint_problems(given.model, engine.get("load_format", "auto"))
    problems += file_problems(server)
    if problems:
        raise ConfigError(problems)
    return WorkerConfig(EngineConfig(**engine | persisted), ServerConfig(**server), hub)


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
    engine: dict[str, Any], server: dict[str, Any], slo: dict[str, Any]
) -> list[str]:
    """Flags that are sound alone, but not together."""
    problems = []
    port = server.get("port", ServerConfig().port)
    if port and port == server.get("admin_port", ServerConfig().admin_port):
        problems.append(f"--port and --admin-port are both {port}; give them different ports")
    ceiling, initial = engine.get("max_num_seqs"), engine.get("initial_num_seqs")
    if ceiling is not None and initial is not None and initial > ceiling:
        problems.append(f"--initial-num-seqs {initial} is over --max-num-seqs {ceiling}")
    budget = engine.get("max_num_batched_tokens", DEFAULT_BATCHED_TOKENS)
    if ceiling is not None and budget < ceiling:
        problems.append(
            f"--max-num-batched-tokens {budget} is under --max-num-seqs {ceiling}; "
            "a step could not decode all sequences"
        )
    if server.get("overload") == "Shed" and "slo_ttft_ms" not in slo:
        problems.append("--overload Shed needs --slo-ttft-ms, the target that it sheds for")
    return problems + _static_problems(engine, server)


def _static_problems(engine: dict[str, Any], server: dict[str, Any]) -> list[str]:
    """Flags of static batching without it, or it without them."""
    size, timeout_ms = engine.get("static_batch_size"), engine.get("static_batch_timeout_ms")
    if engine.get("batching_mode") != "static":
        given = [("size", size), ("timeout-ms", timeout_ms)]
        return [
            f"--static-batch-{name} needs --batching-mode static"
            for name, v in given
            if v is not None
        ]
    problems = [] if size else ["--batching-mode static needs --static-batch-size"]
    liveness_ms = 1000 * server.get("liveness_timeout", ServerConfig().liveness_timeout)
    if (timeout_ms or 0) > liveness_ms / 2:
        problems.append(
            f"--static-batch-timeout-ms {timeout_ms:g} is over half of --liveness-timeout; "
            "a worker that waits for its batch would be taken for dead"
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
    needed = ("config.json", "tokenizer.json")
    problems = [f"--model {model} has no {name}" for name in needed if name not in names]
    if load_format != "dummy" and not any(n.endswith(".safetensors") for n in names):
        problems.append(
            f"--model {model} has no *.safetensors; other formats are not loaded, because "
            "they can run code"
        )
    return problems
