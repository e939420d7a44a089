"""One token per row: greedy, or by temperature with noise that the request's seed decides."""

from dataclasses import dataclass

import torch
from torch import Tensor

GREEDY_BELOW = 1e-5
"""Temperatures under this are greedy, as in vLLM: dividing by them would overflow."""


@dataclass(frozen=True, slots=True)
class Draw:
    """How one row is sampled. `index`: position of the token in its sequence.

    Noise depends on seed and index alone: recomputing a preempted sequence draws the same again.
    """

    temperature: float
    seed: int
    index: int
    forbidden: tuple[int, ...] = ()


def sample(logits: Tensor, draws: list[Draw], generator: torch.Generator) -> list[int | None]:
    """A token per row of logits [num_rows, vocab_size] float32; None where they are not finite.

    `generator` is on the logits' device; it is reseeded for each row that needs noise.
    """
    for row, draw in enumerate(draws):
        forbidden = [token for token in draw.forbidden if 0 <= token < logits.shape[1]]
        if forbidden:
            logits[row, forbidden] = float("-inf")
    best, tokens = logits.max(dim=-1)
    finite = torch.isfinite(best).tolist()  # the largest of a row with a NaN is NaN
    chosen: list[int] = tokens.tolist()
    for row, draw in enumerate(draws):
        if draw.temperature >= GREEDY_BELOW and finite[row]:
            chosen[row] = _draw(logits[row], draw, generator)
    return [token if ok else None for token, ok in zip(chosen, finite, strict=True)]


def _draw(logits: Tensor, draw: Draw, generator: torch.Generator) -> int:
    """Gumbel's trick: the argmax of p / Exp(1) is distributed as p, without a sort or a sum."""
    # Odd multiplier of splitmix64: neighbouring positions get unrelated streams.
    generator.manual_seed((draw.seed + 0x9E3779B97F4A7C15 * (draw.index + 1)) & (1 << 63) - 1)
    noise = torch.empty_like(logits).exponential_(generator=generator)
    probabilities = torch.softmax(logits / draw.temperature, dim=-1)
    return int((probabilities / noise).argmax())
