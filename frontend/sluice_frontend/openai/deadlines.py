"""A request's own deadlines: body fields, or the headers that load tools send. Pure.

If a request has both, they must agree.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from sluice_core.contract import MAX_MS
from sluice_core.errors import RequestError


@dataclass(frozen=True, slots=True)
class Deadlines:
    """Milliseconds to the first token, and mean per token after it; None: no deadline."""

    ttft_ms: float | None = None
    tpot_ms: float | None = None

    def with_headers(self, headers: Mapping[str, str]) -> "Deadlines":
        """These and those of `headers`; raises RequestError naming the header that is wrong."""
        return Deadlines(
            _merged(self.ttft_ms, headers, "x-slo-ttft-ms"),
            _merged(self.tpot_ms, headers, "x-slo-tpot-ms"),
        )


def _merged(field_ms: float | None, headers: Mapping[str, str], name: str) -> float | None:
    text = headers.get(name)
    if text is None:
        return field_ms
    try:
        header_ms = float(text)
    except ValueError:
        header_ms = 0.0
    if not 0 < header_ms <= MAX_MS:  # NaN is not
        raise RequestError(
            f"{name} must be milliseconds over 0 and at most {MAX_MS:.0f}", param=name
        )
    if field_ms is not None and field_ms != header_ms:
        raise RequestError(f"{name} and the body's field ask for different deadlines", param=name)
    return header_ms
