"""The tokens and late gaps of requests that decode, as vLLM's steps end. Pure; Unix time."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from sluice_core.law import Gaps
from sluice_core.port import EngineLimits

from .order import due_s

UNKNOWN = Gaps(0, 0, is_in_time=False, first_s=0.0)


@dataclass(slots=True)
class _Tokens:
    """Of one request. `last_s`: when its newest token came."""

    num_made: int
    num_late: int
    is_in_time: bool
    first_s: float
    last_s: float


class GapBook:
    """What is known of each request with a token. Where steps overlap, it is a step behind."""

    def __init__(self) -> None:
        self._known: dict[str, _Tokens] = {}

    def __len__(self) -> int:
        return len(self._known)

    def of(self, request_id: str) -> Gaps:
        """Its gaps so far."""
        known = self._known.get(request_id)
        if known is None:
            return UNKNOWN
        return Gaps(known.num_made, known.num_late, known.is_in_time, known.first_s)

    def book(
        self, ids: Iterable[str], requests: Mapping[str, Any], now_s: float, limits: EngineLimits
    ) -> None:
        """Book a step of the requests `ids`. `requests`: by id, without those that ended."""
        for request_id in ids:
            request = requests.get(request_id)
            if request is None:
                self._known.pop(request_id, None)
            elif request.num_output_tokens:
                self._book(request, now_s, limits)
        if len(self._known) > len(requests):  # aborted ones end in no step
            self._known = {name: known for name, known in self._known.items() if name in requests}

    def _book(self, request: Any, now_s: float, limits: EngineLimits) -> None:
        known, num_made = self._known.get(request.request_id), request.num_output_tokens
        if known is None:
            is_in_time = now_s <= due_s(request, limits)
            self._known[request.request_id] = _Tokens(num_made, 0, is_in_time, now_s, now_s)
        elif num_made > known.num_made:
            gap_ms = 1e3 * (now_s - known.last_s)
            known.num_late += limits.itl_ms is not None and gap_ms > limits.itl_ms
            known.num_made, known.last_s = num_made, now_s
