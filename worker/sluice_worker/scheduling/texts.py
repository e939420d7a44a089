"""Texts and images that wait for a step, and which of them the next one takes. Pure.

A step takes the oldest text and those of the nearest lengths, within the cap and the token budget:
texts of one length share an attention. Once the oldest has waited `AGE_S`, age alone decides, so
that none waits for ever. A text over the budget goes alone.
"""

from collections.abc import Iterable, Sequence
from heapq import nsmallest
from itertools import islice
from typing import NamedTuple

from sluice_core.port import EngineLimits

AGE_S = 0.5
"""Seconds of waiting from which on a text is taken before nearer ones."""
LOOK_AHEAD = 4
"""Times the cap: so many of the oldest texts are looked at."""


class WaitingText(NamedTuple):
    """A text as token ids, or an image: then `token_ids` has its number of rows. `num_skipped`,
    `num_second`, `pixels`, `is_background`: as in `wire.Encode`; `came_s`: monotonic seconds."""

    request_id: str
    token_ids: Sequence[int]
    num_skipped: int
    came_s: float
    num_second: int = 0
    pixels: bytes = b""
    is_background: bool = False


class TextQueue:
    """Waiting texts, oldest first. Background texts have the steps for which no other waits."""

    def __init__(self, limits: EngineLimits) -> None:
        self.limits = limits
        self._waiting: dict[str, WaitingText] = {}
        self._background: dict[str, WaitingText] = {}

    @property
    def counts(self) -> tuple[int, int]:
        """How many wait, and how many background ones do."""
        return len(self._waiting), len(self._background)

    def add(self, text: WaitingText) -> None:
        """Let `text` wait."""
        line = self._background if text.is_background else self._waiting
        line[text.request_id] = text

    def remove(self, request_id: str) -> bool:
        """Forget a text; True if it waited."""
        lines = self._waiting, self._background
        return any(line.pop(request_id, None) is not None for line in lines)

    def take(self, now_s: float) -> list[WaitingText]:
        """The texts of the next step, the shorter before the longer."""
        line = self._waiting or self._background
        chosen = list(self._chosen(line.values(), now_s))
        for text in chosen:
            del line[text.request_id]
        return sorted(chosen, key=lambda text: len(text.token_ids))

    def _chosen(self, line: Iterable[WaitingText], now_s: float) -> Iterable[WaitingText]:
        cap, left = self.limits.cap, self.limits.max_num_batched_tokens
        looked_at: Sequence[WaitingText] = list(islice(line, LOOK_AHEAD * cap))
        oldest = looked_at[0] if looked_at else None
        if oldest is not None and now_s - oldest.came_s < AGE_S:
            length = len(oldest.token_ids)
            looked_at = nsmallest(
                cap, looked_at, key=lambda t: (abs(len(t.token_ids) - length), t.came_s)
            )
        for num, text in enumerate(looked_at):
            if num and (num == cap or len(text.token_ids) > left):
                break
            left -= len(text.token_ids)
            yield text
