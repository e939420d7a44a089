"""Settings from the environment. vLLM hands its environment on to the engine process."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from sluice_core.contract import MAX_MS


@dataclass(frozen=True, slots=True)
class InnerSettings:
    """`socket`: where a gate listens, if there is one. The rest holds until it sends limits."""

    socket: str | None = None
    itl_ms: float | None = None
    ttft_ms: float | None = None
    hold_share: float = 1.0


def read(environ: Mapping[str, str]) -> InnerSettings:
    """Raises ValueError with a sentence if a target is no time, or the share no share."""
    share = _number("SLUICE_HOLD_SHARE", environ)
    if share is not None and not 0 <= share <= 1:
        given = environ["SLUICE_HOLD_SHARE"]
        raise ValueError(f"SLUICE_HOLD_SHARE must be from 0 to 1, and is {given!r}")
    return InnerSettings(
        environ.get("SLUICE_GATE_SOCKET") or None,
        _milliseconds("SLUICE_ITL_MS", environ),
        _milliseconds("SLUICE_TTFT_MS", environ),
        1.0 if share is None else share,
    )


def _milliseconds(name: str, environ: Mapping[str, str]) -> float | None:
    value = _number(name, environ)
    if value is not None and not 0 < value <= MAX_MS:
        raise ValueError(f"{name} must be milliseconds above 0, and is {environ[name]!r}")
    return value


def _number(name: str, environ: Mapping[str, str]) -> float | None:
    """NaN if it is none."""
    text = environ.get(name)
    if not text:
        return None
    try:
        return float(text)
    except ValueError:
        return math.nan
