"""What is told as Kubernetes events: only changes, each once, under stable reasons. Pure."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from .children import digest
from .observed import Object, timestamp
from .settings import FIELD_MANAGER
from .spec import API_VERSION, KIND

_MAX_MESSAGE = 1024
"""The API server's own limit."""


@dataclass(frozen=True, slots=True)
class Notice:
    """One event to post. `key`: two with the same key are one, also across restarts."""

    warning: bool
    reason: str
    message: str
    key: str


_GOOD = {"Ready": "True", "ModelFits": "True", "SLOMet": "True", "SLOFeasible": "True"}
_QUIET = frozenset({"Starting", "NoPods"})
"""Reasons that are the course of things."""
_TOLD = {**_GOOD, "MetricsAvailable": "True", "Stalled": "False"}


def transitions(previous: Object, status: Object) -> Iterator[Notice]:
    """An event for each condition that turned, or that turned bad for another reason."""
    before = {entry["type"]: entry for entry in previous.get("conditions") or ()}
    for entry in status["conditions"]:
        kind, old = entry["type"], before.get(entry["type"], {})
        if kind not in _TOLD or entry["status"] == "Unknown" or entry["reason"] in _QUIET:
            continue
        bad = entry["status"] != _TOLD[kind]
        turned = old.get("status") != entry["status"] and (bad or "status" in old)
        if turned or (bad and old.get("reason") != entry["reason"]):
            key = f"{kind}/{entry['status']}/{entry['reason']}/{entry['lastTransitionTime']}"
            text = f"{kind}={entry['status']}: {entry['message']}".removesuffix(": ")
            yield Notice(bad, entry["reason"], text, key)


def manifest(meta: Object, notice: Notice, now: float) -> dict[str, Any]:
    """`notice` on the object with metadata `meta`, under a name that its key decides."""
    name = f"{meta['name']}.{digest([meta['uid'], notice.reason, notice.key])}"
    return {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {"name": name, "namespace": meta["namespace"]},
        "involvedObject": {
            "apiVersion": API_VERSION,
            "kind": KIND,
            "name": meta["name"],
            "namespace": meta["namespace"],
            "uid": meta["uid"],
        },
        "type": "Warning" if notice.warning else "Normal",
        "reason": notice.reason,
        "message": notice.message[:_MAX_MESSAGE],
        "source": {"component": FIELD_MANAGER},
        "reportingComponent": FIELD_MANAGER,
        "reportingInstance": FIELD_MANAGER,
        "firstTimestamp": timestamp(now),
        "lastTimestamp": timestamp(now),
        "count": 1,
    }
