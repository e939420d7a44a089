"""The engine behind a frontend, as the frontend sees it: our own process, or a foreign server."""

import asyncio
from typing import Protocol

from sluice_core.errors import SluiceError
from sluice_core.port import EngineFacts, EngineLimits, EngineLoad, EngineStep, Manner


class Listener(Protocol):
    """Takes news of the engine as a whole. `now_s`: monotonic seconds at receipt."""

    def serves(self, facts: EngineFacts) -> None:
        """Report that the engine serves."""

    def step(self, step: EngineStep, load: EngineLoad, now_s: float) -> None:
        """Report a step, after which `load` is the engine's state."""

    def state(self, load: EngineLoad) -> None:
        """Report a newer state, which came without a step."""


class Backend(Protocol):
    """One engine, as limits, admission and the admin port see it; its routes know its real class.

    All methods belong to the event loop's thread; sending methods raise EngineDied once it is gone.
    """

    @property
    def facts(self) -> EngineFacts | None:
        """What the engine says of itself; None before it serves."""

    @property
    def closed(self) -> asyncio.Event:
        """Set once the engine is gone."""

    @property
    def num_open(self) -> int:
        """Sequences that were submitted and have not ended."""

    @property
    def manner(self) -> Manner:
        """How the engine is steered and measured now."""

    def fail(self, request_id: str, error: SluiceError) -> None:
        """End a sequence from this side, and tell its client."""

    def drop(self, request_id: str, error: SluiceError) -> None:
        """End a sequence that has not begun; one that has goes on. The engine knows which it is."""

    def fail_all(self, error: SluiceError) -> None:
        """End every open sequence."""

    def configure(self, limits: EngineLimits) -> None:
        """Change the live limits: the engine's own, or of the queue in front of it."""

    async def check_integrity(self) -> str | None:
        """None, or a sentence about the fault in the engine's memory.

        Raises Unavailable if the engine is gone, or too busy to answer in time.
        """
