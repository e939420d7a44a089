"""Parameters of a simulated service: the step time, its noise, memory and pods; the targets."""

from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta
from sluice_core.bounded import Share
from sluice_core.contract import Overload, SchedulingPolicy
from sluice_core.latency import StepLaw
from sluice_core.model.sizing import DEFAULT_BATCHED_TOKENS
from sluice_operator.tuner import CapLimits

MOST = 1e9
"""Bound of every number: sums and products of such numbers stay finite."""
NonNegative = Annotated[float, Meta(ge=0, le=MOST)]
Positive = Annotated[float, Meta(gt=0, le=MOST)]
Sigma = Annotated[float, Meta(ge=0, le=5)]
Count = Annotated[int, Meta(ge=1)]
KvTokens = Annotated[int, Meta(ge=1, le=100_000_000)]
"""A pod's block pool keeps every block in memory, hence the bound."""


class ParamsError(ValueError):
    """Parameters or targets that cannot be used; one sentence."""


class Params(StepLaw, frozen=True, forbid_unknown_fields=True):
    """One service, and the law of its steps, before noise.

    `kv_tokens`: the KV memory of one pod; `cold_start_s`: from asking for a pod until it is ready.
    `hold_share`: as the worker's flag.
    `between_ms`: from a step's end to the next one's start. `noise`: sigma of each step's
    log-normal factor. Interference: about every `interference_every_s` seconds (0: never) all steps
    take `interference_factor` times as long, for about `interference_mean_s`. `leak_per_hour`: the
    share that an hour adds to every step. Hiccups: `hiccup_ms` more in that share of the steps.

    A GPU: `chunk_ms`, which a prompt chunk of any size adds, as only steps without one are CUDA
    graphs. Stalls: about every `stall_every_s` seconds (0: never) nothing happens for a time, from
    the least to the most of `stall_ms`. `first_size_ms`: what the first step of each size takes
    more, within a fifth of it, where no size was rehearsed. A step with a chunk is as large as it
    has tokens, one without is as large as its graph.
    """

    kv_tokens: KvTokens
    cold_start_s: NonNegative
    ceiling: Count = 256
    block_size: Count = 16
    max_num_batched_tokens: Count = DEFAULT_BATCHED_TOKENS
    max_num_queued: Count = 1024
    prefix_caching: bool = True
    between_ms: NonNegative = 0.0
    noise: Sigma = 0.05
    interference_every_s: NonNegative = 0.0
    interference_mean_s: Positive = 5.0
    interference_factor: Positive = 3.0
    leak_per_hour: NonNegative = 0.0
    hiccup_share: Share = 0.0
    hiccup_ms: NonNegative = 60.0
    chunk_ms: NonNegative = 0.0
    stall_every_s: NonNegative = 0.0
    stall_ms: tuple[NonNegative, NonNegative] = (50.0, 300.0)
    first_size_ms: NonNegative = 0.0
    min_replicas: Count = 1
    max_replicas: Count = 1
    overload: Overload = "Queue"
    hold_share: Share = 1.0
    order: SchedulingPolicy = "fcfs"

    @property
    def has_graphs(self) -> bool:
        """True if only steps without a prompt chunk are CUDA graphs."""
        return self.chunk_ms > 0

    @property
    def has_delays(self) -> bool:
        """True if single steps take longer than their mean and its noise."""
        return any((self.hiccup_share, self.stall_every_s, self.first_size_ms))

    def step_ms(self, decodes: float, kv_tokens: float, prefill_tokens: float) -> float:
        """Mean time of a step, in which a chunk costs its launch as well."""
        launch_ms = self.chunk_ms if prefill_tokens else 0.0
        return super().step_ms(decodes, kv_tokens, prefill_tokens) + launch_ms

    def limits(self) -> CapLimits:
        """The bounds of the tuner."""
        return CapLimits(self.ceiling, 1, self.min_replicas, self.max_replicas)


def read_params(path: Path) -> Params:
    """Parameters of a JSON file; raises ParamsError with the field's name."""
    try:
        params = msgspec.json.decode(path.read_bytes(), type=Params)
    except (OSError, msgspec.MsgspecError) as e:
        raise ParamsError(f"{path}: {e}") from e
    if params.a + params.b + params.c + params.d <= 0:
        raise ParamsError(f"{path}: a, b, c and d are all 0, so that a step takes no time.")
    if params.min_replicas > params.max_replicas:
        raise ParamsError(f"{path}: min_replicas is over max_replicas.")
    return params
