"""*Rim*: how long the fuzz lasts: seconds in `make test`, minutes in `make fuzz`."""

import os
import time
from collections.abc import Callable

from hypothesis import HealthCheck, Phase, seed, settings

SECONDS = float(os.environ.get("SLUICE_FUZZ_SECONDS", "4"))
"""Of each test."""
NUM_EXAMPLES = 20
"""In one round. The clock is looked at between rounds."""
_PHASES = (Phase.explicit, Phase.generate)

fuzzed = settings(
    max_examples=NUM_EXAMPLES,
    deadline=None,
    database=None,
    suppress_health_check=list(HealthCheck),
    # Each try to shrink may start a gate anew: only the long form has the time.
    phases=(*_PHASES, Phase.shrink) if SECONDS >= 60 else _PHASES,
)

slow = settings(fuzzed, max_examples=3)
"""For examples that take a second each."""


def spend(holds: Callable[[], None]) -> None:
    """Try rounds of examples until the time is over. With CI=1 they are the same each time."""
    end_s, number = time.monotonic() + SECONDS, 0
    while time.monotonic() < end_s:
        if os.environ.get("CI"):
            seed(number)(holds)
        holds()
        number += 1
