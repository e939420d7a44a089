"""Bounds of a request: the room in the queue, the time that it has. Pure."""

from sluice_core.contract import SchedulingPolicy
from sluice_core.errors import RequestError
from sluice_core.port import EngineLoad
from sluice_core.work import Deadlines

from .forecast import Forecast


def check_priority(priority: int, policy: SchedulingPolicy) -> None:
    """Raise for a priority that would be ignored, as vLLM does."""
    if priority and policy == "fcfs":
        raise RequestError(
            f"priority {priority} would have no effect: the scheduling policy is fcfs",
            param="priority",
        )


def num_waiting(num_open: int, cap: int, state: EngineLoad) -> int:
    """Number of waiting sequences, with those that the engine has not reported yet."""
    return max(0, num_open - cap, state.waiting)


def is_full(num_new: int, num_open: int, cap: int, state: EngineLoad, limit: int) -> bool:
    """True if `num_new` sequences would make more than `limit` wait.

    `num_open`: submitted and not ended. Newcomers wait behind those that wait for memory.
    """
    over_cap = num_open + num_new - cap
    return over_cap > limit or (state.waiting > 0 and state.waiting + num_new > limit)


def unreachable(
    deadlines: Deadlines,
    default_ttft_ms: float | None,
    forecast: Forecast,
    num_new: int,
    *,
    age_ms: float,
    prefill_ms: float,
) -> tuple[str, float] | None:
    """Why `num_new` sequences that came `age_ms` ago would be late, and the predicted wait in s.

    `prefill_ms`: time of a first token besides waiting. None: they may be in time. With nothing
    open, a prediction refuses nothing, as only admitted requests can correct it.
    """
    wait_s, is_alone = forecast.wait_s(num_new), forecast.num_open == 0
    first_ms = age_ms + 1e3 * wait_s + prefill_ms
    ttft_ms = deadlines.ttft_ms or default_ttft_ms
    if ttft_ms is not None and (age_ms if is_alone else first_ms) > ttft_ms:
        sentence = (
            f"the first token would come after about {first_ms:.0f} ms, "
            f"the deadline is {ttft_ms:g} ms"
        )
        return sentence, wait_s
    tpot_ms = None if is_alone else forecast.tpot_ms(num_new)
    if deadlines.tpot_ms is not None and tpot_ms is not None and tpot_ms > deadlines.tpot_ms:
        sentence = (
            f"a token takes about {tpot_ms:.1f} ms with those that run now, "
            f"the deadline is {deadlines.tpot_ms:g} ms"
        )
        return sentence, max(wait_s, forecast.service_s or 0.0)
    return None
