"""A server's flags and files, whatever engine is behind it, and how they are read."""

import argparse
import json
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple, NoReturn, get_args

import msgspec
from msgspec import Struct
from sluice_core.contract import MAX_MS, Overload, SchedulingPolicy, Slo
from sluice_core.errors import CheckpointError, ConfigError
from sluice_core.model.files import cause, refuse_pointer

API_KEY = "VLLM_API_KEY"
"""vLLM's environment variable for the key of the API."""
MAX_TEXT_BYTES = 1 << 20
"""Of a file that a flag names: keys, a chat template."""


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


class Flag(NamedTuple):
    """One flag that takes a value: its name, how the text becomes a value, and its help."""

    name: str
    convert: Callable[[str], object]
    help: str
    metavar: str = "X"


def number(kind: type[int] | type[float], low: float, high: float) -> Callable[[str], object]:
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


def choice(name: str, choices: Sequence[str], text: str) -> Flag:
    """A flag that takes one of `choices`."""

    def convert(text: str) -> str:
        if text not in choices:
            raise ValueError(f"must be one of {', '.join(choices)}, not {text!r}")
        return text

    return Flag(name, convert, text, f"{{{','.join(choices)}}}")


def json_value(kind: Any, said: str) -> Callable[[str], object]:
    """Reads a flag's JSON, as vLLM has it."""

    def convert(text: str) -> object:
        try:
            return msgspec.json.decode(text, type=kind)
        except msgspec.MsgspecError as error:
            raise ValueError(f"must be a JSON {said}: {error}") from error

    return convert


def _truth(text: str) -> bool:
    if text not in ("true", "false"):
        raise ValueError(f"must be true or false, not {text!r}")
    return text == "true"


_origins = json_value(tuple[str, ...], "list of origins")
COUNT = number(int, 0, math.inf)
POSITIVE = number(int, 1, math.inf)
_port = number(int, 0, 65535)
MILLISECONDS = number(float, 0.001, MAX_MS)
_seconds = number(float, 0.01, math.inf)
_interval = number(float, 0, math.inf)

POLICY = choice(
    "scheduling-policy",
    get_args(SchedulingPolicy),
    "who is served first; deadline: who can still have a first token in time; default: deadline "
    "with --slo-ttft-ms, else fcfs",
)
OVERLOAD = choice("overload", get_args(Overload), "Shed drops what cannot meet --slo-ttft-ms")
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
    Flag("max-num-queued-reqs", COUNT, "waiting requests over which new ones get 429"),
    Flag(
        "max-num-queued-tokens",
        COUNT,
        "prompt tokens without an answer yet, likewise; 0: as many as a 32nd of the memory holds",
    ),
    Flag("max-body-bytes", POSITIVE, "request bodies over it get 413"),
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
    choice("generation-config", ("auto", "vllm"), "sampling defaults; auto: the checkpoint's"),
    Flag(
        "parse-special",
        _truth,
        "read control tokens in the text of a prompt, unless its request says otherwise",
        "{true,false}",
    ),
    Flag("sse-keep-alive-interval", _interval, "seconds of silence until a comment; 0: never"),
    Flag("allowed-origins", _origins, 'JSON list of pages that may ask from a browser; ["*"]: all'),
)
SLO_FLAGS = (
    Flag("slo-ttft-ms", MILLISECONDS, "target of the time to the first token"),
    Flag("slo-itl-ms", MILLISECONDS, "target of the gap between two tokens"),
    Flag("slo-e2e-ms", MILLISECONDS, "target of the whole request"),
)

RUNTIME_FILES = (
    Flag("max_num_seqs", POSITIVE, "the cap"),
    Flag("epoch", COUNT, "of the cap"),
    *(flag._replace(name=flag.name.replace("-", "_")) for flag in (*SLO_FLAGS, POLICY)),
    OVERLOAD,
)
"""Files of --runtime-config-dir; all may be missing."""


class Parser(argparse.ArgumentParser):
    """Raises instead of leaving the process, so that every problem is told at once."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError([message])


def help_of(flag: Flag, fields: Mapping[str, object]) -> str:
    """Its text, with the default that its field has."""
    default = fields.get(flag.name.replace("-", "_"))
    if default == "" or not isinstance(default, str | int | float):
        return flag.help
    if isinstance(default, bool):
        default = json.dumps(default)
    return f"{flag.help}; default: {default if isinstance(default, str | int) else f'{default:g}'}"


def strays(unknown: Sequence[str]) -> Iterator[str]:
    """The arguments that nobody knows, but for the values of flags that nobody knows."""
    is_value = False
    for argument in unknown:
        is_flag = argument.startswith("-") and not argument[1:2].isdigit()
        if is_flag or not is_value:
            yield argument.partition("=")[0] if is_flag else argument
        is_value = is_value or is_flag


def slo_of(values: dict[str, Any]) -> Slo:
    """The targets among `values`, which are named as `SLO_FLAGS` are."""
    return Slo(**{name.removeprefix("slo_"): value for name, value in values.items()})


def api_key_of(
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


def converted(
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


def file_problems(server: dict[str, Any]) -> list[str]:
    """A sentence for each file of keys that cannot be used."""
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


def read_persisted(directory: Path | None, problems: list[str]) -> dict[str, Any]:
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
