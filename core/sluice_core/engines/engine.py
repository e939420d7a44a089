"""The form of another maker's engine: what it is started with, and how it tells its state. Pure."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

EngineName = Literal["vllm", "sglang", "tgi", "llamacpp", "ollama", "custom"]
LOOPBACK = "127.0.0.1"
PORT = 8100
"""Port of an engine in a pod, on loopback: clients reach the gate alone."""
ADMIN_KEY = "SLUICE_ENGINE_KEY"
"""Variable with the engine's admin key, where `Engine.takes_admin_key`."""
OWN_UTILIZATION = 0.9
"""The default of `memoryUtilization`. Engines whose share means something else find their own."""


class Group(NamedTuple):
    """The pods that serve as one. `rank`: of this pod; `leader`: host name of the first one.

    `follows`: it is not the first, which alone has a server.
    """

    size: int
    rank: str
    leader: str
    follows: bool


class Inside(NamedTuple):
    """Our scheduler in the engine: the folder of its packages, and the gate's socket."""

    packages: str
    socket: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """The facts of one start. None leaves a setting to the engine.

    `model`: OWNER/NAME of a hub, else a path. `name`: under which it is served. `capacity`: the
    most sequences at once. `budget`: tokens of a step. `cache`: a writable directory for what is
    downloaded. `utilization`: share of the memory. `accelerator`: "cpu", "nvidia" or "other".
    `tensor`: devices of a pod that share each layer. `pipeline`: pods that share the layers.
    """

    model: str
    name: str | None
    capacity: int
    port: int = PORT
    is_hub: bool = False
    revision: str | None = None
    cache: str = ""
    budget: int | None = None
    max_model_len: int | None = None
    dtype: str | None = None
    utilization: float | None = None
    prefix_caching: bool = True
    accelerator: str | None = None
    inside: Inside | None = None
    tensor: int | None = None
    pipeline: int | None = None
    group: Group | None = None

    @property
    def share(self) -> str | None:
        """The utilization, unless it is the default."""
        return None if self.utilization in (None, OWN_UTILIZATION) else f"{self.utilization:g}"


@dataclass(frozen=True, slots=True)
class Invocation:
    """What runs. Empty `command`: the image's own entry point.

    `owned`: arguments that the gate must own. They come after the user's, so they win.
    """

    command: tuple[str, ...] = ()
    args: tuple[str, ...] = ()
    owned: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class ForeignEngine:
    """An engine as data.

    `name`: for `sluice-gate --engine`; `kind`: for `spec.engine.name`. `image`: the default, "" for
    none. `invoke`: what starts it. `capacity`: sequences at once where neither memory nor the user
    says. `owned_flags`, `owned_variables`: only the gate sets them, as nothing may pass beside it,
    and its cap must be the bound.

    `health`: a path that answers 200 while it serves. `has_metrics`: it serves /metrics. There, by
    any of their names: `waiting`: sequences in its own queue; `kv_usage`: share of its KV cache in
    use, 0 to 1; `preemptions`: a counter; `tokens`: a counter that moves while it works.
    `counts_steps`: that one moves with each step, not at the end of an answer. `about`: a path that
    tells its capacity. A name that an engine does not show is unknown, never taken for idle.

    `has_our_arithmetic`: it runs the safetensors checkpoint, so our memory plan holds.
    `takes_budget`: a flag sets the token budget of a step. `loads_scheduler`: with these arguments
    of the user it takes a scheduler class of ours. `takes_admin_key`: with a key the gate sets a
    cap inside. `parallel_flags`: a user who gives one of them sets all that splits the model.
    `takes_gguf`: it fetches one GGUF file of a hub's model. `slot_tokens`: the context
    of a sequence where nobody says.

    `program`: in PATH on a laptop, "" where we start none; `install`: where it comes from;
    `module`: words for `python3` that do as the program.
    """

    name: EngineName
    kind: str
    image: str
    invoke: Callable[[Start], Invocation]
    capacity: int
    owned_flags: tuple[str, ...] = ()
    owned_variables: tuple[str, ...] = ()
    health: str = "/health"
    has_metrics: bool = True
    waiting: tuple[str, ...] = ()
    kv_usage: tuple[str, ...] = ()
    preemptions: tuple[str, ...] = ()
    tokens: tuple[str, ...] = ()
    counts_steps: bool = False
    about: str | None = None
    has_our_arithmetic: bool = False
    takes_budget: bool = False
    loads_scheduler: Callable[[Sequence[str]], bool] = lambda args: False
    takes_admin_key: bool = False
    parallel_flags: tuple[str, ...] = ()
    takes_gguf: bool = False
    slot_tokens: int | None = None
    program: str = ""
    verb: tuple[str, ...] = ()
    module: tuple[str, ...] = ()
    install: str = ""

    def splits(self, args: Sequence[str]) -> bool:
        """Whether a user's arguments say how the model is split."""
        return not names(args).isdisjoint(self.parallel_flags)


def names(args: Sequence[str]) -> frozenset[str]:
    """The flags of `args`, spelled with `-`; a value in an argument of its own is none."""
    said = (arg.split("=")[0].replace("_", "-") for arg in args)
    return frozenset(name for name in said if name.startswith("-"))


def flags(given: Mapping[str, object]) -> tuple[str, ...]:
    """Write `--NAME=VALUE` for each value that is not None; True gives the bare flag, False
    nothing."""
    bare = {True: "", False: None}
    said = {
        name: bare[value] if isinstance(value, bool) else f"={value}"
        for name, value in given.items()
        if value is not None
    }
    return tuple(f"--{name}{value}" for name, value in said.items() if value is not None)
