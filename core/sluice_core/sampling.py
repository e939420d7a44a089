"""How the next token is drawn, as a frontend tells it to our engine. Pure."""

from msgspec import Struct

GREEDY_BELOW = 1e-5
"""Temperatures under this are greedy: dividing by them would overflow."""


class Sampling(Struct, frozen=True, array_like=True):
    """Parameters that change a request's distribution beyond temperature; defaults change nothing.

    `top_k` 0: all. `allowed_token_ids` None: all. `bad_words`: token ids of each spelling.
    `logprobs`, `prompt_logprobs`: likeliest tokens to report beside each; None: report nothing.
    """

    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] = {}
    allowed_token_ids: tuple[int, ...] | None = None
    bad_words: tuple[tuple[int, ...], ...] = ()
    logprobs: int | None = None
    prompt_logprobs: int | None = None

    @property
    def is_plain(self) -> bool:
        """True if only temperature and seed decide, and only token ids are reported."""
        return self == _PLAIN

    @property
    def edits_logits(self) -> bool:
        """True if logits are changed before temperature divides them."""
        return bool(
            self.presence_penalty
            or self.frequency_penalty
            or self.repetition_penalty != 1
            or self.logit_bias
            or self.bad_words
            or self.allowed_token_ids is not None
        )


_PLAIN = Sampling()
