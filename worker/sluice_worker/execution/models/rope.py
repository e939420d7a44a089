"""Rotary positions as config.json describes them, checked and complete. No torch."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import chain

from sluice_core.errors import CheckpointError, UnsupportedModel
from sluice_core.model.architecture import ModelShape, rope_kind

_KINDS = ("default", "linear", "dynamic", "yarn", "longrope", "llama3")
_LAYER_KINDS = ("full_attention", "sliding_attention")


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary positions of some layers.

    `kind`: default, linear, yarn, longrope or llama3; the fields of the others stay as they are.
    `dims`: number of a head's first dimensions that rotate. `magnitude`: their scale.
    `factors`: longrope's divisors of the frequencies, one for each pair of dimensions.
    """

    theta: float
    dims: int
    kind: str = "default"
    factor: float = 1.0
    original_max_position: int = 8192
    magnitude: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    factors: tuple[float, ...] = ()


def read_rope(
    config: Mapping[str, object], shape: ModelShape, max_model_len: int
) -> tuple[Rope, Rope]:
    """The rope of full-attention layers and that of sliding ones, mostly the same.

    `max_model_len`: the longest sequence that will be served; longrope chooses its factors by it.
    """
    # transformers 5 writes everything to `rope_parameters`; older versions had theta beside the
    # scaling. If a user added the older scaling to a new checkpoint, it replaces the new one.
    scaling = _mapping(config.get("rope_scaling"), "rope_scaling")
    told = _mapping(config.get("rope_parameters"), "rope_parameters")
    if not shape.family.local_rope:
        if scaling and "rope_theta" in told.keys() - scaling.keys() - config.keys():
            raise UnsupportedModel(
                "config.json: rope_scaling replaces rope_parameters, and names no rope_theta."
            )
        rope = _read(config, scaling or told, shape, max_model_len)
        return rope, rope
    if set(told) - set(_LAYER_KINDS):
        raise UnsupportedModel("config.json: rope_parameters must name the kinds of layers.")
    parts = {kind: _mapping(told.get(kind), kind) for kind in _LAYER_KINDS}
    # The scaling is merged over the default's kind, so its older key `type` has no effect.
    plain = {} if told else {"rope_type": "default"}
    parts["full_attention"] = {**plain, **parts["full_attention"], **scaling}
    config = {**config, "original_max_position_embeddings": None}  # only that inside counts
    local = {**config, "rope_theta": config.get("rope_local_base_freq")}
    full, sliding = (parts[kind] for kind in _LAYER_KINDS)
    return _read(config, full, shape, max_model_len), _read(local, sliding, shape, max_model_len)


def _read(
    config: Mapping[str, object],
    values: Mapping[str, object],
    shape: ModelShape,
    max_model_len: int,
) -> Rope:
    theta = number(values, "rope_theta", number(config, "rope_theta", 10000.0))
    kind = _kind(values)
    dims = _turning_dims(config, values, shape)
    # transformers puts the one beside the scaling first (Phi-3 writes it there).
    original = number(
        config,
        "original_max_position_embeddings",
        number(values, "original_max_position_embeddings", float(_told_positions(config))),
    )
    if theta <= 1 or original < 2:
        raise CheckpointError("config.json: rope_theta or the original length is too small.")
    if kind in ("linear", "dynamic", "llama3") and values.get("factor") is None:
        raise CheckpointError(f"config.json: factor of rope type {kind} is missing.")
    if kind in ("default", "dynamic"):
        # Dynamic scaling starts behind max_position_embeddings, where no sequence may go.
        return Rope(theta=theta, dims=dims)
    factor = number(values, "factor", _told_positions(config) / original)
    rope = Rope(
        theta=theta,
        dims=dims,
        kind=kind,
        factor=factor,
        original_max_position=int(original),
        magnitude=_magnitude(kind, values, factor, original),
        low_freq_factor=number(values, "low_freq_factor", 1.0),
        high_freq_factor=number(values, "high_freq_factor", 4.0),
        beta_fast=number(values, "beta_fast", 32.0),
        beta_slow=number(values, "beta_slow", 1.0),
        truncate=values.get("truncate") is not False,
        factors=_factors(values, dims, max_model_len > original) if kind == "longrope" else (),
    )
    if kind == "llama3" and rope.high_freq_factor <= rope.low_freq_factor:
        raise CheckpointError("config.json: high_freq_factor must be over low_freq_factor.")
    return rope


def _kind(values: Mapping[str, object]) -> str:
    kind = rope_kind(values)
    if kind not in _KINDS:
        raise UnsupportedModel(f"config.json: rope type {kind} is not supported.")
    for name in chain(_LAYER_KINDS, ("mrope_section",)):
        if name in values:
            raise UnsupportedModel(f"config.json: {name} of rotary positions is not supported.")
    return kind


def _turning_dims(
    config: Mapping[str, object], values: Mapping[str, object], shape: ModelShape
) -> int:
    share = number(values, "partial_rotary_factor", number(config, "partial_rotary_factor", 1.0))
    if share != 1 and (not shape.family.partial_rotary or share > 1):
        raise UnsupportedModel("config.json: partial_rotary_factor must be 1.")
    dims = int(shape.head_dim * share)
    if shape.head_dim % 2:  # also where only a part turns: halves are stored beside each other
        raise UnsupportedModel(f"config.json: head_dim {shape.head_dim} is odd.")
    if dims % 2 or not dims:
        raise UnsupportedModel(f"config.json: partial_rotary_factor turns {dims} dimensions.")
    return dims


def _told_positions(config: Mapping[str, object]) -> int:
    return int(number(config, "max_position_embeddings", 1.0))


def _magnitude(kind: str, values: Mapping[str, object], factor: float, original: float) -> float:
    """The scale of rotated queries and keys (`attention_factor`); from the papers by default."""
    if kind not in ("yarn", "longrope"):
        return 1.0
    if values.get("attention_factor") is not None:
        return number(values, "attention_factor", 1.0)
    if factor <= 1:
        return 1.0
    if kind == "longrope":
        return math.sqrt(1 + math.log(factor) / math.log(original))
    upper, lower = values.get("mscale"), values.get("mscale_all_dim")
    if not upper or not lower:
        return 0.1 * math.log(factor) + 1
    return _stretch(factor, number(values, "mscale", 1.0)) / _stretch(
        factor, number(values, "mscale_all_dim", 1.0)
    )


def _stretch(factor: float, scale: float) -> float:
    return 0.1 * scale * math.log(factor) + 1


def _factors(values: Mapping[str, object], dims: int, is_long: bool) -> tuple[float, ...]:
    """One set for all sequences of a server, as vLLM does.

    transformers changes the set, and recomputes the whole sequence, when it outgrows the original
    length. Here cached keys must not depend on a sequence's later length.
    """
    name = "long_factor" if is_long else "short_factor"
    factors = values.get(name)
    if not isinstance(factors, list) or len(factors) != dims // 2 or None in factors:
        raise CheckpointError(f"config.json: {name} must be a list of {dims // 2} numbers.")
    return tuple(number({name: factor}, name, 1.0) for factor in factors)


def _mapping(value: object, name: str) -> Mapping[str, object]:
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise CheckpointError(f"config.json: {name} must be an object.")
    return value


def number(values: Mapping[str, object], name: str, default: float) -> float:
    """A positive number of config.json, `default` where it is absent or null."""
    value = values.get(name)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e12:
        raise CheckpointError(f"config.json: {name} must be a positive number.")
    return float(value)
