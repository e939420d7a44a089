"""Those that wait and can no longer have their first token in time are dropped. Pure."""

from sluice_core.errors import DeadlineUnreachable, Shed

from ..evidence.recorder import Recorder
from .backend import Backend
from .forecast import forecast_for, retry_after_s
from .limits import Live


def shed(
    backend: Backend, recorder: Recorder, live: Live, now_s: float, *, is_moving: bool
) -> None:
    """Drop the hopeless of `recorder`. `is_moving`: the engine makes progress: it knows which have
    begun, and spares them. One that hangs will not say."""
    hopeless = recorder.hopeless(now_s, live.shed_ms)
    if not hopeless:
        return
    first = hopeless[0]
    forecast = forecast_for(
        recorder,
        live,
        backend.num_open,
        priority=first.priority,
        ttft_ms=first.ttft_ms,
        prompts=[first.num_prompt_tokens],
        arrival_s=now_s,
        now_s=now_s,
    )
    end = backend.drop if is_moving else backend.fail
    for flight in hopeless:
        kind = Shed if flight.ttft_ms is None else DeadlineUnreachable
        error = kind(
            "the first token can no longer come within the target of "
            f"{flight.ttft_ms or live.slo.ttft_ms:g} ms, so the request was dropped",
            retry_after_s=retry_after_s(forecast.wait_s(1)),
        )
        end(flight.request_id, error)
