"""Write the keys and values of a step's tokens into their slots of the paged cache."""

from torch import Tensor


def store_kv(cache: Tensor, kv: Tensor, blocks: Tensor, slots: Tensor) -> None:
    """Store in place.

    cache [num_blocks, 2, num_kv_heads, block_size, head_dim]; kv [num_tokens, 2, num_kv_heads,
    head_dim]; blocks, slots [num_tokens] int64, the block of each token and its place in it.
    """
    cache[blocks, :, :, slots] = kv
