"""Live Jobs and the last words of their pods, read into frozen values. Pure."""

from dataclasses import dataclass

from sluice_core.bounded import count
from sluice_core.contract import BatchReport, decode
from sluice_core.words import clean

from .ends import Ended, last_end
from .observed import SHARD_LABEL, Object

_MAX_SHARD = 1 << 20


@dataclass(frozen=True, slots=True)
class JobView:
    """A Job's own account. `failure`: its reason and message, None while it has not failed;
    `is_suspended`: as its spec says; `num_done`: pods that have ended well; `num_ended`: all that
    have ended."""

    is_complete: bool = False
    failure: tuple[str, str] | None = None
    is_suspended: bool = False
    num_done: int = 0
    num_ended: int = 0


@dataclass(frozen=True, slots=True)
class ShardEnd:
    """How a pod of a shard ended. `report`: its last word; None where it left none."""

    shard: int
    ended: Ended
    report: BatchReport | None


def job_of(body: Object) -> JobView:
    """Read a live Job."""
    status = body.get("status") or {}
    met = {c["type"]: c for c in status.get("conditions") or () if c.get("status") == "True"}
    failed = met.get("Failed")
    num_done = count(status.get("succeeded")) or 0
    return JobView(
        is_complete="Complete" in met,
        failure=(str(failed.get("reason")), clean(str(failed.get("message")))) if failed else None,
        is_suspended=bool(body.get("spec", {}).get("suspend")),
        num_done=num_done,
        num_ended=num_done + (count(status.get("failed")) or 0),
    )


def shard_of(body: Object) -> int | None:
    """The number of a pod's shard; None if it has none."""
    return count((body["metadata"].get("labels") or {}).get(SHARD_LABEL), _MAX_SHARD)


def shard_end_of(body: Object, container: str) -> ShardEnd | None:
    """How the `container` of a pod ended; None where it never ran, or is of no shard."""
    shard = shard_of(body)
    for entry in (body.get("status") or {}).get("containerStatuses") or ():
        if entry.get("name") == container and shard is not None and (ended := last_end(entry)):
            terminated = (entry.get("state") or {}).get("terminated") or {}
            return ShardEnd(shard, ended, _report(str(terminated.get("message") or "")))
    return None


def _report(message: str) -> BatchReport | None:
    try:
        return decode(message.encode(), BatchReport)
    except (ValueError, RecursionError):  # killed: the kubelet gives the end of its log
        return None
