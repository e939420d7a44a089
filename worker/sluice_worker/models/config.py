"""What of config.json the decoder computes with. What is not built is refused, never ignored."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, get_args

from ..errors import UnsupportedModel
from ..families import FAMILIES
from ..shape import ModelShape, SizingError
from .rope import Rope, number, read_rope

Activation = Literal["silu", "gelu_pytorch_tanh"]
"""As the kernels know them; they are not asked, as this module must not import torch."""


@dataclass(frozen=True, slots=True)
class DecoderConfig:
    """One decoder: its shape and its arithmetic.

    attention_scale: what scores are multiplied by. softcaps: None where there is none.
    embedding_scale: what embeddings are multiplied by.
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
        _refuse_unbuilt(config, shape)
        rope, sliding_rope = read_rope(config, shape, max_model_len or shape.max_position)
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


def _refuse_unbuilt(config: Mapping[str, object], shape: ModelShape) -> None:
    if not _names_own_classes(config.get("auto_map"), shape.architecture):
        raise UnsupportedModel("config.json: auto_map names code of the checkpoint; none is run.")
    if config.get("quantization_config") is not None:
        raise UnsupportedModel("config.json: quantization_config is not supported.")
    refused = ["use_bidirectional_attention", "use_mrope"]
    refused += [] if shape.family.attention_bias == "config" else ["attention_bias"]
    refused += [] if shape.family.mlp_bias else ["mlp_bias"]
    for name in refused:
        if config.get(name):
            raise UnsupportedModel(f"config.json: {name} is not built for {shape.architecture}.")


def _names_own_classes(auto_map: object, architecture: str) -> bool:
    """Whether auto_map names only the classes that transformers has under the same names.

    Phi-3's checkpoints do: their code is what was built into transformers, and here, since. It is
    not run either way; anything else means a model that is not the one built here. What it says of
    the tokenizer (Phi-4-mini: another repository's) is not asked: tokenizer.json is there.
    """
    if auto_map is None:
        return True
    own = {architecture, architecture.removesuffix("ForCausalLM") + "Config"}
    return isinstance(auto_map, Mapping) and all(
        isinstance(name, str) and name.rpartition(".")[2] in own
        for auto_class, name in auto_map.items()
        if auto_class != "AutoTokenizer"
    )


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
