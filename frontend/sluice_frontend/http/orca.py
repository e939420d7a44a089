"""The load as a response header, for gateways that ask for it (ORCA, as vLLM answers). Pure."""

from collections.abc import Mapping

import msgspec

ASKED_BY = "endpoint-load-metrics-format"
HEADER = "endpoint-load-metrics"


def load_report(wanted: str, load: Mapping[str, float]) -> str | None:
    """`load` as TEXT or JSON; None if nothing, or no known form, is `wanted`."""
    match wanted.upper():
        case "TEXT":
            pairs = (f"named_metrics.{name}={value}" for name, value in load.items())
            return "TEXT " + ", ".join(pairs)
        case "JSON":
            return "JSON " + msgspec.json.encode({"named_metrics": dict(load)}).decode()
    return None
