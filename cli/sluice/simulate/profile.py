"""A simulated worker's knowledge at its start: its step model and the cap that it predicts."""

from math import exp
from random import Random

from sluice_core.contract import Slo
from sluice_core.latency import FIRST_CONTEXT, predicted_cap
from sluice_core.steptime import StepRecord, StepTimes

from .params import Params

LONG = 4096
"""Tokens of context before the deepest chunk that is timed."""


def profile_records(params: Params, seed: int) -> list[StepRecord]:
    """The dummy steps of the worker's `startup`: nine, each the quicker of two with their noise."""
    chance = Random(f"profile {seed}")  # noqa: S311 - a simulation
    return [
        StepRecord(
            0.0,
            *shape,
            params.step_ms(*shape) * min(exp(params.noise * chance.gauss()) for _ in range(2)),
        )
        for shape in _shapes(params)
    ]


def _shapes(params: Params) -> list[tuple[int, int, int]]:
    """(decodes, KV tokens, prompt tokens) of each dummy step, as on a CPU or with graphs."""
    decodes = [(1, 32), (8, 32), (8, FIRST_CONTEXT), (32, 32), (1, FIRST_CONTEXT)]
    prompts = [32, 128]
    if params.has_graphs:
        decodes.append((32, 1024))
        prompts.append(1024)
    most = params.max_num_batched_tokens
    chunks = [(0, min(n, most), min(n, most)) for n in prompts]
    if not params.has_graphs:
        chunks += [(0, LONG, min(n, most)) for n in prompts]
    sizes = ((min(n, params.ceiling), context) for n, context in decodes)
    return [(n, n * context, 0) for n, context in sizes] + chunks


def profile(params: Params, records: list[StepRecord]) -> StepTimes:
    """The step model that a worker starts with."""
    times = StepTimes(has_graphs=params.has_graphs)
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
        kv_per_seq=FIRST_CONTEXT,
        ceiling=ceiling,
    )
