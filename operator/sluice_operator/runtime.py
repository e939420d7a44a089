"""What must survive an operator: cap, epoch, replicas and the tuner's memory, as ConfigMap data."""

from collections.abc import Mapping
from dataclasses import dataclass

import msgspec

from .kinds import MAX_NUM_SEQS
from .spec import MAX_REPLICAS
from .tuner import Past

OWNER_ANNOTATION = "sluice.dev/operator"
"""On the ConfigMap: the installation that cares for the object."""
_MAX_EPOCH = 2**52
"""Far below what workers and the status can hold: there is room for those that follow."""
_MAX_NUMBER = 1e11
"""Of the tuner's memory: as seconds the year 5138."""


def runtime_name(name: str) -> str:
    """The ConfigMap with cap and epoch of the object `name`."""
    return f"{name}-runtime"


@dataclass(frozen=True, slots=True)
class Runtime:
    """The decided state of one object. `cap` None: no pod has said yet what it predicts.

    `epoch` rises with every change of the cap and is persisted before any pod hears of it.
    """

    epoch: int
    cap: int | None
    replicas: int
    past: Past = Past()

    def data(self) -> dict[str, str]:
        """As the ConfigMap holds it; workers read `epoch` and `max_num_seqs` when they start."""
        cap = {} if self.cap is None else {"max_num_seqs": str(self.cap)}
        past = msgspec.json.encode(self.past).decode()
        return {"epoch": str(self.epoch), **cap, "replicas": str(self.replicas), "past.json": past}


def parse(data: Mapping[str, str]) -> Runtime | None:
    """Read ConfigMap data; None where a person has made nonsense of the numbers."""
    try:
        epoch, replicas = int(data["epoch"]), int(data["replicas"])
        cap = int(data["max_num_seqs"]) if "max_num_seqs" in data else None
    except (KeyError, ValueError):
        return None
    is_sane = 0 <= epoch <= _MAX_EPOCH and 0 <= replicas <= MAX_REPLICAS
    if not is_sane or not (cap is None or 1 <= cap <= MAX_NUM_SEQS):
        return None
    return Runtime(epoch, cap, replicas, _past_of(data.get("past.json", "{}")))


def _past_of(text: str) -> Past:
    try:
        past = msgspec.json.decode(text, type=Past)
    except (ValueError, RecursionError):
        return Past()  # it only bounds how fast things change; the evidence is read anew
    return past if _can_be_told(msgspec.to_builtins(past)) else Past()


def _can_be_told(value: object) -> bool:
    """Whether all numbers are such that a status can name them."""
    if isinstance(value, Mapping):
        return all(map(_can_be_told, value.values()))
    if isinstance(value, list | tuple):
        return all(map(_can_be_told, value))
    return not isinstance(value, int | float) or abs(value) <= _MAX_NUMBER
