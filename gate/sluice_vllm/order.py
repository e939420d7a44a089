"""The order of vLLM's queue, by deadline. Pure; times are Unix time, as vLLM stamps requests."""

from collections import deque
from collections.abc import Mapping
from typing import Any

from sluice_core.bounded import number
from sluice_core.ordering import Line, Pace, Terms
from sluice_core.port import EngineLimits

OWN_DEADLINE = "sluice_ttft_ms"
"""Key of `vllm_xargs` with a request's own deadline: milliseconds until its first token is due."""
RECENT = 32
"""Number of departures in the mean distance."""


class DeadlineOrder:
    """The waiting requests in the order of `sluice_core.ordering`; preempted ones come first."""

    def __init__(self, limits: EngineLimits) -> None:
        self.limits = limits
        self._line: Line[Any] = Line(self._terms)
        self._known: dict[int, Any] = {}
        self._gone_s, self._num_gone, self._place_s = 0.0, 0, 0.0

    def arrange(self, waiting: deque[Any], now_s: float, price_s: float, num_free: int) -> None:
        """Sort `waiting`, vLLM's requests, in place. `price_s`: seconds per token of a prompt."""
        preempted = [request for request in waiting if request.num_preemptions]
        fresh = {id(request): request for request in waiting if not request.num_preemptions}
        gone = self._known.keys() - fresh.keys()
        self._learn_pace(len(gone), now_s)
        for key in gone:
            self._line.remove(self._known.pop(key))
        for key, request in fresh.items():
            if key not in self._known:
                self._known[key] = request
                self._line.add(request)
        ordered = list(self._line.ordered(now_s, Pace(price_s, self._place_s, num_free)))
        waiting.clear()
        waiting.extend(preempted + ordered)

    def _learn_pace(self, num_gone: int, now_s: float) -> None:
        """While others wait, the distance between departures tells how fast places come."""
        if 0 < num_gone < len(self._known):
            self._num_gone = min(self._num_gone + 1, RECENT)
            self._place_s += ((now_s - self._gone_s) / num_gone - self._place_s) / self._num_gone
        if num_gone or not self._known:
            self._gone_s = now_s

    def _terms(self, request: Any) -> Terms:
        work = request.num_tokens - request.num_computed_tokens
        due = due_s(request, self.limits)
        return Terms(request.priority, due, request.arrival_time, work)


def due_s(request: Any, limits: EngineLimits) -> float:
    """When its first token is due."""
    return limits.due_s(request.arrival_time, own_deadline_ms(request))


def own_deadline_ms(request: Any) -> float | None:
    """The request's own deadline, if it brings one that is a time. Clients write it."""
    extra = getattr(request.sampling_params, "extra_args", None)
    asked = extra.get(OWN_DEADLINE) if isinstance(extra, Mapping) else None
    return number(asked) or None
