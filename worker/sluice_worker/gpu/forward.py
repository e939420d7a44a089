"""The forward on Triton kernels: `Decoder.hidden` with less memory traffic and fewer calls.

Every residual addition is one with the norm behind it, and keys and values go to their pages as
they are turned. The weights are `Decoder`'s own; experts run as they do elsewhere.
"""

from dataclasses import dataclass

import torch
from sluice_kernels.triton.add_norm import add_norm
from sluice_kernels.triton.decode import decode
from sluice_kernels.triton.gated import gated
from sluice_kernels.triton.prefill import prefill
from sluice_kernels.triton.rotate_store import rotate_store
from torch import Tensor

from ..models.attention import Attention
from ..models.decoder import Decoder
from ..models.mlp import ExpertMlp, GatedMlp
from ..models.norm import Norm


@dataclass(frozen=True, slots=True)
class Batch:
    """One step: rows of decodes, then those of chunks, as `sluice_kernels.triton` wants them.

    token_ids, positions, slots [num_tokens] int64; lengths [num_decodes], tables [num_sequences,
    num_pages] and tiles [num_tiles, 4] int32. num_splits: of the decodes' contexts.
    """

    token_ids: Tensor
    positions: Tensor
    slots: Tensor
    lengths: Tensor
    tables: Tensor
    tiles: Tensor
    num_splits: int


def hidden(model: Decoder, batch: Batch, caches: list[Tensor]) -> tuple[Tensor, Tensor]:
    """The last layer's output and its norm, both [num_tokens, hidden_size]."""
    stream = model.embed(batch.token_ids)
    full, sliding = (torch.view_as_real(part.squeeze(1)) for part in model.turns(batch.positions))
    norms = [layer.attention_norm for layer in model.layers[1:]] + [model.norm]
    rows = _normed(stream, None, model.layers[0].attention_norm)
    for layer, cache, next_norm in zip(model.layers, caches, norms, strict=True):
        turns = sliding if layer.is_sliding else full
        mixed = _attention(model, layer.attention, rows, turns, cache, batch)
        if layer.attention_out_norm is not None:
            mixed = _normed(mixed, None, layer.attention_out_norm)
        rows = _normed(stream, mixed, layer.mlp_norm)
        mixed = _mlp(layer.mlp, rows, model.config.activation)
        if layer.mlp_out_norm is not None:
            mixed = _normed(mixed, None, layer.mlp_out_norm)
        rows = _normed(stream, mixed, next_norm)
    return stream, rows


def _normed(stream: Tensor, added: Tensor | None, norm: Norm) -> Tensor:
    return add_norm(stream, added, norm.weight, norm.eps)


def _attention(
    model: Decoder, layer: Attention, rows: Tensor, turns: Tensor, cache: Tensor, batch: Batch
) -> Tensor:
    heads = layer.qkv(rows).view(len(rows), -1, layer.head_dim)
    rotate_store(heads, turns, layer.head_norm, layer.norm_eps, cache, batch.slots, layer.num_heads)
    query, num_decodes = heads[:, : layer.num_heads], len(batch.lengths)
    window = model.config.shape.windows[layer.view]
    out = None
    if len(batch.tiles):
        out = prefill(
            query, cache, batch.tables, batch.tiles, layer.scale,
            window=window, softcap=layer.softcap,
        )  # fmt: skip
    if num_decodes:
        found = decode(
            query[:num_decodes], cache, batch.tables[:num_decodes], batch.lengths, layer.scale,
            num_splits=batch.num_splits, window=window, softcap=layer.softcap,
        )  # fmt: skip
        if out is None:
            return layer.output(found)
        out[:num_decodes] = found
    assert out is not None, "a step has rows"
    return layer.output(out)


def _mlp(mlp: GatedMlp | ExpertMlp, rows: Tensor, activation: str) -> Tensor:
    if isinstance(mlp, ExpertMlp):
        return mlp(rows)
    return mlp.down(gated(mlp.gate_up(rows), activation))
