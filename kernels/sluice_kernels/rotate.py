"""Turn queries and keys by their positions: the plain reference."""

import torch
from torch import Tensor


def rotate_(heads: Tensor, turns: Tensor) -> None:
    """Rotate in place: heads [num_tokens, num_heads, head_dim], neighbours one complex number.

    turns complex64 [num_tokens, 1, head_dim / 2].
    """
    # A copy only where the dtype is not float32.
    pairs = heads.float().view(*heads.shape[:-1], -1, 2)
    turned = torch.view_as_complex(pairs).mul_(turns)
    if heads.dtype != torch.float32:
        heads.copy_(torch.view_as_real(turned).flatten(-2))
