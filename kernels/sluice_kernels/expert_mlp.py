"""A mixture of experts, each a gated MLP over the tokens that chose it: the plain reference."""

from collections.abc import Sequence

import torch
from torch import Tensor

from .interface import Projection
from .waiting import reached


def expert_mlp(
    rows: Tensor,
    experts: Tensor,
    shares: Tensor,
    gate_up: Sequence[Projection],
    down: Sequence[Projection],
) -> Tensor:
    """The sum of each token's experts by their shares: [num_tokens, hidden_size].

    rows [num_tokens, hidden_size]; experts int64 and shares, both [num_tokens, per_token]; gate_up,
    which comes gated, and down: each expert's layers.
    Tokens are grouped by expert, so an expert's weights are read once. Weights of experts that no
    token chose are not read.
    """
    chosen = experts.flatten()
    order = chosen.argsort(stable=True)
    tokens = order // experts.shape[1]
    parts = shares.flatten()[order].to(rows.dtype).unsqueeze(1)
    out = torch.zeros_like(rows)
    begin = 0
    for expert, count in enumerate(_counts(chosen, len(down))):
        if count == 0:
            continue
        end = begin + count
        result = down[expert](gate_up[expert](rows[tokens[begin:end]]))
        out.index_add_(0, tokens[begin:end], result.mul_(parts[begin:end]))
        begin = end
    return out


def _counts(chosen: Tensor, num_experts: int) -> list[int]:
    """How often each expert is in `chosen` [n]; the host waits for a GPU once, and sleeps."""
    # torch.bincount would wait twice more, for the least and the largest value.
    counts = chosen.new_zeros(num_experts).scatter_add_(0, chosen, torch.ones_like(chosen))
    if counts.is_cuda:
        reached().synchronize()
    found: list[int] = counts.tolist()
    return found
