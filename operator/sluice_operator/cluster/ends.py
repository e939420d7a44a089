"""How a pod's container ended: which process, by which signal or exit code, and when. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sluice_core.bounded import count
from sluice_core.errors import signal_name, timestamp
from sluice_core.words import clean

from ..reasons import Foreign, Reason
from ..times import unix_time

_OF_SIGNALS = 128
"""A process that a signal ends gives its container this exit code plus the signal's number."""
_MAX_WORDS = 300


@dataclass(frozen=True, slots=True)
class Ended:
    """The last end of one container. `words`: its own message, if any; `at_s`: Unix time;
    `restarts`: all restarts of that container, for any reason."""

    container: str
    is_for_memory: bool
    exit_code: int
    words: str
    at_s: float
    restarts: int

    @property
    def reason(self) -> Reason | Foreign:
        """The reason for a container that starts again after this end."""
        return Foreign("OOMKilled") if self.is_for_memory else Reason.RESTARTING

    @property
    def sentence(self) -> str:
        """A clause about the pod: `its container ...`."""
        restarts = f"{self.restarts} restart{'s' if self.restarts != 1 else ''} in all"
        said = f": {self.words}" if self.words else ""
        return f"its container {self.container} {self._how} ({restarts}){said}"

    @property
    def _how(self) -> str:
        when = timestamp(self.at_s)
        if self.is_for_memory:
            return f"was killed for memory at {when}"
        if self.exit_code > _OF_SIGNALS:
            return f"was ended by {signal_name(self.exit_code - _OF_SIGNALS)} at {when}"
        return f"ended with exit code {self.exit_code} at {when}"


def last_end(container: Mapping[str, Any]) -> Ended | None:
    """The last end in an entry of a pod's `containerStatuses`; None before any end."""
    ended = (container.get("state") or {}).get("terminated") or (
        container.get("lastState") or {}
    ).get("terminated")
    if not ended:
        return None
    code = count(ended.get("exitCode")) or 0
    return Ended(
        container=clean(str(container.get("name") or "worker")),
        is_for_memory=ended.get("reason") == "OOMKilled",
        exit_code=code,
        # A killed process writes no last words; the kubelet then gives the end of its log.
        words="" if code > _OF_SIGNALS else _words(str(ended.get("message") or "")),
        at_s=unix_time(ended.get("finishedAt")),
        restarts=count(container.get("restartCount")) or 0,
    )


def _words(message: str) -> str:
    """Its sentences, without log events (JSON) and without the tail of an event that was cut."""
    lines = (line.strip() for line in message.splitlines())
    plain = [line for line in lines if not (line.startswith("{") or line.endswith("}"))]
    return clean(" ".join(" ".join(plain).split()), _MAX_WORDS)
