"""Times as the API server writes them. Pure."""

from datetime import datetime


def unix_time(stamp: str | None) -> float:
    """Unix time of an API server's timestamp; 0 for None."""
    if not stamp:
        return 0.0
    return datetime.fromisoformat(stamp).timestamp()
