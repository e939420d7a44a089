"""What a simulated worker knows as it starts: its step model and the cap that it predicts."""

from sluice_worker.contract import Slo
from sluice_worker.scheduler import MIN_CHUNK_TOKENS
from sluice_worker.sizing import DEFAULT_MEAN_LENGTH
from sluice_worker.steptime import StepRecord, StepTimes, predicted_cap

from .params import Params


def profile_records(params: Params) -> list[StepRecord]:
    """A few dummy steps, as in the worker's `startup`."""
    shapes = ((1, 32), (8, 32), (8, 512), (32, 32), (1, 512))
    decodes = [
        (n, n * context, 0) for n, context in ((min(n, params.ceiling), kv) for n, kv in shapes)
    ]
    largest = params.max_num_batched_tokens
    prefills = [(0, min(n, largest), min(n, largest)) for n in (32, 128, 256)]
    return [StepRecord(0.0, *s, params.step_ms(*s)) for s in decodes + prefills]


def profile(params: Params) -> StepTimes:
    """The step model that a worker starts with."""
    times = StepTimes()
    times.set_profile(profile_records(params))
    return times


def first_cap(times: StepTimes, slo: Slo, ceiling: int) -> int:
    """The cap that a worker's start-up profile predicts."""
    if times.model is None or slo.itl_ms is None:
        return ceiling
    return predicted_cap(
        times.model,
        itl_ms=slo.itl_ms,
        kv_per_seq=DEFAULT_MEAN_LENGTH,
        chunk_tokens=MIN_CHUNK_TOKENS,
        ceiling=ceiling,
    )
