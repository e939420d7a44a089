"""A server's flags and files, for any engine, and their readers.

A flag is a field of a config class. Its type, default, help and bounds are only there.
"""

import argparse
import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import Field, dataclass, field, fields
from importlib.metadata import version
from ipaddress import ip_network
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, Literal, NoReturn, get_args, get_origin, get_type_hints

import msgspec
from msgspec import Meta
from sluice_core.bounded import Share
from sluice_core.contract import MAX_MS, Overload, SchedulingPolicy, Slo
from sluice_core.errors import CheckpointError, ConfigError
from sluice_core.model.files import cause, refuse_pointer
from sluice_core.model.sizing import BODIES_BYTES

VERSION = version("sluice")
API_KEY = "VLLM_API_KEY"
"""vLLM's environment variable for the key of the API."""
MAX_TEXT_BYTES = 1 << 20
"""Bound of a file that a flag names: keys, a chat template."""
HOLD_SHARE_SAYS = (
    "share of the time to --slo-ttft-ms for which a computed prompt may be held, so that steps of "
    "long prompts break no decodes; 0: first tokens come as soon as they can"
)


def flag(text: str, default: object = None, **more: str) -> Any:
    """A field that is a flag with the help `text`.

    `more`: `name` if it differs from the field's; `alias`; `noun` of its JSON value; `reason`, the
    end of a refusal.
    """
    return field(default=default, metadata={"help": text, **more})


@dataclass(frozen=True, slots=True)
class Flag:
    """A field that a text sets; `kind`: its type without None, within `bounds`."""

    field: Field[Any]
    kind: Any
    bounds: Meta

    @property
    def name(self) -> str:
        """Its spelling after the dashes."""
        return str(self.field.metadata.get("name", self.field.name)).replace("_", "-")

    @property
    def choices(self) -> tuple[str, ...]:
        """All texts that it accepts; empty if they cannot be listed."""
        if self.kind is bool:
            return ("true", "false")
        return get_args(self.kind) if get_origin(self.kind) is Literal else ()

    def add_to(self, parser: argparse.ArgumentParser) -> None:
        """Make it a flag of `parser`, which keeps its text."""
        more, default = self.field.metadata, self.field.default
        text = more["help"]
        if default != "" and isinstance(default, str | int | float):
            shown = default if isinstance(default, str) else json.dumps(default)
            text += f"; default: {shown.removesuffix('.0')}"
        names = [f"--{self.name}", *([more["alias"]] if "alias" in more else [])]
        metavar = f"{{{','.join(self.choices)}}}" if self.choices else "X"
        parser.add_argument(*names, dest=self.field.name, help=text, metavar=metavar)

    def convert(self, text: str) -> Any:
        """The value of `text`; ValueError names the allowed values."""
        if self.choices:
            return self._choice(text)
        if self.kind in (int, float):
            return self._number(text)
        if self.kind in (str, Path):
            return self.kind(text)
        try:
            return msgspec.json.decode(text, type=self.kind)
        except msgspec.MsgspecError as error:
            noun = self.field.metadata["noun"]
            raise ValueError(f"must be a JSON {noun}: {error}") from error

    def _choice(self, text: str) -> str | bool:
        if text in self.choices:
            return text == "true" if self.kind is bool else text
        few = " or ".join(self.choices) if len(self.choices) < 3 else ""
        known = few or f"one of {', '.join(self.choices)}"
        raise ValueError(f"must be {known}, not {text!r}{self.field.metadata.get('reason', '')}")

    def _number(self, text: str) -> float:
        low, high, shown = self.bounds.ge or 0, self.bounds.le, repr(text)
        try:
            value: float = self.kind(text)
            if low <= value <= (high or sys.float_info.max):
                return value
            shown = text
        except ValueError:
            pass
        noun = "a whole number" if self.kind is int else "a number"
        limits = f"from {low:g} " + (f"to {high}" if high else "on")
        raise ValueError(f"must be {noun} {limits}, not {shown}")


def flags_of(config: type) -> list[Flag]:
    """A flag for each field with a help text in a config class."""
    kinds = get_type_hints(config, include_extras=True)
    flags = []
    for each in fields(config):
        if "help" in each.metadata:
            kind, bounds = kinds[each.name], Meta()
            if NoneType in get_args(kind):
                kind = get_args(kind)[0]
            if get_origin(kind) is Annotated:
                kind, bounds = get_args(kind)
            flags.append(Flag(each, kind, bounds))
    return flags


