"""Numbers of others become bounded values here, and nowhere else. Pure.

An engine, a socket, a metrics page or a header may say NaN, -1 or 2^62. A `msgspec` type with one
of these annotations refuses such a number with its whole message. Where one bad number must not
cost the rest of an answer, the field is `Any`, and `Numbers` reads it.
"""

from collections import Counter
from math import isfinite
from typing import Annotated

from msgspec import Meta

MAX_COUNT = 1 << 53
"""Most of what is counted over a process's life: a float and every JSON parser has it exactly."""
MAX_TOKENS = 1 << 30
"""Most tokens, sequences or blocks of one message. A tick adds them up: of eight million messages
the sum is still a `Count`."""
MAX_NUMBER = 1e12
"""Far above any measured value; sums and differences of such values stay finite."""
MAX_STEP_S = 1e6
"""Most seconds of one step. A tick adds them up: of a million steps the sum is in bounds."""

Count = Annotated[int, Meta(ge=0, le=MAX_COUNT)]
Positive = Annotated[int, Meta(ge=1, le=MAX_COUNT)]
Tokens = Annotated[int, Meta(ge=0, le=MAX_TOKENS)]
NonNegative = Annotated[float, Meta(ge=0, le=MAX_NUMBER)]
Finite = Annotated[float, Meta(ge=-MAX_NUMBER, le=MAX_NUMBER)]
Seconds = NonNegative
Share = Annotated[float, Meta(ge=0, le=1)]
StepSeconds = Annotated[float, Meta(ge=0, le=MAX_STEP_S)]


def count(value: object, most: int = MAX_COUNT) -> int | None:
    """`value` as a whole number of at most `most`, also as digits; None if it is none."""
    if isinstance(value, str):
        is_short = len(value) <= len(str(most))  # Python refuses more than 4,300 digits
        value = int(value) if is_short and value.isascii() and value.isdigit() else None
    elif isinstance(value, float):
        value = int(value) if value.is_integer() else None
    if isinstance(value, bool) or not isinstance(value, int):
        return None
    return value if 0 <= value <= most else None


def number(value: object, most: float = MAX_NUMBER) -> float | None:
    """`value`, or the number that it spells, from 0 to `most`; None if it is none."""
    try:
        found = float(value) if isinstance(value, str | int | float) else -1.0
    except (ValueError, OverflowError):  # a word; an integer that no float holds
        return None
    is_one = isfinite(found) and 0 <= found <= most and not isinstance(value, bool)
    return found if is_one else None


class Numbers:
    """Reads the numbers of one `source`. What it cannot use is left out, and counted in
    `unreadable` under the source's name."""

    def __init__(self, source: str, unreadable: Counter[str]) -> None:
        self._source, self._unreadable = source, unreadable

    def count(self, value: object, most: int = MAX_TOKENS) -> int | None:
        """As `count`; None is not told, which is nothing to count."""
        if type(value) is int and 0 <= value <= most:  # the usual case, once a token
            return value
        found = count(value, most)
        if found is None and value is not None:
            self.leave_out()
        return found

    def number(self, value: object, most: float = MAX_NUMBER) -> float | None:
        """As `number`; None is not told, which is nothing to count."""
        found = number(value, most)
        if found is None and value is not None:
            self.leave_out()
        return found

    def leave_out(self) -> None:
        """Count a whole message that was left out."""
        self._unreadable[self._source] += 1
