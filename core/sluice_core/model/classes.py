"""What a classifier's numbers mean, as config.json tells. Pure.

The activation is applied once: that of the file, or else the usual one of its problem, as in vLLM
and transformers' pipeline.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import exp
from typing import Literal

from ..errors import CheckpointError

MAX_CLASSES = 1 << 16
Activation = Literal["softmax", "sigmoid", "identity"]
_OF_PROBLEMS: Mapping[str, Activation] = {
    "regression": "identity",
    "single_label_classification": "softmax",
    "multi_label_classification": "sigmoid",
}
_BY_NAME: Mapping[str, Activation] = {
    "Identity": "identity",
    "Sigmoid": "sigmoid",
    "Softmax": "softmax",
}
_OLD_ACTIVATION = "sbert_ce_default_activation_function"


@dataclass(frozen=True, slots=True)
class Classes:
    """The classes of a model and the activation of its numbers."""

    labels: tuple[str, ...]
    activation: Activation

    @staticmethod
    def read(config: Mapping[str, object]) -> "Classes":
        """Those in a config.json; raises CheckpointError."""
        labels = _labels(config)
        return Classes(labels, _activation(config, len(labels)))

    def probabilities(self, values: Sequence[float]) -> list[float]:
        """The model's numbers, activated."""
        match self.activation:
            case "identity":
                return list(values)
            case "sigmoid":
                return [sigmoid(value) for value in values]
            case "softmax":
                most = max(values)
                powers = [exp(value - most) for value in values]
                return [power / sum(powers) for power in powers]


def sigmoid(value: float) -> float:
    """1 / (1 + exp(-value)), for any finite value."""
    if value >= 0:
        return 1 / (1 + exp(-value))
    power = exp(value)
    return power / (1 + power)


def _labels(config: Mapping[str, object]) -> tuple[str, ...]:
    named = config.get("id2label")
    if named is None:
        num = config.get("num_labels", 2)  # as transformers has it
        if isinstance(num, bool) or not isinstance(num, int) or not 0 < num <= MAX_CLASSES:
            raise CheckpointError(f"config.json: num_labels must be 1 to {MAX_CLASSES}.")
        return tuple(f"LABEL_{number}" for number in range(num))
    if not isinstance(named, Mapping) or not 0 < len(named) <= MAX_CLASSES:
        raise CheckpointError(f"config.json: id2label must name 1 to {MAX_CLASSES} classes.")
    labels = [named.get(str(number)) for number in range(len(named))]
    if not all(isinstance(label, str) for label in labels):
        raise CheckpointError("config.json: id2label must number its labels from 0 on.")
    return tuple(str(label) for label in labels)


def _activation(config: Mapping[str, object], num_labels: int) -> Activation:
    own = config.get("sentence_transformers")
    asked = own.get("activation_fn") if isinstance(own, Mapping) else None
    asked = asked or config.get(_OLD_ACTIVATION)
    if asked is not None:
        name = str(asked).rpartition(".")[2]
        if not str(asked).startswith("torch.nn.") or name not in _BY_NAME:
            raise CheckpointError(f"config.json: activation_fn {str(asked)[:64]} is not built.")
        return _BY_NAME[name]
    problem = config.get("problem_type")
    if problem is None:
        return "softmax" if num_labels > 1 else "sigmoid"
    if problem not in _OF_PROBLEMS:
        raise CheckpointError(f"config.json: problem_type {str(problem)[:64]} is not known.")
    return _OF_PROBLEMS[str(problem)]