Positive = Annotated[int, Meta(ge=1)]
Port = Annotated[int, Meta(ge=0, le=65535)]
Seconds = Annotated[float, Meta(ge=0.01)]
Milliseconds = Annotated[float, Meta(ge=0.001, le=MAX_MS)]


@dataclass(frozen=True, slots=True)
class Secret:
    """A text that is never shown."""

    text: str = field(repr=False)


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """All settings of the API process, for any engine. Timeouts and ages in seconds.

    `slo`: in force at the start; `flag_slo`: from flags only, which are the same for all pods.
    """

    host: str = flag("address of the API port; all of IPv4 and IPv6 if empty", "")
    port: Port = flag("API port; 0 picks a free one", 8000)
    admin_port: Port = flag("admin port: metrics, evidence, live changes; 0: a free one", 8001)
    served_model_name: str | None = flag("the model's name in requests and metrics")
    api_key_file: Path | None = flag(
        f"file of bearer keys, one a line; else {API_KEY}; without both it is open"
    )
    api_key: Secret | None = None
    admin_token_file: Path | None = flag(
        "file of the admin bearer; without it admin is on 127.0.0.1"
    )
    runtime_config_dir: Path | None = flag(
        "directory with cap, epoch, targets and order, read at start"
    )
    slo: Slo = Slo()
    flag_slo: Slo = Slo()
    overload: Overload = flag("Shed drops what cannot meet --slo-ttft-ms", "Queue")
    max_num_queued_reqs: int = flag("waiting requests over which new ones get 429", 1024)
    max_num_queued_tokens: int = flag(
        "prompt tokens without an answer yet, likewise; 0: as many as a 32nd of the memory holds", 0
    )
    max_body_bytes: Positive = flag("request bodies over it get 413", 4 << 20)
    memory_bytes: int = BODIES_BYTES
    """For bodies and answers together (`http.bodies`). A program that plans no memory has a flag
    for it."""
    liveness_timeout: Seconds = flag("seconds without a step, with work, until not live", 30.0)
    shutdown_delay: float = flag(
        "seconds after SIGTERM in which a load balancer may still send clients here; over 0, "
        "connections that they keep idle are waited for as well, 20 seconds at most",
        0.0,
    )
    shutdown_timeout: Seconds = flag("seconds that running requests get after that", 30.0)
    receive_timeout: Seconds = flag("seconds for a request's body; headers: 10 at most", 30.0)
    write_timeout: Seconds = flag(
        "seconds in which a slow reader must read an eighth of what is left, or 512 KiB, or is cut",
        30.0,
    )
    connection_max_age: Seconds = flag(
        "seconds after which an answer closes its connection; a tenth while requests wait", 30.0
    )
    keep_alive_timeout: Seconds = flag(
        "seconds after which an idle connection is closed: longer than proxies keep theirs, "
        "Google's for 600",
        620.0,
    )
    trusted_proxies: tuple[str, ...] = flag(
        "JSON list of networks, as 10.0.0.0/8, whose X-Forwarded-For tells a client's address; "
        "without keys, each address has a share",
        (),
        noun="list of networks",
    )
    sse_keep_alive_interval: float = flag("seconds of silence until a comment; 0: never", 0.0)
    allowed_origins: tuple[str, ...] = flag(
        'JSON list of pages that may ask from a browser; ["*"]: all', ("*",), noun="list of origins"
    )

    batch_dir: Path | None = flag(
        "directory for /v1/files and /v1/batches, which several servers may share"
    )

    @property
    def has_api_keys(self) -> bool:
        """True if the API asks for a bearer."""
        return self.api_key_file is not None or self.api_key is not None


@dataclass(frozen=True, slots=True)
class SloFlags:
    """Targets as flags; an Slo has them without the prefix."""

    slo_ttft_ms: Milliseconds | None = flag("target of the time to the first token")
    slo_itl_ms: Milliseconds | None = flag("target of the gap between two tokens")
    slo_e2e_ms: Milliseconds | None = flag("target of the whole request")


