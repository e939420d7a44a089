"""Tokens of a prompt whose text is all that the gate has. Pure.

An estimate orders and forecasts. Only the engine knows the number, and says "too long".
"""

BYTES_PER_TOKEN = 4
"""Of text, before any answer told better; token ids count as so many bytes each."""
LEAST_BYTES, MOST_BYTES = 0.5, 16
"""Bounds of the mean: a template's own tokens may be more than a short text's bytes, and long words
of large vocabularies have some ten."""
MEMORY_TOKENS = 1 << 15
"""Twice as many lately told tokens make those before them count half."""


class TokenSize:
    """Mean bytes of text per token, learnt from what answers tell of their prompts."""

    def __init__(self) -> None:
        self._bytes, self._tokens = float(BYTES_PER_TOKEN), 1.0

    def learn(self, num_bytes: int, num_tokens: int) -> None:
        """Learn that a prompt of so many bytes was so many tokens, within what engines can do."""
        if num_bytes <= 0 or num_tokens <= 0:
            return
        self._bytes += num_bytes
        self._tokens += _bounded(num_bytes, num_tokens)
        if self._tokens > 2 * MEMORY_TOKENS:
            self._bytes, self._tokens = self._bytes / 2, self._tokens / 2

    def tokens(self, num_bytes: int) -> int:
        """Tokens of a prompt of so many bytes; at least 1."""
        return max(1, round(_bounded(num_bytes, num_bytes * self._tokens / self._bytes)))


def _bounded(num_bytes: int, num_tokens: float) -> float:
    return min(num_bytes / LEAST_BYTES, max(num_bytes / MOST_BYTES, num_tokens))
