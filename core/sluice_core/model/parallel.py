"""The part of a model that one GPU holds, where several run it together. Pure.

Tensor parallel: each GPU has a share of every layer. Pipeline parallel: each stage has some layers.
The rules are vLLM's: `distributed/utils.py` (divide, get_pp_indices), `config/model.py`
(get_num_kv_heads), `layers/vocab_parallel_embedding.py`.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from .architecture import ModelShape, SizingError, weights_bytes

COLLECTIVE_BYTES = 512 << 20
"""Bytes of each GPU that NCCL and the engine's own all-reduce take where several work together.
Assumed: not measured yet."""
_VOCABULARY_STEP = 64
"""Engines pad the vocabulary to a multiple of this before they divide it."""


class Indivisible(SizingError):
    """The model cannot be divided between so many GPUs: no engine of ours or others starts so."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """How many GPUs run one copy of a model: `tensor` share each layer, in `pipeline` stages.

    `rest_last`: layers that the division leaves over go to the last stages, as in SGLang. In vLLM
    they go to those in front of the last."""

    tensor: int = 1
    pipeline: int = 1
    rest_last: bool = False

    @property
    def num_gpus(self) -> int:
        """GPUs of one copy."""
        return self.tensor * self.pipeline

    def named(self, stage: int) -> str:
        """The beginning of a sentence on one GPU of `stage`; empty where there is only one."""
        if self.num_gpus == 1:
            return ""
        stages = "Each GPU" if self.pipeline == 1 else f"GPU of stage {stage} of {self.pipeline}"
        return f"{stages}, tensor parallel {self.tensor}: " if self.tensor > 1 else f"{stages}: "


ONE_GPU = Layout()


@dataclass(frozen=True, slots=True)
class Rank:
    """The part of one GPU. `shape`: its own, with the logits' vocabulary: 0 but on the last stage.
    `stage`: from 1."""

    whole: ModelShape
    shape: ModelShape
    layout: Layout
    stage: int

    def weights_bytes(self, model_bytes: int, dtype_bytes: int) -> int:
        """Bytes of the weights here, of `model_bytes` in the whole model.

        Embeddings and head have `dtype_bytes` an element, also in quantised checkpoints. All else
        is divided as the shape's elements are.
        """
        if self.layout.num_gpus == 1:
            return model_bytes
        whole, row = self.whole, self.whole.hidden_size * dtype_bytes
        num_tables = 1 if whole.tie_word_embeddings else 2
        layers = max(model_bytes - num_tables * whole.vocab_size * row, 0)
        if self.layout.pipeline > 1:  # embeddings on the first stage, a head on the last
            num_tables = self.stage in (1, self.layout.pipeline)
        padded = -(-whole.vocab_size // _VOCABULARY_STEP) * _VOCABULARY_STEP
        tables = num_tables * -(-padded // self.layout.tensor) * row
        return tables - (-layers * _elements(self.shape) // _elements(whole))


def ranks(shape: ModelShape, layout: Layout) -> Iterator[Rank]:
    """One GPU of each stage: those of a stage are equal. Raises Indivisible."""
    _refuse(shape, layout)
    first = 0
    for stage, num_layers in enumerate(stage_layers(shape.num_layers, layout), 1):
        layers = range(first, first + num_layers)
        yield Rank(shape, _part(shape, layout, layers, stage), layout, stage)
        first += num_layers


def stage_layers(num_layers: int, layout: Layout) -> list[int]:
    """Layers of each stage; those left over go one each to the stages that `layout` says."""
    each, rest = divmod(num_layers, layout.pipeline)
    end = layout.pipeline if layout.rest_last else layout.pipeline - 1
    return [each + (end - rest <= stage < end) for stage in range(layout.pipeline)]


def _refuse(shape: ModelShape, layout: Layout) -> None:
    tensor, kv_heads, experts = layout.tensor, shape.num_kv_heads, shape.experts
    widths = {"intermediate_size": shape.intermediate_size}
    if experts is not None:
        widths = {"the experts' width": experts.width}
    for name, size in {"num_attention_heads": shape.num_heads, **widths}.items():
        if size % tensor:
            raise Indivisible(f"tensor parallel {tensor} does not divide {name} {size}.")
    if kv_heads % tensor and tensor % kv_heads:
        what = f"neither a divisor nor a multiple of num_key_value_heads {kv_heads}"
        raise Indivisible(f"tensor parallel {tensor} is {what}.")
    if layout.pipeline > (most := shape.num_layers):
        raise Indivisible(f"pipeline parallel {layout.pipeline} is over num_hidden_layers {most}.")


def _part(shape: ModelShape, layout: Layout, layers: range, stage: int) -> ModelShape:
    """The shape of one GPU of a stage; layers count from 0 there."""
    experts, tensor = shape.experts, layout.tensor
    if experts is not None:
        own = _moved(experts.layers, layers)
        experts = replace(experts, width=experts.width // tensor, layers=own)
    return replace(
        shape,
        num_layers=len(layers),
        num_heads=shape.num_heads // tensor,
        num_kv_heads=max(1, shape.num_kv_heads // tensor),
        intermediate_size=shape.intermediate_size // tensor,
        vocab_size=shape.vocab_size if stage == layout.pipeline else 0,
        sliding_layers=_moved(shape.sliding_layers, layers),
        experts=experts,
    )


def _moved(chosen: tuple[int, ...], layers: range) -> tuple[int, ...]:
    return tuple(layer - layers.start for layer in chosen if layer in layers)


def _elements(shape: ModelShape) -> int:
    """Elements of all but embeddings and head."""
    return weights_bytes(replace(shape, vocab_size=0), 1)
