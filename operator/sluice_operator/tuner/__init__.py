"""The tuner: evidence of the pods in, the cap and the replicas out. Pure; stdlib and msgspec only.

`types` is the interface, `decide.decide` the one entry. `evidence` selects and merges ticks, `detect`
holds the statistical tests, `model` the step time, `demand` the replicas, `caps` the bounds of a
change, `verdicts` judges the targets, `constants` every number with its reason.
"""

from .decide import decide
from .types import (
    Condition,
    Decision,
    Limits,
    Observation,
    Past,
    PodView,
    Targets,
    TargetVerdict,
)

__all__ = [
    "Condition",
    "Decision",
    "Limits",
    "Observation",
    "Past",
    "PodView",
    "TargetVerdict",
    "Targets",
    "decide",
]
