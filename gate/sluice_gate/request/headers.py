"""Headers on their way through the gate: what belongs to one connection ends here. Pure."""

from collections.abc import Iterable

from starlette.datastructures import Headers

_CONNECTION = frozenset(
    (
        *("connection", "keep-alive", "proxy-connection", "te", "trailer", "upgrade"),
        "transfer-encoding",
    )
)
"""Headers of one connection (RFC 9110, 7.6.1)."""
_ASKED = _CONNECTION | {
    *("proxy-authorization", "content-length", "host", "accept-encoding", "expect"),
    "x-request-id",
}
"""Those of a request that are for the gate, or that it writes itself."""
_ANSWERED = frozenset(name.encode() for name in _CONNECTION | {"date"})
"""Those of an answer; uvicorn writes a date into each."""


def for_engine(headers: Headers, request_id: str, has_keys: bool) -> list[tuple[str, str]]:
    """A client's headers for the engine. `has_keys`: Authorization is for the gate, and the
    engine, which others made, does not see the key."""
    dropped = _ASKED | ({"authorization"} if has_keys else set())
    for value in headers.getlist("connection"):
        dropped |= {name.strip().lower() for name in value.split(",")}
    kept = [(name, _text(value)) for name, value in headers.items() if name not in dropped]
    # Compressed answers could not be counted.
    return [*kept, ("accept-encoding", "identity"), ("x-request-id", request_id)]


def _text(value: str) -> str:
    """A value that goes out as UTF-8, which it was if it can be read so."""
    try:
        return value.encode("latin-1").decode()
    except UnicodeDecodeError:
        return value


def from_engine(raw: Iterable[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    """An engine's headers for the client."""
    lower = [(name.lower(), value) for name, value in raw]
    named = b",".join(value for name, value in lower if name == b"connection").lower()
    dropped = _ANSWERED.union(name.strip() for name in named.split(b","))
    return [(name, value) for name, value in lower if name not in dropped]
