"""The operations of a step on Triton kernels: what runs on a GPU."""

from dataclasses import dataclass

import torch
from torch import Tensor

from ..interface import Activation, GatedLinear, Heads, Projection, Spans
from ..linear import plain_projection
from .add_norm import add_norm
from .decode import Splits, choose_splits, decode
from .gated import gated
from .prefill import cut_tiles, prefill, tile_tokens
from .rotate_store import rotate_store
from .texts import cut_texts, rows_per_tile, text_attention


@dataclass(frozen=True, slots=True)
class LaunchPlan:
    """A step's attention on the device, all int32. The first `len(lengths)` rows are decodes.

    tables [num_seqs, num_pages]; lengths [num_decodes], contexts with the new token; tiles
    [num_tiles, 4] from `cut_tiles`; splits: the parts in which a decode's context is read.
    """

    tables: Tensor
    lengths: Tensor
    tiles: Tensor
    splits: Splits


@dataclass(frozen=True, slots=True)
class TritonKernels:
    """group: query heads for each key/value head. num_processors: multiprocessors of the GPU."""

    group: int
    num_processors: int
    name: str = "triton"

    def projection(
        self, weight: Tensor, bias: Tensor | None, activation: Activation | None, *, narrow: bool
    ) -> Projection:
        linear = plain_projection(weight, bias)
        return linear if activation is None else GatedLinear(linear, activation, gated)

    def round_rows(self, num_rows: int) -> int:
        return num_rows

    def plan(self, spans: Spans, cache: Tensor, windows: tuple[int | None, ...]) -> LaunchPlan:
        counts, starts, device = spans.offsets.diff(), spans.starts, cache.device
        num_decodes = int((counts == 1).sum())
        chunks = zip(
            range(num_decodes, len(counts)),
            spans.offsets[num_decodes:-1].tolist(),
            starts[num_decodes:].tolist(),
            counts[num_decodes:].tolist(),
            strict=True,
        )
        tiles = torch.from_numpy(cut_tiles([*chunks], tile_tokens(self.group, cache)))
        return LaunchPlan(
            tables=upload(spans.tables.int(), device),
            lengths=upload((starts[:num_decodes] + 1).int(), device),
            tiles=upload(tiles, device),
            splits=self.splits(num_decodes, cache),
        )

    def splits(self, num_decodes: int, cache: Tensor) -> Splits:
        """The parts in which the contexts of `num_decodes` decodes are read."""
        return choose_splits(max(num_decodes, 1), cache.shape[2], self.num_processors)

    def norm(self, residual: Tensor, hidden: Tensor | None, weight: Tensor, eps: float) -> Tensor:
        return add_norm(residual, hidden, weight, eps)

    def rope_and_store(
        self,
        rows: Tensor,
        rotary: Tensor,
        heads: Heads,
        cache: Tensor,
        slot_mapping: tuple[Tensor, ...],
    ) -> None:
        blocks, slots = slot_mapping
        rotate_store(
            rows, rotary, heads.norm, heads.norm_eps, cache, blocks, slots, heads.num_heads
        )

    def attention(self, rows: Tensor, heads: Heads, cache: Tensor, plan: object) -> Tensor:
        assert isinstance(plan, LaunchPlan)
        assert heads.num_heads == self.group * heads.num_kv_heads, "tiles are cut for a group"
        query, num_decodes = rows[:, : heads.num_heads], plan.lengths.shape[0]
        given = (cache, plan.tables, heads.scale, heads.window, heads.softcap)
        if not plan.tiles.shape[0]:
            return decode(query, plan.lengths, *given, splits=plan.splits)
        out = prefill(query, plan.tiles, *given)
        if num_decodes:
            part, to = query[:num_decodes], out[:num_decodes]
            decode(part, plan.lengths, *given, splits=plan.splits, out=to)
        return out

    def plan_texts(self, offsets: Tensor, like: Tensor) -> Tensor:
        tiles = cut_texts(offsets.tolist(), rows_per_tile(like.element_size()))
        return upload(torch.from_numpy(tiles), like.device)

    def text_attention(
        self, qkv: Tensor, plan: object, window: int | None, *, is_causal: bool
    ) -> Tensor:
        assert isinstance(plan, Tensor)
        return text_attention(qkv, plan, window, is_causal=is_causal)


def upload(values: Tensor, device: torch.device) -> Tensor:
    """`values` copied to the device in stream order; the host does not wait."""
    if device.type == "cpu":
        return values
    return values.pin_memory().to(device, non_blocking=True)
