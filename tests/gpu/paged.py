"""Caches with scattered pages, for the tests of this folder."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@dataclass(frozen=True, slots=True)
class Heads:
    """How a model's heads lie: query heads, key/value heads, their width, slots of a page."""

    num_heads: int
    num_kv_heads: int
    dim: int
    page: int


def paged_cache(
    heads: Heads, lengths: Sequence[int], dtype: torch.dtype, seed: int = 0
) -> tuple[Tensor, Tensor]:
    """Random pages, and int32 tables in which no page is used twice; unused slots hold NaN."""
    generator = torch.Generator().manual_seed(seed)
    pages = max(max(-(-length // heads.page) for length in lengths), 1)
    order = torch.randperm(pages * len(lengths) + 1, generator=generator)[:-1]
    tables = order.view(len(lengths), pages).to(torch.int32)
    size = (len(order) + 1, 2, heads.num_kv_heads, heads.page, heads.dim)
    cache = torch.full(size, float("nan"))
    for table, length in zip(tables, lengths, strict=True):
        places = torch.arange(length)
        kv = torch.randn(length, 2, heads.num_kv_heads, heads.dim, generator=generator)
        cache[table[places // heads.page].long(), :, :, places % heads.page] = kv
    return cache.to(DEVICE, dtype), tables.to(DEVICE)


def queries(heads: Heads, count: int, dtype: torch.dtype) -> Tensor:
    """[count, num_heads, dim], a part of wider rows as it is of a fused projection."""
    rows = torch.randn(count, heads.num_heads + 2 * heads.num_kv_heads, heads.dim)
    return rows.to(DEVICE, dtype)[:, : heads.num_heads]


def on_device(values: Sequence[object] | np.ndarray, dtype: torch.dtype) -> Tensor:
    return torch.as_tensor(np.asarray(values)).to(DEVICE, dtype)


def close(found: Tensor, expected: Tensor) -> None:
    """Equal within the rounding of their dtype."""
    atol = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}[found.dtype]
    torch.testing.assert_close(found, expected, atol=atol, rtol=atol)
