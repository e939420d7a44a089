"""A simulated worker's knowledge at its start: its step model and the cap that it predicts."""

from math import exp
from random import Random

from sluice_core.contract import Slo
from sluice_core.latency import predicted_cap
from sluice_core.model.sizing import DEFAULT_MEAN_LENGTH
from sluice_core.steptime import StepRecord, StepTimes

from .params import Params

LONG = 4096
"""Tokens of context before the deepest chunk that is timed."""


def profile_records(params: Params, seed: int) -> list[StepRecord]:
    """The dummy steps of the worker's `startup`: nine, each the quicker of two with their noise."""
    shapes = ((1, 32), (8, 32), (8, 512), (32, 32), (1, 512))
    decodes = [
        (n, n * context, 0) for n, context in ((min(n, params.ceiling), kv) for n, kv in shapes)
    ]
    small, large = (min(n, params.max_num_batched_tokens) for n in (32, 128))
    chunks = [(0, kv, n) for n in (small, large) for kv in (n, LONG)]
    chance = Random(f"profile {seed}")  # noqa: S311 - a simulation
    return [
        StepRecord(
            0.0,
            *shape,
            params.step_ms(*shape) * min(exp(params.noise * chance.gauss()) for _ in range(2)),
        )
        for shape in decodes + chunks
    ]


def profile(records: list[StepRecord]) -> StepTimes:
    """The step model that a worker starts with."""
    times = StepTimes()
    times.set_profile(records)
    return times


def first_cap(times: StepTimes, slo: Slo, ceiling: int) -> int:
    """The cap that a worker's start-up profile predicts."""
    if times.model is None or slo.itl_ms is None:
        return ceiling
    return predicted_cap(
        times.model,
        times.model.resid_q,
        itl_ms=slo.itl_ms,
        kv_per_seq=DEFAULT_MEAN_LENGTH,
        ceiling=ceiling,
    )
