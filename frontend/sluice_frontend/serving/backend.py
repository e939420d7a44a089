"""The engine behind a frontend, as the frontend sees it: our own process, or a foreign server."""

import asyncio
from typing import Protocol

from sluice_core.errors import SluiceError
from sluice_core.wire import (
    EngineLimits,
    Finished,
    Heartbeat,
    Ready,
    Scores,
    StepReport,
    TokenOut,
)


class Sink(Protocol):
    """Takes one sequence's tokens."""

    def token(self, token: TokenOut, *, at_cap: bool, is_long: bool, now_s: float) -> None:
        """A token; the last one carries a finish reason and nothing follows it. `at_cap`,
        `is_long`: of its step, as in `StepReport`."""

    def prompt(self, scores: Scores) -> None:
        """Log-probabilities of the prompt's next tokens; all come before the first token."""

    def ended(self, error: SluiceError) -> None:
        """The sequence ended without a token; nothing follows."""


class Listener(Protocol):
    """Takes news of the engine as a whole. `now_s`: monotonic seconds at receipt."""

    def ready(self, ready: Ready) -> None:
        """The engine serves."""

    def step(self, report: StepReport, now_s: float) -> None:
        """A step was made; its tokens go to their sinks after this."""

    def state(self, message: Finished | Heartbeat) -> None:
        """A message with a newer snapshot."""


class Backend(Protocol):
    """One engine, as limits, admission and the admin port see it; its routes know its real class.

    All methods belong to the event loop's thread; sending methods raise EngineDied once it is gone.
    """

    @property
    def ready(self) -> Ready | None:
        """The engine's report of itself; None before it serves."""

    @property
    def closed(self) -> asyncio.Event:
        """Set once the engine is gone."""

    @property
    def num_open(self) -> int:
        """Sequences that were submitted and have not ended."""

    def fail(self, request_id: str, error: SluiceError) -> None:
        """End a sequence from this side; its sink is told."""

    def drop(self, request_id: str, error: SluiceError) -> None:
        """End a sequence that has not begun; one that has goes on. The engine knows which it is."""

    def fail_all(self, error: SluiceError) -> None:
        """End every open sequence."""

    def configure(self, limits: EngineLimits) -> None:
        """Change the live limits: the engine's own, or of the queue before it."""

    async def check_integrity(self) -> str | None:
        """None, or a sentence about the fault in the engine's memory.

        Raises Unavailable if the engine is gone, or too busy to answer in time.
        """
