"""What a worker is started with: flags spelled as vLLM's; parsing names all problems at once."""

import argparse
import json
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, NoReturn, get_args

import msgspec
from msgspec import Meta, Struct, structs
from sluice_core.contract import MAX_MS, Overload, SchedulingPolicy, Slo
from sluice_core.errors import CheckpointError, ConfigError
from sluice_core.hub.reference import FILE, Access, HubModel, access, hub_model
from sluice_core.model.files import cause, refuse_pointer
from sluice_core.model.sizing import DEFAULT_BATCHED_TOKENS

DType = Literal["auto", "float32", "bfloat16", "float16"]
Quantization = Literal["w8a8"]
API_KEY = "VLLM_API_KEY"
"""vLLM's environment variable for the key of the API."""
MAX_TEXT_BYTES = 1 << 20
"""Of a file that a flag names: keys, a chat template."""


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


@dataclass(frozen=True, slots=True)
class Secret:
    """A text that is never shown."""

    text: str = field(repr=False)


class ServerConfig(Struct, frozen=True):
    """All that the API process needs. Timeouts and ages in seconds.

    `slo`: in force at the start; `flag_slo`: of flags alone, which are the same for all pods.
    """

    host: str = ""
    port: int = 8000
    admin_port: int = 8001
    served_model_name: str | None = None
    api_key_file: Path | None = None
    api_key: Secret | None = None
    admin_token_file: Path | None = None
    runtime_config_dir: Path | None = None
    slo: Slo = Slo()
    flag_slo: Slo = Slo()
    overload: Overload = "Queue"
    max_num_queued_reqs: int = 1024
    max_num_queued_tokens: int = 0
    max_body_bytes: int = 4 << 20
    liveness_timeout: float = 30.0
    shutdown_delay: float = 0.0
    shutdown_timeout: float = 30.0
    receive_timeout: float = 30.0
    write_timeout: float = 30.0
    connection_max_age: float = 30.0
    chat_template: Path | None = None
    generation_config: Literal["auto", "vllm"] = "auto"
    parse_special: bool = True
    sse_keep_alive_interval: float = 0.0
    allowed_origins: tuple[str, ...] = ("*",)

    @property
    def has_api_keys(self) -> bool:
        """Whether the API asks for a bearer."""
        return self.api_key_file is not None or self.api_key is not None


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


class Flag(NamedTuple):
    """One flag that takes a value: its name, how the text becomes a value, and its help."""

    name: str
    convert: Callable[[str], object]
    help: str
    metavar: str = "X"


def _number(kind: type[int] | type[float], low: float, high: float) -> Callable[[str], object]:
    """A converter to `kind` within [low, high]."""
    noun = "a whole number" if kind is int else "a number"
    most = high if isinstance(high, int) else f"{high:g}"
    limits = f"from {low:g} on" if math.isinf(high) else f"from {low:g} to {most}"

    def convert(text: str) -> int | float:
        try:
            value = kind(text)
        except ValueError as error:
            raise ValueError(f"must be {noun} {limits}, not {text!r}") from error
        if not low <= value <= high or (math.isinf(value)):
            raise ValueError(f"must be {noun} {limits}, not {text}")
        return value

    return convert


def _choice(name: str, choices: Sequence[str], text: str) -> Flag:
    """A flag that takes one of `choices`."""

    def convert(text: str) -> str:
        if text not in choices:
            raise ValueError(f"must be one of {', '.join(choices)}, not {text!r}")
        return text

    return Flag(name, convert, text, f"{{{','.join(choices)}}}")


def _json(kind: Any, said: str) -> Callable[[str], object]:
    """Reads a flag's JSON, as vLLM has it."""

    def convert(text: str) -> object:
        try:
            return msgspec.json.decode(text, type=kind)
        except msgspec.MsgspecError as error:
            raise ValueError(f"must be a JSON {said}: {error}") from error

    return convert


def _one_gpu(text: str) -> None:
    if text.strip() != "1":
        raise ValueError(f"must be 1, not {text!r}: a pod has one GPU, and more GPUs are more pods")


def _truth(text: str) -> bool:
    if text not in ("true", "false"):
        raise ValueError(f"must be true or false, not {text!r}")
    return text == "true"


_speculation = _json(
    NgramSpeculation,
    f"object with method ngram and the keys {', '.join(NgramSpeculation.__struct_fields__)}",
)
_origins = _json(tuple[str, ...], "list of origins")
_count = _number(int, 0, math.inf)
_positive = _number(int, 1, math.inf)
_port = _number(int, 0, 65535)
_milliseconds = _number(float, 0.001, MAX_MS)
_seconds = _number(float, 0.01, math.inf)
_interval = _number(float, 0, math.inf)

