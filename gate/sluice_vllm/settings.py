"""Settings from the environment. vLLM hands its environment on to the engine process."""

from collections.abc import Mapping
from dataclasses import dataclass

from sluice_core.contract import MAX_MS


@dataclass(frozen=True, slots=True)
class Settings:
    """`socket`: where a gate listens, if there is one. Targets hold until it sends others."""

    socket: str | None = None
    itl_ms: float | None = None
    ttft_ms: float | None = None


def read(environ: Mapping[str, str]) -> Settings:
    """Raises ValueError with a sentence if a target is no time."""
    return Settings(
        environ.get("SLUICE_GATE_SOCKET") or None,
        _milliseconds("SLUICE_ITL_MS", environ),
        _milliseconds("SLUICE_TTFT_MS", environ),
    )


def _milliseconds(name: str, environ: Mapping[str, str]) -> float | None:
    text = environ.get(name)
    if not text:
        return None
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value <= MAX_MS:
        raise ValueError(f"{name} must be milliseconds above 0, and is {text!r}")
    return value
