"""State that must survive an operator: cap, epoch, replicas and tuner memory, as ConfigMap data."""

from collections.abc import Mapping
from dataclasses import dataclass

import msgspec
from sluice_core.bounded import count

from ..spec.kinds import MAX_BATCHED_TOKENS, MAX_NUM_SEQS
from ..spec.service import MAX_REPLICAS
from ..tuner import Past
from ..tuner.constants import HISTORY, MAX_DOUBLINGS, MAX_DRAIN_S, REMEMBERED_CAPS

OWNER_ANNOTATION = "sluice.dev/operator"
"""Annotation of the ConfigMap: the installation that manages the object."""
_MAX_EPOCH = 2**52
"""Far below the limit of workers and of the status: there is room for the epochs that follow."""
_MAX_NUMBER = 1e11
"""Largest number in the tuner's memory without a bound of its own; as seconds, the year 5138."""
_MAX_TEXT = 256
"""Most characters of a reason, or of the targets' key."""
_LEAST = {"cap": 1, "from_cap": 1, "to_cap": 1}
"""Least values of fields in the tuner's memory; all others must be at least 0."""
_MOST = {
    "cap": MAX_NUM_SEQS,
    "from_cap": MAX_NUM_SEQS,
    "to_cap": MAX_NUM_SEQS,
    "epoch": _MAX_EPOCH,
    "times": MAX_DOUBLINGS,
    "from_replicas": MAX_REPLICAS,
    "to_replicas": MAX_REPLICAS,
    "scale_in_to": MAX_REPLICAS,
    "drain_s": MAX_DRAIN_S,
    "breached_caps": REMEMBERED_CAPS,
    "scale_history": HISTORY,
    "tokens": MAX_BATCHED_TOKENS,
}
"""Largest values, and longest lists, in the tuner's memory. `times` is an exponent of two: a writer
of the ConfigMap must not choose it."""


def runtime_name(name: str) -> str:
    """The ConfigMap with cap and epoch of the object `name`."""
    return f"{name}-runtime"


@dataclass(frozen=True, slots=True)
class DecidedRuntime:
    """The decided state of one object. `cap` None: no pod has reported its prediction yet.

    `epoch` rises with every change of the cap and is persisted before any pod hears of it.
    """

    epoch: int
    cap: int | None
    replicas: int
    past: Past = Past()

    def data(self) -> dict[str, str]:
        """The ConfigMap's data; workers read `epoch` and `cap` when they start."""
        cap = {} if self.cap is None else {"cap": str(self.cap)}
        past = msgspec.json.encode(self.past).decode()
        return {"epoch": str(self.epoch), **cap, "replicas": str(self.replicas), "past.json": past}


def parse(data: Mapping[str, str]) -> DecidedRuntime | None:
    """Read ConfigMap data; None if a person has spoilt the numbers."""
    epoch = count(data.get("epoch"), _MAX_EPOCH)
    replicas = count(data.get("replicas"), MAX_REPLICAS)
    cap = count(data.get("cap"), MAX_NUM_SEQS)
    if epoch is None or replicas is None or ("cap" in data and not cap):
        return None
    return DecidedRuntime(epoch, cap, replicas, _past_of(data.get("past.json", "{}")))


def _past_of(text: str) -> Past:
    try:
        past = msgspec.json.decode(text, type=Past)
    except (ValueError, RecursionError):
        return Past()  # it only bounds how fast things change; the evidence is read anew
    return past if _is_believable("", msgspec.to_builtins(past)) else Past()


def _is_believable(name: str, value: object) -> bool:
    """True if the tuner could have written this value of the field `name`. Then the law can compute
    with it and a status name it: others may write the ConfigMap, too."""
    if isinstance(value, Mapping):
        return all(_is_believable(key, inner) for key, inner in value.items())
    if isinstance(value, list | tuple):
        return len(value) <= _MOST.get(name, 0) and all(_is_believable("", item) for item in value)
    if isinstance(value, str):
        return len(value) <= _MAX_TEXT
    if isinstance(value, int | float):
        return _LEAST.get(name, 0) <= value <= _MOST.get(name, _MAX_NUMBER)
    return value is None
