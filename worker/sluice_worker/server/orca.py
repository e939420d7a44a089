"""The load as a response header, for gateways that ask for it (ORCA, as vLLM answers). Pure."""

from collections.abc import Mapping

import msgspec

ASKED_BY = b"endpoint-load-metrics-format"


def load_headers(wanted: bytes | None, load: Mapping[str, float]) -> list[tuple[bytes, bytes]]:
    """The header with `load` as TEXT or JSON; none if nothing, or no known form, is `wanted`."""
    match (wanted or b"").upper():
        case b"TEXT":
            pairs = (f"named_metrics.{name}={value}" for name, value in load.items())
            report = "TEXT " + ", ".join(pairs)
        case b"JSON":
            report = "JSON " + msgspec.json.encode({"named_metrics": dict(load)}).decode()
        case _:
            return []
    return [(b"endpoint-load-metrics", report.encode())]
