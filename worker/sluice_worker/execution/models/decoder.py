"""The decoder: embeddings, layers of paged attention and MLP, logits of the sampled rows."""

from collections.abc import Iterator
from dataclasses import dataclass, fields, is_dataclass

import torch
from sluice_core.model.architecture import EMBEDDINGS, HEAD
from sluice_kernels.interface import (
    Kernels,
    LayerParts,
    LayerStack,
    Projection,
    RunsLayers,
    SharesWeights,
)
from sluice_kernels.linear import num_bytes, plain_projection
from torch import Tensor

from .attention import Attention, read_attention
from .config import DecoderConfig
from .linear import ReadTensor
from .mlp import ExpertMlp, GatedMlp, read_mlp
from .norm import Norm, read_norm
from .rotary import read_rotary
from .step import StepInput


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer. The last two norms apply to the outputs of attention and MLP; most have none.

    `is_sliding`: it uses the sliding layers' rope.
    """

    attention_norm: Norm
    attention: Attention
    mlp_norm: Norm
    mlp: GatedMlp | ExpertMlp
    is_sliding: bool
    attention_out_norm: Norm | None
    mlp_out_norm: Norm | None

    def parts(self) -> LayerParts | None:
        """The layer's parts; None if it has more or other parts than most layers."""
        if not isinstance(self.mlp, GatedMlp) or self.attention_out_norm or self.mlp_out_norm:
            return None
        return LayerParts(
            norm=(self.attention_norm.weight, self.attention_norm.eps),
            qkv=self.attention.qkv,
            heads=self.attention.heads,
            output=self.attention.output,
            mlp_norm=(self.mlp_norm.weight, self.mlp_norm.eps),
            gate_up=self.mlp.gate_up,
            down=self.mlp.down,
            is_sliding=self.is_sliding,
        )


class DecoderBody:
    """A loaded model without its head."""

    def __init__(self, config: DecoderConfig, read: ReadTensor, kernels: Kernels) -> None:
        shape = config.shape
        self.config = config
        self.kernels = kernels
        self.embedding = read(EMBEDDINGS, (shape.vocab_size, shape.hidden_size))
        self.layers = [
            _read_layer(config, index, read, kernels) for index in range(shape.num_layers)
        ]
        self._stack = _stack(self.layers, kernels)
        self.norm = read_norm(config, read, "model.norm", kernels)
        ropes = {config.rope, config.sliding_rope}
        self._rotaries = {
            rope: read_rotary(rope, shape.head_dim, self.embedding.device) for rope in ropes
        }
        # The root of the width in the dtype of the embeddings, as Gemma was trained with.
        scale = torch.tensor(config.embedding_scale, dtype=self.embedding.dtype)
        self._embedding_scale = None if config.embedding_scale == 1 else float(scale)

    @property
    def num_bytes(self) -> int:
        """Bytes of the weights; tied embeddings count once."""
        tensors = _tensors(self._parts)
        return sum({_identity(tensor): num_bytes(tensor) for tensor in tensors}.values())

    @property
    def in_a_row(self) -> bool:
        """True if one call runs all layers, in one scratch."""
        return self._stack is not None

    @property
    def _parts(self) -> list[object]:
        return [self.embedding, self.layers, self.norm]

    def hidden(self, step: StepInput, caches: list[Tensor], wanted: Tensor | None = None) -> Tensor:
        """The last layer's output for the rows `wanted`, or of all tokens, [.., hidden_size].

        caches: per layer [num_blocks, 2, num_kv_heads, block_size, head_dim], written in place. In
        the last layer, other rows need only their keys and values.
        """
        residual = self.embedding[step.token_ids]  # [num_rows, hidden_size]
        if self._embedding_scale is not None:
            residual *= self._embedding_scale
        rotary = {rope: rotary.at(step.positions) for rope, rotary in self._rotaries.items()}
        full, sliding = rotary[self.config.rope], rotary[self.config.sliding_rope]
        hidden: Tensor | None = None
        whole = caches if wanted is None else caches[:-1]
        if self._stack is None or not whole:
            whole = []
        else:
            slot_mapping = (step.blocks, step.slots)
            hidden = self._stack(residual, (full, sliding), whole, slot_mapping, step.plan)
        for layer, cache in list(zip(self.layers, caches, strict=True))[len(whole) :]:
            layer_rotary = sliding if layer.is_sliding else full
            rows = wanted if layer is self.layers[-1] else None
            normed = layer.attention_norm(residual, hidden)
            hidden = layer.attention(normed, layer_rotary, cache, step, rows)
            if rows is not None:
                residual = residual[rows]
            if layer.attention_out_norm is not None:
                hidden = layer.attention_out_norm(hidden)
            hidden = layer.mlp(layer.mlp_norm(residual, hidden))
            if layer.mlp_out_norm is not None:
                hidden = layer.mlp_out_norm(hidden)
        hidden = residual if hidden is None else residual.add_(hidden)
        return hidden[: len(step.slots)] if wanted is None else hidden

    def bent(self, products: Tensor) -> Tensor:
        """The head's `products` as float32 with the soft cap applied; may overwrite `products`."""
        logits = products.float()
        softcap = self.config.logit_softcap
        return logits if softcap is None else logits.div_(softcap).tanh_().mul_(softcap)


