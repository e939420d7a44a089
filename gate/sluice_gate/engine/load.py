"""The load that an engine tells in its metrics. Pure."""

import re
from dataclasses import dataclass

from sluice_core.bounded import MAX_COUNT, Numbers
from sluice_core.engines.engine import ForeignEngine

_SAMPLE = re.compile(r"^([A-Za-z_:][\w:]*)(?:\{[^}\n]*\})? (\S+)", re.MULTILINE)
"""Within one line: a bracket that nothing closes must not be looked for to the end of the page."""


@dataclass(frozen=True, slots=True)
class ServerLoad:
    """An engine's own metrics at one moment; None where it shows none."""

    waiting: float | None = None
    kv_usage: float | None = None
    preemptions: float | None = None
    tokens: float | None = None


def load_of(engine: ForeignEngine, text: str, numbers: Numbers) -> ServerLoad:
    """The load in a scrape; samples of one name are summed."""
    wanted = {*engine.waiting, *engine.kv_usage, *engine.preemptions, *engine.tokens}
    values: dict[str, float] = {}
    for name, word in _SAMPLE.findall(text):
        value = numbers.number(word, MAX_COUNT) if name in wanted else None
        if value is not None:
            values[name] = values.get(name, 0.0) + value

    def total(names: tuple[str, ...]) -> float | None:
        found = [values[name] for name in names if name in values]
        return numbers.number(sum(found), MAX_COUNT) if found else None

    return ServerLoad(
        total(engine.waiting),
        total(engine.kv_usage),
        total(engine.preemptions),
        total(engine.tokens),
    )
