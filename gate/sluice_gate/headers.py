"""Headers on their way through the gate: what belongs to one connection ends here. Pure."""

from starlette.datastructures import Headers

HOP_BY_HOP = frozenset(
    (
        *("connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "te"),
        *("trailer", "transfer-encoding", "upgrade", "content-length", "host", "accept-encoding"),
        *("date", "server", "expect"),
    )
)
"""Headers of one connection (RFC 9110, 7.6.1), and those that each server writes itself."""


def for_engine(headers: Headers, request_id: str, has_keys: bool) -> list[tuple[str, str]]:
    """A client's headers for the engine. `has_keys`: Authorization is for the gate, and the
    engine, which others made, does not see the key."""
    dropped = HOP_BY_HOP | {"x-request-id"} | ({"authorization"} if has_keys else set())
    for value in headers.getlist("connection"):
        dropped |= {name.strip().lower() for name in value.split(",")}
    kept = [(name, value) for name, value in headers.items() if name not in dropped]
    # Compressed answers could not be counted.
    return [*kept, ("accept-encoding", "identity"), ("x-request-id", request_id)]
