"""What of config.json the decoder computes with. What is not built is refused, never ignored."""

from collections.abc import Mapping
from dataclasses import dataclass

from ..errors import CheckpointError, UnsupportedModel
from ..sizing import ModelShape, SizingError


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary positions. `kind`: default, linear or llama3; the last four are llama3's."""

    theta: float
    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192


@dataclass(frozen=True, slots=True)
class DecoderConfig:
    """One decoder: its shape and its arithmetic."""

    shape: ModelShape
    norm_eps: float
    rope: Rope
    attention_bias: bool
    mlp_bias: bool

    @staticmethod
    def from_json(config: Mapping[str, object]) -> "DecoderConfig":
        """Raises UnsupportedModel or CheckpointError, each with one sentence."""
        _refuse_unbuilt(config)
        try:
            shape = ModelShape.from_config(config)
        except SizingError as error:
            raise UnsupportedModel(str(error)) from error
        if shape.head_dim % 2:
            raise UnsupportedModel(f"config.json: head_dim {shape.head_dim} is odd.")
        return DecoderConfig(
            shape=shape,
            norm_eps=_number(config, "rms_norm_eps", 1e-6),
            rope=_rope(config, shape.max_position),
            attention_bias=config.get("attention_bias") is True,
            mlp_bias=config.get("mlp_bias") is True,
        )


def _refuse_unbuilt(config: Mapping[str, object]) -> None:
    if "auto_map" in config:
        raise UnsupportedModel("config.json: auto_map names code of the checkpoint; none is run.")
    if config.get("quantization_config") is not None:
        raise UnsupportedModel("config.json: quantization_config is not supported.")
    if config.get("hidden_act", "silu") != "silu":
        raise UnsupportedModel("config.json: hidden_act must be silu.")
    if config.get("partial_rotary_factor", 1) != 1:
        raise UnsupportedModel("config.json: partial_rotary_factor must be 1.")


def _rope(config: Mapping[str, object], max_position: int) -> Rope:
    # transformers 5 writes everything to `rope_parameters`; before, theta stood beside the scaling.
    values = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(values, Mapping):
        raise CheckpointError("config.json: rope_scaling must be an object.")
    theta = _number(values, "rope_theta", _number(config, "rope_theta", 10000.0))
    kind = values.get("rope_type", values.get("type", "default"))
    if kind not in ("default", "linear", "llama3"):
        raise UnsupportedModel(f"config.json: rope type {str(kind)[:32]} is not supported.")
    return Rope(
        theta=theta,
        kind=str(kind),
        factor=_number(values, "factor", 1.0),
        low_freq_factor=_number(values, "low_freq_factor", 1.0),
        high_freq_factor=_number(values, "high_freq_factor", 4.0),
        original_max_position=int(
            _number(values, "original_max_position_embeddings", float(max_position))
        ),
    )


def _number(values: Mapping[str, object], name: str, default: float) -> float:
    value = values.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e12:
        raise CheckpointError(f"config.json: {name} must be a positive number.")
    return float(value)