@dataclass(frozen=True, slots=True)
class RuntimeFiles(SloFlags):
    """Files of --runtime-config-dir; all may be missing."""

    cap: Positive | None = flag("the cap")
    epoch: int | None = flag("of the cap")
    scheduling_policy: SchedulingPolicy | None = flag("the order")
    overload: Overload | None = flag("as --overload")
    hold_share: Share | None = flag("as --hold-share")


class Parser(argparse.ArgumentParser):
    """Raises instead of exiting, so that all problems are reported at once."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError([message])


def strays(unknown: Sequence[str]) -> Iterator[str]:
    """The unknown arguments, without the values of unknown flags."""
    is_value = False
    for argument in unknown:
        is_flag = argument.startswith("-") and not argument[1:2].isdigit()
        if is_flag or not is_value:
            yield argument.partition("=")[0] if is_flag else argument
        is_value = is_value or is_flag


def slo_of(values: dict[str, Any]) -> Slo:
    """The targets in `values`, named as the fields of `SloFlags`."""
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


def converted(given: argparse.Namespace, config: type, problems: list[str]) -> dict[str, Any]:
    """The fields of `config` that flags set; values that cannot be converted join `problems`."""
    values: dict[str, Any] = {}
    for one in flags_of(config):
        text = getattr(given, one.field.name)
        if text is None:
            continue
        try:
            values[one.field.name] = one.convert(text)
        except ValueError as error:
            problems.append(f"--{one.name} {error}")
    return values


def contradictions(
    server: ServerConfig,
    ceiling: int | None,
    initial: int | None,
    ttft_ms: float | None,
    hold_share: float,
) -> list[str]:
    """A sentence for each two flags of any server that are sound alone, but not together."""
    problems = []
    if server.port and server.port == server.admin_port:
        problems.append(
            f"--port and --admin-port are both {server.port}; give them different ports"
        )
    if ceiling is not None and initial is not None and initial > ceiling:
        problems.append(f"--initial-num-seqs {initial} is over --max-num-seqs {ceiling}")
    if server.max_body_bytes > server.memory_bytes // 2:
        problems.append(
            f"--max-body-bytes {server.max_body_bytes} is over half of the {server.memory_bytes} "
            "bytes that bodies and answers may take together"
        )
    if server.overload == "Shed" and ttft_ms is None:
        problems.append("--overload Shed needs --slo-ttft-ms, the target that it sheds for")
    if hold_share < 1 and ttft_ms is None:
        problems.append("--hold-share needs --slo-ttft-ms, the target that it is a share of")
    for text in server.trusted_proxies:
        try:
            ip_network(text)
        except ValueError as error:
            problems.append(f"--trusted-proxies: {error}")
    return problems


def file_problems(values: dict[str, Any]) -> list[str]:
    """A sentence for each file of keys or tokens, and each directory for files, among the flags'
    `values` that cannot be used."""
    problems, kept = [], values.get("batch_dir")
    if kept is not None and not (kept.is_dir() and os.access(kept, os.W_OK | os.X_OK)):
        problems.append(f"--batch-dir {kept} is no directory that can be written")
    for name, path in values.items():
        if not name.endswith(("_key_file", "_token_file")):
            continue
        try:
            read_secrets(path)
        except ConfigError as error:
            problems += [f"--{name.replace('_', '-')} {problem}" for problem in error.problems]
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
    """The operator's files, with which a new pod starts with the settings of its peers.

    They hold cap, epoch, order and targets; the first cap and prefill chunks follow from these.
    """
    if directory is None:
        return {}
    values: dict[str, Any] = {}
    try:
        names = os.listdir(directory)
    except OSError as error:
        problems.append(f"--runtime-config-dir {directory} cannot be read: {cause(error)}")
        return values
    for one in flags_of(RuntimeFiles):
        name = one.field.name
        if name not in names:
            continue
        path = directory / name
        try:
            text = path.read_text(encoding="utf-8", errors="replace").strip()
            values[name] = one.convert(text[:40])
        except OSError as error:
            problems.append(f"{path} cannot be read: {cause(error)}")
        except ValueError as error:
            problems.append(f"{path} {error}")
    if "cap" in values:
        values["initial_num_seqs"] = values.pop("cap")
    return values
