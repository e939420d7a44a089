"""The form of an engine. Pure."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from ..spec.service import Spec

LOOPBACK = "127.0.0.1"
PORT = 8100
"""Port of the engine, on loopback: clients reach the gate alone."""
ADMIN_KEY = "SLUICE_ENGINE_KEY"
"""Variable with the engine's admin key, where `Engine.takes_admin_key`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """The facts of one start. `model`: OWNER/NAME for hf://, else a path in the container.

    `capacity`: the most sequences at once, the ceiling of the cap; None lets our own engine size
    itself. `revision`: of hf://. `cache`: a writable directory for what hf:// downloads.
    """

    spec: Spec
    model: str
    capacity: int | None
    revision: str | None = None
    cache: str = ""

    @property
    def is_hub(self) -> bool:
        """Whether the engine downloads the model."""
        return self.spec.model.repo is not None


@dataclass(frozen=True, slots=True)
class Invocation:
    """What a container runs. Empty `command`: the image's own entry point.

    `owned`: arguments that the gate must own. They come after the user's, so they win.
    """

    command: tuple[str, ...] = ()
    args: tuple[str, ...] = ()
    owned: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    """An engine as data. `invoke`: what starts it. `image`: the default, "" for none.

    `gate_name`: its name for `sluice-gate --engine`. `default_capacity`: sequences at once where
    neither memory nor the user says. `has_our_arithmetic`: it runs the safetensors checkpoint, so
    our memory plan holds. `takes_budget`: a flag sets the token budget of a step.
    `loads_scheduler`: it may take a scheduler class of ours. `takes_admin_key`: with a key the gate
    sets a cap inside. `takes_gguf`: it fetches one GGUF file of a hub's model.
    """

    gate_name: str
    image: str
    invoke: Callable[[Start], Invocation]
    default_capacity: int
    has_our_arithmetic: bool = False
    takes_budget: bool = False
    loads_scheduler: Callable[[Spec], bool] = lambda spec: False
    takes_admin_key: bool = False
    takes_gguf: bool = False


def flags(given: Mapping[str, object]) -> tuple[str, ...]:
    """`--NAME=VALUE` for each value that is not None; True gives the bare flag, False nothing."""
    bare = {True: "", False: None}
    said = {
        name: bare[value] if isinstance(value, bool) else f"={value}"
        for name, value in given.items()
        if value is not None
    }
    return tuple(f"--{name}{value}" for name, value in said.items() if value is not None)
