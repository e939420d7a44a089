"""Times as the API server writes them. Pure."""

from datetime import UTC, datetime


def unix_time(stamp: str | None) -> float:
    """Unix time of an API server's timestamp; 0 for None."""
    if not stamp:
        return 0.0
    return datetime.fromisoformat(stamp).timestamp()


def timestamp(now: float) -> str:
    """Unix time as the API server writes it."""
    return datetime.fromtimestamp(int(now), UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
