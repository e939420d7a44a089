"""The tuner: evidence of the pods in, the cap and the replicas out. Pure; stdlib and msgspec only.

`types` is the interface, `decide.decide` the one entry. `evidence` selects and merges ticks,
`tick_sums` keeps their sums between two looks (its clock only lets old ones go), `interference`
tells gaps that are not the cap's doing, `context` is all that a look goes by, `sketch` reads
quantiles, `detect` holds the statistical tests, `verdicts` judges the targets, `model` predicts the
step time and `capacity` what a pod does, `caps` moves the cap, `demand` counts replicas, `replicas`
moves them, `conditions` says whether the promise holds, `constants` has every number with its
reason.
"""

from .decide import decide
from .types import (
    CapLimits,
    Condition,
    Decision,
    Observation,
    Past,
    PodView,
    Targets,
    TargetVerdict,
)

__all__ = [
    "Condition",
    "Decision",
    "CapLimits",
    "Observation",
    "Past",
    "PodView",
    "TargetVerdict",
    "Targets",
    "decide",
]
