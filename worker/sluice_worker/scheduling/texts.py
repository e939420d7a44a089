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
    `num_second`, `pixels`: as in `wire.Encode`; `came_s`: monotonic seconds."""

    request_id: str
    token_ids: Sequence[int]
    num_skipped: int
    came_s: float
    num_second: int = 0
    pixels: bytes = b""


class TextQueue:
    """Waiting texts, oldest first."""

    def __init__(self, limits: EngineLimits) -> None:
        self.limits = limits
        self._waiting: dict[str, WaitingText] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, text: WaitingText) -> None:
        """Let `text` wait."""
        self._waiting[text.request_id] = text

    def remove(self, request_id: str) -> bool:
        """Forget a text; True if it waited."""
        return self._waiting.pop(request_id, None) is not None

    def take(self, now_s: float) -> list[WaitingText]:
        """The texts of the next step, the shorter before the longer."""
        oldest = next(iter(self._waiting.values()), None)
        if oldest is None:
            return []
        chosen = list(self._chosen(oldest, now_s))
        for text in chosen:
            del self._waiting[text.request_id]
        return sorted(chosen, key=lambda text: len(text.token_ids))

    def _chosen(self, oldest: WaitingText, now_s: float) -> Iterable[WaitingText]:
        cap, left = self.limits.cap, self.limits.max_num_batched_tokens
        looked_at: Iterable[WaitingText] = islice(self._waiting.values(), LOOK_AHEAD * cap)
        if now_s - oldest.came_s < AGE_S:
            length = len(oldest.token_ids)
            looked_at = nsmallest(
                cap, looked_at, key=lambda t: (abs(len(t.token_ids) - length), t.came_s)
            )
        for num, text in enumerate(looked_at):
            if num and (num == cap or len(text.token_ids) > left):
                break
            left -= len(text.token_ids)
            yield text