class Decoder(DecoderBody):
    """A loaded model."""

    def __init__(self, config: DecoderConfig, read: ReadTensor, kernels: Kernels) -> None:
        super().__init__(config, read, kernels)
        self.head = self._read_head(read)

    @property
    def _parts(self) -> list[object]:
        return [*super()._parts, self.head]

    def _read_head(self, read: ReadTensor) -> Projection:
        shape = self.config.shape
        if shape.tie_word_embeddings:
            # Packed, the embeddings would be there twice.
            if isinstance(self.kernels, SharesWeights):
                return self.kernels.shared_projection(self.embedding)
            return plain_projection(self.embedding, None)
        head = read(HEAD, (shape.vocab_size, shape.hidden_size))
        return self.kernels.projection(head, None, None, narrow=False)

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits of `hidden` [num_rows, hidden_size], float32 [num_rows, vocab_size]."""
        return self.bent(self.head(self.norm(hidden)))


def _stack(layers: list[Layer], kernels: Kernels) -> LayerStack | None:
    """All layers as one stack, if these kernels can run it."""
    parts = [part for layer in layers if (part := layer.parts()) is not None]
    if len(parts) < len(layers) or not isinstance(kernels, RunsLayers):
        return None
    return kernels.stack(parts)


def _read_layer(config: DecoderConfig, index: int, read: ReadTensor, kernels: Kernels) -> Layer:
    layer = f"model.layers.{index}."
    names = ["input_layernorm", "post_attention_layernorm"]
    if config.shape.family.gemma:
        # Named by where they stand, so the second is another one than elsewhere.
        names = ["input_layernorm", "pre_feedforward_layernorm"]
        names += ["post_attention_layernorm", "post_feedforward_layernorm"]
    norms = [read_norm(config, read, layer + name, kernels) for name in names]
    return Layer(
        attention_norm=norms[0],
        attention=read_attention(config, index, read, kernels),
        mlp_norm=norms[1],
        mlp=read_mlp(config, index, read, kernels),
        is_sliding=index in config.shape.sliding_layers,
        attention_out_norm=norms[2] if len(norms) > 2 else None,
        mlp_out_norm=norms[3] if len(norms) > 3 else None,
    )


def _identity(tensor: Tensor) -> int:
    """Equal for tensors that share memory; a tensor packed by oneDNN shares with none."""
    return id(tensor) if tensor.is_mkldnn else tensor.data_ptr()


def _tensors(part: object) -> Iterator[Tensor]:
    """All tensors that a value is made of."""
    if isinstance(part, Tensor):
        yield part
    elif isinstance(part, list):
        for item in part:
            yield from _tensors(item)
    elif is_dataclass(part):
        for field in fields(part):
            yield from _tensors(getattr(part, field.name))
