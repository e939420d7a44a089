"""A mixture of experts, each a gated MLP over the tokens that chose it: the plain reference."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import linear


def expert_mlp(
    rows: Tensor,
    experts: Tensor,
    shares: Tensor,
    gate_up: Tensor,
    down: Tensor,
    activation: Callable[[Tensor], Tensor],
) -> Tensor:
    """The sum of each token's experts by their shares: [num_tokens, hidden_size].

    rows [num_tokens, hidden_size]; experts int64 and shares, both [num_tokens, per_token]; gate_up
    [num_experts, 2 * width, hidden_size]; down [num_experts, hidden_size, width].
    Tokens are brought together by expert, so that an expert's weights are read once, and those of
    an expert that no token chose not at all.
    """
    chosen = experts.flatten()
    order = chosen.argsort(stable=True)
    tokens = order // experts.shape[1]
    parts = shares.flatten()[order].to(rows.dtype).unsqueeze(1)
    out = torch.zeros_like(rows)
    begin = 0
    for expert, count in enumerate(torch.bincount(chosen, minlength=len(down)).tolist()):
        if count == 0:
            continue
        end = begin + count
        gate, up = linear(rows[tokens[begin:end]], gate_up[expert]).chunk(2, dim=-1)
        result = linear(activation(gate).mul_(up), down[expert])
        out.index_add_(0, tokens[begin:end], result.mul_(parts[begin:end]))
        begin = end
    return out
