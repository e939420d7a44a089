"""One token per row of logits, on the device: the likeliest, or one drawn by Gumbel noise.

The largest of logit / temperature + noise is a draw from the softmax, also from the rest of it
after unlikely tokens are cut off. The noise is Philox of a row's seed and the token, so a draw
depends on its own row and seed alone.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .common import runs_kernel, softcapped
from .cut import Draws, bent, cut

BLOCK = 4096


@triton.jit
def gumbel(seed, columns):
    """Independent noise for each column: minus the logarithm of an exponential wait."""
    uniform = tl.maximum(tl.rand(seed, columns), 2.0e-10)
    # -log(1 - u) as a series where float32 would round 1 - u, which is where maxima come from.
    return -tl.log(tl.where(uniform < 1.0e-3, uniform * (1 + uniform / 2), -tl.log(1 - uniform)))


@triton.jit
def _choose(
    logits, floors, temperatures, seeds, best, tokens, width, row_stride, softcap,
    HAS_SOFTCAP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    columns = part * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    x = tl.load(logits + row * row_stride + columns, mask=inside, other=0.0).to(tl.float32)
    is_kept = inside & (x >= tl.load(floors + row))
    x = bent(x, softcap, HAS_SOFTCAP)
    is_broken = tl.max((inside & (x != x)).to(tl.int32), 0) > 0
    temperature = tl.load(temperatures + row)
    if temperature > 0:
        x = x / temperature + gumbel(tl.load(seeds + row), columns)
    x = tl.where(is_kept, x, -float("inf"))
    highest = tl.max(x, 0)
    # The first of equals, as torch takes it.
    token = tl.min(tl.where(x == highest, columns, width), 0)
    at = row * tl.num_programs(1) + part
    tl.store(best + at, tl.where(is_broken, float("nan"), highest))
    tl.store(tokens + at, token.to(tl.int64))


def choose(logits: Tensor, draws: Draws, softcap: float | None = None) -> Tensor:
    """Returns int64 [num_rows], -1 if the best logit is not finite or one is NaN.

    logits [num_rows, width] of any floating dtype; `softcap` is applied first. `draws` has a seed
    for each row and place in its sequence.
    """
    floors = cut(logits, draws, softcap)
    if not runs_kernel(logits):
        return reference(logits, floors, draws, softcap)
    num_rows, width = logits.shape
    parts = -(-width // BLOCK)
    best = logits.new_empty(num_rows, parts, dtype=torch.float32)
    tokens = draws.seeds.new_empty(num_rows, parts)
    _choose[num_rows, parts](
        logits, floors, draws.temperatures, draws.seeds, best, tokens,
        width, logits.stride(0), softcap or 1.0, **choose_constants(softcap is not None),
    )  # fmt: skip
    highest, part = best.max(dim=1, keepdim=True)  # NaN where one is
    return torch.where(highest.isfinite(), tokens.gather(1, part), -1).squeeze(1)


def choose_constants(has_softcap: bool) -> dict[str, int]:
    """Compile-time constants of the kernel."""
    return {"HAS_SOFTCAP": has_softcap, "BLOCK": BLOCK, "num_warps": 8}


def reference(logits: Tensor, floors: Tensor, draws: Draws, softcap: float | None) -> Tensor:
    """The same distribution, with other noise than the kernel's."""
    scores = logits.to(torch.float32, copy=True)
    is_out = scores < floors[:, None]  # no NaN is
    scores = softcapped(scores, softcap)
    for row, temperature in enumerate(draws.temperatures.tolist()):
        if temperature > 0:
            noise = torch.Generator().manual_seed(int(draws.seeds[row]))
            gumbel = -torch.empty(scores.shape[1]).exponential_(generator=noise).log()
            scores[row] = scores[row] / temperature + gumbel.to(scores.device)
    scores.masked_fill_(is_out, -float("inf"))
    highest, tokens = scores.max(dim=1)
    return torch.where(highest.isfinite(), tokens, -1)
