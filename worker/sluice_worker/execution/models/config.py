"""The decoder's parameters from config.json. Values that are not built are refused, never ignored.

One exception is yarn's `attn_factor` in DeepSeek-R1-0528-Qwen3-8B: transformers 5.23 and vLLM 0.32
do not know this key of rope_scaling, and compute without it too.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, get_args

from sluice_core.errors import UnsupportedModel
from sluice_core.model.architecture import ModelShape, SizingError
from sluice_core.model.families import FAMILIES
from sluice_core.model.files import Source
from sluice_core.model.tasks import task_of, vector_shape, without_head

from .rope import Rope, number, read_rope

Activation = Literal["silu", "gelu_pytorch_tanh"]
"""The kernels' names, repeated here because this module must not import torch."""


@dataclass(frozen=True, slots=True)
class DecoderConfig:
    """One decoder: its shape and its arithmetic.

    attention_scale: factor of the scores. softcaps: None without a cap.
    embedding_scale: factor of the embeddings.
    """

    shape: ModelShape
    norm_eps: float
    rope: Rope
    sliding_rope: Rope
    activation: Activation
    attention_scale: float
    logit_softcap: float | None
    embedding_scale: float
    norm_topk_prob: bool

    @staticmethod
    def from_json(
        config: Mapping[str, object], max_model_len: int | None = None
    ) -> "DecoderConfig":
        """`max_model_len`: the longest sequence that will be served, the model's own for None.

        Raises UnsupportedModel or CheckpointError, each with one sentence.
        """
        try:
            shape = ModelShape.from_config(config)
        except SizingError as error:
            raise UnsupportedModel(str(error)) from error
        config = {**FAMILIES[shape.architecture].defaults, **config}
        rope, sliding_rope = read_rope(config, shape, max_model_len or shape.default_len)
        gemma = shape.family.gemma
        scalar = number(config, "query_pre_attn_scalar", 256.0) if gemma else shape.head_dim
        return DecoderConfig(
            shape=shape,
            norm_eps=number(config, "rms_norm_eps", 1e-6),
            rope=rope,
            sliding_rope=sliding_rope,
            activation=_activation(config, shape),
            attention_scale=float(scalar**-0.5),
            logit_softcap=_logit_softcap(config, shape),
            embedding_scale=float(shape.hidden_size**0.5) if gemma else 1.0,
            norm_topk_prob=config.get("norm_topk_prob") is True,
        )


def check_built(source: Source, config: Mapping[str, object]) -> None:
    """Refuse a model that no engine is built for: UnsupportedModel or CheckpointError."""
    if task_of(source, config) == "generate":
        DecoderConfig.from_json(config)
    elif isinstance(vector_shape(config), ModelShape):
        DecoderConfig.from_json(without_head(config))


def _activation(config: Mapping[str, object], shape: ModelShape) -> Activation:
    name = "hidden_activation" if shape.family.gemma else "hidden_act"
    asked = config.get(name, "silu")
    built: tuple[Activation, ...] = get_args(Activation)
    for activation in built:
        if asked == activation:
            return activation
    raise UnsupportedModel(f"config.json: {name} must be one of {', '.join(built)}.")


def _logit_softcap(config: Mapping[str, object], shape: ModelShape) -> float | None:
    if config.get("final_logit_softcapping") is None:
        return None
    if not shape.family.gemma:
        raise UnsupportedModel("config.json: final_logit_softcapping is built for Gemma only.")
    return number(config, "final_logit_softcapping", 1.0)