POLICY = _choice(
    "scheduling-policy",
    get_args(SchedulingPolicy),
    "who is served first; deadline: who can still have a first token in time; default: deadline "
    "with --slo-ttft-ms, else fcfs",
)
ENGINE_FLAGS = (
    Flag("model", str, "directory of a checkpoint, or hf://ORG/NAME[@REVISION] (required)"),
    _choice("dtype", get_args(DType), "type of weights and KV cache"),
    _choice(
        "quantization", get_args(Quantization), "int8 weights and rows in linear layers, on CPUs"
    ),
    _choice("load-format", ("auto", "safetensors", "dummy"), "dummy: random weights"),
    Flag("seed", _number(int, 0, 2**63 - 1), "seed of random weights and unseeded sampling"),
    Flag("max-model-len", _positive, "window in tokens, prompt plus output; default: the model's"),
    Flag(
        "max-num-seqs",
        _positive,
        "the ceiling of concurrent sequences; live changes stay below; default: what memory holds, "
        "at most 256",
    ),
    Flag("initial-num-seqs", _positive, "the first cap; default: what the start profile predicts"),
    Flag("max-num-batched-tokens", _positive, "token budget of one step"),
    Flag("block-size", _positive, "tokens of one KV block; default: 16 on a GPU, 64 on a CPU"),
    Flag("gpu-memory-utilization", _number(float, 0.01, 1), "share of the memory to use"),
    Flag("gpu-memory-bytes", _positive, "the GPU's memory to plan with, where it has more"),
    Flag("num-gpu-blocks-override", _positive, "KV blocks, instead of what the memory gives"),
    POLICY,
    _choice("batching-mode", ("continuous", "static"), "static: one padded batch at a time"),
    Flag("static-batch-size", _positive, "sequences of a static batch"),
    Flag("static-batch-timeout-ms", _milliseconds, "wait for a full static batch, at most"),
    Flag("speculative-config", _speculation, 'JSON; {"method": "ngram", ...} drafts by lookup'),
    _choice("device", ("auto", "cpu", "cuda"), "where the model runs"),
)
# vLLM's, which is to say what is so here anyway.
_PARALLEL = ("tensor", "pipeline", "data")
GIVEN_FLAGS = (
    *(Flag(f"{kind}-parallel-size", _one_gpu, "GPUs of a pod: 1") for kind in _PARALLEL),
    _choice("kv-cache-dtype", ("auto",), "as --dtype"),
    _choice("tokenizer-mode", ("auto",), "the checkpoint's tokenizer.json"),
    _choice("stream-interval", ("1",), "tokens of an event of a stream"),
)
SHORT_NAMES = {f"{kind}-parallel-size": (f"-{kind[0]}p",) for kind in _PARALLEL}
OVERLOAD = _choice("overload", get_args(Overload), "Shed drops what cannot meet --slo-ttft-ms")
SERVER_FLAGS = (
    Flag("host", str, "address of the API port; all of IPv4 and IPv6 if empty"),
    Flag("port", _port, "API port; 0 picks a free one"),
    Flag("admin-port", _port, "admin port: metrics, evidence, live configuration; 0: a free one"),
    Flag("served-model-name", str, "the model's name in requests and metrics"),
    Flag(
        "api-key-file",
        Path,
        f"file of bearer keys, one a line; else {API_KEY}; without both it is open",
    ),
    Flag("admin-token-file", Path, "file of the admin bearer; without it admin is on 127.0.0.1"),
    Flag("runtime-config-dir", Path, "directory with cap, epoch, targets and order, read at start"),
    OVERLOAD,
    Flag("max-num-queued-reqs", _count, "waiting requests over which new ones get 429"),
    Flag(
        "max-num-queued-tokens",
        _count,
        "prompt tokens without an answer yet, likewise; 0: as many as a 32nd of the memory holds",
    ),
    Flag("max-body-bytes", _positive, "request bodies over it get 413"),
    Flag("liveness-timeout", _seconds, "seconds without a step, with work, until not live"),
    Flag(
        "shutdown-delay",
        _interval,
        "seconds after SIGTERM in which a load balancer may still send clients here; over 0, "
        "connections that they keep idle are waited for as well, 20 seconds at most",
    ),
    Flag("shutdown-timeout", _seconds, "seconds that running requests get after that"),
    Flag("receive-timeout", _seconds, "seconds for a request's body, and its headers (10 at most)"),
    Flag(
        "write-timeout",
        _seconds,
        "seconds in which a slow reader must read an eighth of what is left, or 512 KiB, or is cut",
    ),
    Flag(
        "connection-max-age",
        _seconds,
        "seconds after which an answer closes its connection; a tenth while requests wait",
    ),
    Flag("chat-template", Path, "file of a Jinja template, instead of the checkpoint's own"),
    _choice("generation-config", ("auto", "vllm"), "sampling defaults; auto: the checkpoint's"),
    Flag(
        "parse-special",
        _truth,
        "read control tokens in the text of a prompt, unless its request says otherwise",
        "{true,false}",
    ),
    Flag("sse-keep-alive-interval", _interval, "seconds of silence until a comment; 0: never"),
    Flag("allowed-origins", _origins, 'JSON list of pages that may ask from a browser; ["*"]: all'),
)
HUB_FLAGS = (
    Flag("revision", str, "branch, tag or commit of a model of the hub"),
    Flag("download-dir", Path, "where models of the hub are kept; default: HF_HUB_CACHE"),
)
SLO_FLAGS = (
    Flag("slo-ttft-ms", _milliseconds, "target of the time to the first token"),
    Flag("slo-itl-ms", _milliseconds, "target of the gap between two tokens"),
    Flag("slo-e2e-ms", _milliseconds, "target of the whole request"),
)

