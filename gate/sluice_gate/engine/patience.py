"""What an engine owes its clients, and how long it may be silent while it computes prompts. Pure.

Until a prompt's first token an engine sends nothing, and most count nothing either: vLLM counts a
prompt when it is computed, llama.cpp, SGLang and TGI count when an answer ends. So silence is
judged by the prompts that are under way, and by what this engine has shown.
"""

from collections.abc import Sequence
from typing import NamedTuple

UNSEEN_S = 0.05
"""Seconds for each token of the longest prompt, as long as the engine has shown nothing: 20 tokens
a second, as of a model of 7 billion parameters on two cores."""
LEAST_S = 0.02
"""The same once it has shown more. Prompts that it had cached show too much speed."""
MARGIN = 4.0
"""Times the slowest that it has shown: attention grows with the square of a prompt."""
MIN_TOKENS = 256
"""Shorter prompts show what a request costs, not what a token does."""
FORGET = 0.99
"""A slow moment, as the compilation of a first request, counts half after 70 more prompts."""
MOST_S = 1800.0


class Owed(NamedTuple):
    """`num_pieces`: moves with each piece of an answer. `is_due`: clients wait for the engine, not
    it for them. `allowance_s`: silence that prompts explain, beyond the timeout."""

    num_pieces: int
    is_due: bool
    allowance_s: float


class Patience:
    """The slowest of late, in seconds of silence per prompt token under way."""

    def __init__(self) -> None:
        self._slowest_s: float | None = None

    def learn(self, silent_s: float, prompts: Sequence[int]) -> None:
        """Learn how long an engine was silent that computed prompts of so many tokens."""
        if (total := sum(prompts)) >= MIN_TOKENS:
            self._slowest_s = max(silent_s / total, FORGET * (self._slowest_s or 0.0))

    def allowance_s(self, prompts: Sequence[int]) -> float:
        """Seconds for which prompts of so many tokens, computed together, explain silence."""
        longest, total = max(prompts, default=0), sum(prompts)
        if self._slowest_s is None:
            return min(MOST_S, UNSEEN_S * longest)
        return min(MOST_S, max(LEAST_S * longest, MARGIN * self._slowest_s * total))
