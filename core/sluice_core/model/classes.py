"""What a classifier's numbers mean, as config.json tells. Pure.

The activation is applied once: that of the file, or else the usual one of its problem, as in vLLM
and transformers' pipeline.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import exp
from typing import Literal

from ..errors import CheckpointError
from .files import Source, json_object, read_bytes
from .sentence import MAX_BYTES, MODULES, PROMPTS, scores_tokens

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
    def read(source: Source, config: Mapping[str, object]) -> "Classes":
        """Those of a checkpoint with this config.json; raises CheckpointError."""
        labels, own = _labels(config), dict[str, object]()
        if PROMPTS in source.names():
            own = dict(json_object(read_bytes(source, PROMPTS, MAX_BYTES), PROMPTS))
        is_scoring = MODULES in source.names() and scores_tokens(source)
        if is_scoring:
            labels = labels[:1]
        elif own.get("default_prompt_name") is not None:
            raise CheckpointError(f"{PROMPTS}: default_prompt_name is not built for classes.")
        return Classes(labels, _activation(own, config, len(labels)))

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


def _activation(
    own: Mapping[str, object], config: Mapping[str, object], num_labels: int
) -> Activation:
    """`own`: sentence-transformers' file of version 5.4 on; it kept this in config.json before."""
    older = config.get("sentence_transformers")
    in_older = older.get("activation_fn") if isinstance(older, Mapping) else None
    asked = own.get("activation_fn") or in_older or config.get(_OLD_ACTIVATION)
    if asked is not None:
        name = str(asked).rpartition(".")[2]
        if not str(asked).startswith("torch.nn.") or name not in _BY_NAME:
            raise CheckpointError(f"activation_fn {str(asked)[:64]} is not built.")
        return _BY_NAME[name]
    problem = config.get("problem_type")
    if problem is None:
        return "softmax" if num_labels > 1 else "sigmoid"
    if problem not in _OF_PROBLEMS:
        raise CheckpointError(f"config.json: problem_type {str(problem)[:64]} is not known.")
    return _OF_PROBLEMS[str(problem)]
