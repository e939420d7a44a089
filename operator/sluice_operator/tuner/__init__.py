"""The tuner: evidence of the pods in, the cap and the replicas out. Pure; stdlib and msgspec only.

`types` is the interface, `decide.decide` the only entry. `evidence` selects and merges ticks.
`tick_sums` caches their sums between passes; its clock only evicts old ones. `interference` finds
gaps that no cap would have held. `context` holds the facts of one decision. `detect` has the
statistical tests, `verdicts` judges the targets. `model` predicts the step time, `capacity` the
throughput of a pod. `caps` moves the cap, `demand` counts replicas, `replicas` moves them.
`conditions` says if the promise holds. Rules in order decide, which docs/slo.md prints. `constants`
has every number with its reason.
"""

from .decide import decide
from .types import (
    CapLimits,
    ChunkBudget,
    ChunkLimits,
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
    "ChunkBudget",
    "ChunkLimits",
    "Observation",
    "Past",
    "PodView",
    "TargetVerdict",
    "Targets",
    "decide",
]