RUNTIME_FILES = (
    Flag("max_num_seqs", _positive, "the cap"),
    Flag("epoch", _count, "of the cap"),
    *(flag._replace(name=flag.name.replace("-", "_")) for flag in (*SLO_FLAGS, POLICY)),
    OVERLOAD,
)
"""Files of --runtime-config-dir; all may be missing."""


class _Parser(argparse.ArgumentParser):
    """Raises instead of leaving the process, so that every problem is told at once."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError([message])


def _help(flag: Flag, fields: Mapping[str, object]) -> str:
    """Its text, with the default that its field has."""
    default = fields.get(flag.name.replace("-", "_"))
    if default == "" or not isinstance(default, str | int | float):
        return flag.help
    if isinstance(default, bool):
        default = json.dumps(default)
    return f"{flag.help}; default: {default if isinstance(default, str | int) else f'{default:g}'}"


def _parser() -> argparse.ArgumentParser:
    structures = (EngineConfig, ServerConfig)
    fields = {f.name: f.default for struct in structures for f in structs.fields(struct)}
    fields["gpu_memory_utilization"] = fields["memory_utilization"]
    parser = _Parser(
        prog="sluice-worker",
        description="Serves one model over the OpenAI API, with a live max_num_seqs.",
        allow_abbrev=False,
    )
    for flag in (*ENGINE_FLAGS, *GIVEN_FLAGS, *HUB_FLAGS, *SERVER_FLAGS, *SLO_FLAGS):
        names = [f"--{flag.name}", *SHORT_NAMES.get(flag.name, ())]
        parser.add_argument(*names, help=_help(flag, fields), metavar=flag.metavar)
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
    problems = [f"{argument} is not a flag of sluice-worker" for argument in _strays(unknown)]
    _convert(given, GIVEN_FLAGS, problems)
    engine = _convert(given, ENGINE_FLAGS, problems)
    server = _convert(given, SERVER_FLAGS, problems)
    slo = _convert(given, SLO_FLAGS, problems)
    engine["enable_prefix_caching"] = given.enable_prefix_caching
    if "gpu_memory_utilization" in engine:
        engine["memory_utilization"] = engine.pop("gpu_memory_utilization")
    server["flag_slo"] = _slo(slo)
    persisted = _persisted(server.get("runtime_config_dir"), problems)
    slo |= {name: persisted.pop(name) for name in list(persisted) if name.startswith("slo_")}
    problems += _contradictions(engine, server, slo)
    server["api_key"] = _api_key(given, environ, problems)
    if OVERLOAD.name in persisted:
        server["overload"] = persisted.pop(OVERLOAD.name)
    server["slo"] = _slo(slo)
    engine["itl_ms"], engine["ttft_ms"] = slo.get("slo_itl_ms"), slo.get("slo_ttft_ms")
    if engine.get("batching_mode") == "static":  # a batch is of those that came first
        engine.setdefault("scheduling_policy", "fcfs")
    hub = None
    try:
        hub = _hub(given.model, _convert(given, HUB_FLAGS, problems), environ)
    except ValueError as error:
        problems.append(str(error))
    else:
        if hub is None:
            problems += _checkpoint_problems(given.model, engine.get("load_format", "auto"))
    problems += _file_problems(server)
    if problems:
        raise ConfigError(problems)
    return WorkerConfig(EngineConfig(**engine | persisted), ServerConfig(**server), hub)


def _strays(unknown: Sequence[str]) -> Iterator[str]:
    """The arguments that nobody knows, but for the values of flags that nobody knows."""
    is_value = False
    for argument in unknown:
        is_flag = argument.startswith("-") and not argument[1:2].isdigit()
        if is_flag or not is_value:
            yield argument.partition("=")[0] if is_flag else argument
        is_value = is_value or is_flag


def _slo(values: dict[str, Any]) -> Slo:
    return Slo(**{name.removeprefix("slo_"): value for name, value in values.items()})


def _hub(model: str | None, values: dict[str, Any], environ: Mapping[str, str]) -> HubConfig | None:
    """Which model of which hub, if it is one; ValueError with a sentence if it contradicts."""
    wanted = hub_model(model, values.get("revision")) if model is not None else None
    directory: Path | None = values.get("download_dir")
    if wanted is not None:
        return HubConfig(wanted, access(environ, directory))
    if directory is not None:
        raise ValueError(f"--download-dir {directory} belongs to models of the hub, not to {model}")
    return None


def _api_key(
    given: argparse.Namespace, environ: Mapping[str, str], problems: list[str]
) -> Secret | None:
    """The key of the environment, unless a file holds the keys. No problem shows one."""
    if given.api_key is not None:
        problems.append(
            "--api-key would show its key to all who list processes: name a file that holds it "
            f"with --api-key-file, or set {API_KEY}"
        )
    key = environ.get(API_KEY, "").strip()
    if not key or given.api_key_file is not None:
        return None
    if not (key.isascii() and key.isprintable()):
        problems.append(f"{API_KEY} must be one line of ASCII")
    return Secret(key)


def _convert(
    given: argparse.Namespace, flags: tuple[Flag, ...], problems: list[str]
) -> dict[str, Any]:
    """The values of the flags that were given; what cannot be converted joins `problems`."""
    values: dict[str, Any] = {}
    for flag in flags:
        name = flag.name.replace("-", "_")
        text = getattr(given, name)
        if text is None:
            continue
        try:
            values[name] = flag.convert(text)
        except ValueError as error:
            problems.append(f"--{flag.name} {error}")
    return values


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


def _file_problems(server: dict[str, Any]) -> list[str]:
    problems = []
    for flag in ("api_key_file", "admin_token_file"):
        path: Path | None = server.get(flag)
        if path is None:
            continue
        try:
            read_secrets(path)
        except ConfigError as error:
            problems += [f"--{flag.replace('_', '-')} {problem}" for problem in error.problems]
    return problems


def read_named(path: Path) -> str:
    """The text of a file that a flag names, which may be a pipe; ConfigError with its cause."""
    try:
        with path.open("rb") as file:
            data = file.read(MAX_TEXT_BYTES + 1)
        refuse_pointer(data, str(path))
        text = data.decode()
    except OSError as error:
        raise ConfigError([f"{path} cannot be read: {cause(error)}"]) from error
    except UnicodeDecodeError as error:
        raise ConfigError([f"{path} cannot be read: not UTF-8 text"]) from error
    except CheckpointError as error:
        raise ConfigError([error.message]) from error
    if len(data) > MAX_TEXT_BYTES:
        raise ConfigError([f"{path} is larger than {MAX_TEXT_BYTES >> 20} MiB"])
    if not text.strip():
        raise ConfigError([f"{path} is empty"])
    return text


def read_secrets(path: Path) -> tuple[str, ...]:
    """The non-empty lines of `path`; raises ConfigError if there is none or it cannot be read."""
    return tuple(line.strip() for line in read_named(path).splitlines() if line.strip())


def _persisted(directory: Path | None, problems: list[str]) -> dict[str, Any]:
    """What the operator wrote down, so that a new pod starts as its peers are: cap, epoch, order
    and the targets, for which it predicts its first cap and sizes chunks of prefill."""
    if directory is None:
        return {}
    values: dict[str, Any] = {}
    try:
        names = os.listdir(directory)
    except OSError as error:
        problems.append(f"--runtime-config-dir {directory} cannot be read: {cause(error)}")
        return values
    for flag in RUNTIME_FILES:
        if flag.name not in names:
            continue
        path = directory / flag.name
        try:
            text = path.read_text(encoding="utf-8", errors="replace").strip()
            values[flag.name] = flag.convert(text[:40])
        except OSError as error:
            problems.append(f"{path} cannot be read: {cause(error)}")
        except ValueError as error:
            problems.append(f"{path} {error}")
    if "max_num_seqs" in values:
        values["initial_num_seqs"] = values.pop("max_num_seqs")
    return values
