"""Times as the API server and a status write them. Pure."""

from datetime import datetime

from sluice_core.bounded import number


def unix_time(stamp: str | None) -> float:
    """Unix time of an API server's timestamp; 0 for None."""
    if not stamp:
        return 0.0
    return datetime.fromisoformat(stamp).timestamp()


def milliseconds(text: str | None) -> float | None:
    """A status field such as `"123ms"` or `"1.5s"` in milliseconds; None if it is no time."""
    if not text:
        return None
    if text.endswith("ms"):
        return number(text[:-2])
    seconds = number(text.removesuffix("s"))
    return None if seconds is None else 1000 * seconds
