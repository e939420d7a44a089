"""The parts of config.json that decide a model's memory. Pure; shared by operator and worker."""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from ..words import clean
from .families import FAMILIES, Family

DTYPE_BYTES: Mapping[str, int] = {"float32": 4, "bfloat16": 2, "float16": 2}
LOADED_BITS: Mapping[str, float] = {"fp8": 8, "bitsandbytes": 4.5}
"""Bits of a weight where an engine quantises 16-bit files as it loads them (`--quantization`)."""
IS_QUANTISED = "config.json: quantization_config is not supported."
MAX_LAYERS = 1024
"""More than any model has: lists with an entry per layer stay short, whatever a config claims."""

MAX_EXPERTS = 1 << 16
MAX_NUMBER = (1 << 31) - 1
"""Upper bound of any number in a config."""
MAX_SOFTCAP = 10_000
"""Bound of the soft cap on scores: kernels' tanh is exact to 1e-7, so more would blur scores."""
MAX_WINDOW = (1 << 31) - 1
"""Tokens that kernels can count; no sequence is longer."""
EMBEDDINGS, HEAD = "model.embed_tokens.weight", "lm_head.weight"
_FREQUENCIES = re.compile(r"(^|\.)rotary_emb\.inv_freq$")
"""Written by older exporters, and computed here: reading them would change nothing."""


class SizingError(ValueError):
    """The model or the numbers asked for cannot be sized; the message is one sentence, cleaned: it
    may quote a model's files."""

    def __init__(self, message: str) -> None:
        super().__init__(clean(message))


@dataclass(frozen=True, slots=True)
class Experts:
    """A mixture of experts: `count` MLPs of `width`, of which each token takes `per_token`.

    `layers`: those that have it; the others have one MLP of `intermediate_size`.
    """

    count: int
    per_token: int
    width: int
    layers: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Sizes of one model. `dtype`: that of the checkpoint.

    `max_position`: how far positions reach; `original_position`: how far they did before longrope
    or linear scaling, None without. `sliding_window`: the tokens that `sliding_layers` see.
    """

    architecture: str
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    max_position: int
    tie_word_embeddings: bool
    sliding_window: int | None
    dtype: str
    sliding_layers: tuple[int, ...] = ()
    experts: Experts | None = None
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    attention_softcap: float | None = None
    original_position: int | None = None

    @staticmethod
    def from_config(config: Mapping[str, object]) -> "ModelShape":
        """The shape in a Hugging Face config.json; SizingError if it is missing or unsupported."""
        architecture = _architecture(config)
        family = FAMILIES[architecture]
        config = {**family.defaults, **config}
        if config.get("sliding_window") == 0:
            config["sliding_window"] = None  # as in vLLM: some checkpoints mean that
        _refuse_unbuilt(config, architecture)
        hidden_size = positive(config, "hidden_size")
        num_heads = positive(config, "num_attention_heads")
        num_kv_heads = positive(config, "num_key_value_heads", num_heads)
        if num_heads % num_kv_heads:
            raise SizingError(
                f"config.json: num_attention_heads {num_heads} is not a multiple of "
                f"num_key_value_heads {num_kv_heads}."
            )
        num_layers = positive(config, "num_hidden_layers", most=MAX_LAYERS)
        sliding_layers = _sliding_layers(family, config, num_layers)
        return ModelShape(
            architecture=architecture,
            num_layers=num_layers,
            hidden_size=hidden_size,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=positive(config, "head_dim", max(hidden_size // num_heads, 1)),
            intermediate_size=positive(config, "intermediate_size"),
            vocab_size=positive(config, "vocab_size"),
            max_position=_max_position(family, config),
            tie_word_embeddings=config.get("tie_word_embeddings") is True,
            sliding_window=positive(config, "sliding_window") if sliding_layers else None,
            dtype=dtype_of(config),
            sliding_layers=sliding_layers,
            experts=_experts(family, config, num_layers),
            qkv_bias=family.attention_bias == "qkv" or _bias(family, config),
            output_bias=_bias(family, config),
            mlp_bias=family.mlp_bias and config.get("mlp_bias") is True,
            attention_softcap=_attention_softcap(family, config),
            original_position=_original_position(family, config),
        )

    @property
    def family(self) -> Family:
        """The architecture's differences from Llama."""
        return FAMILIES[self.architecture]

    @property
    def default_len(self) -> int:
        """The longest sequence that is served by default, in tokens.

        With longrope it is the original length, as in vLLM: all sequences share one set of factors.
        Long sequences' set is worse for short ones. With linear scaling: the config's length."""
        return min(self.original_position or self.max_position, self.max_position)

    def holds(self, tensor: str) -> bool:
        """True if the model has a tensor of that name. Some checkpoints store a head beside tied
        embeddings; the model does not have that one."""
        return not may_lack(tensor) or (tensor == HEAD and not self.tie_word_embeddings)

    def window(self, layer: int) -> int | None:
        """Tokens that a layer sees, its own included; None where it sees all."""
        window = self.sliding_window if layer in self.sliding_layers else None
        return None if window is None or window >= min(self.max_position, MAX_WINDOW) else window

    @property
    def windows(self) -> tuple[int | None, ...]:
        """The different windows of the layers."""
        return tuple(dict.fromkeys(self.window(layer) for layer in range(self.num_layers)))


def may_lack(tensor: str) -> bool:
    """True if some checkpoints leave out this tensor."""
    return tensor == HEAD or _FREQUENCIES.search(tensor) is not None


def _architecture(config: Mapping[str, object]) -> str:
    names = config.get("architectures")
    if not isinstance(names, list) or len(names) != 1 or not isinstance(names[0], str):
        raise SizingError("config.json: architectures must be a list of one name.")
    if names[0] not in FAMILIES:
        raise SizingError(
            f"config.json: architecture {names[0][:64]} is not supported; supported: "
            f"{', '.join(sorted(FAMILIES))}."
        )
    return names[0]


def _refuse_unbuilt(config: Mapping[str, object], architecture: str) -> None:
    family = FAMILIES[architecture]
    if not _names_own_classes(config.get("auto_map"), architecture):
        raise SizingError("config.json: auto_map names code of the checkpoint; none is run.")
    if config.get("quantization_config") is not None:
        raise SizingError(IS_QUANTISED)
    if config.get("is_causal") is False:
        raise SizingError("config.json: is_causal false is not built.")
    refused = ["use_bidirectional_attention", "use_mrope"]
    refused += [] if family.attention_bias == "config" else ["attention_bias"]
    refused += [] if family.mlp_bias else ["mlp_bias"]
    for name in refused:
        if config.get(name):
            raise SizingError(f"config.json: {name} is not built for {architecture}.")


def _names_own_classes(auto_map: object, architecture: str) -> bool:
    """True if auto_map names only classes that transformers has under the same names.

    Phi-3's checkpoints do: transformers later took over their code, which is also built here. The
    code is never run. Any other name means a model that is not built here. The tokenizer's entry
    (Phi-4-mini names another repository's) is ignored, as tokenizer.json is there.
    """
    if auto_map is None:
        return True
    own = {architecture, architecture.removesuffix("ForCausalLM") + "Config"}
    return isinstance(auto_map, Mapping) and all(
        isinstance(name, str) and name.rpartition(".")[2] in own
        for auto_class, name in auto_map.items()
        if auto_class != "AutoTokenizer"
    )


def positive(
    config: Mapping[str, object], name: str, default: int | None = None, most: int = MAX_NUMBER
) -> int:
    """A positive integer of config.json; SizingError where it is none, or over `most`."""
    value = config.get(name)
    if value is None:
        value = default
    if value is None:
        raise SizingError(f"config.json: {name} is missing.")
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise SizingError(f"config.json: {name} must be a positive integer.")
    if value > most:
        raise SizingError(f"config.json: {name} must be at most {most:,}.")
    return value


def _bias(family: Family, config: Mapping[str, object]) -> bool:
    return family.attention_bias == "config" and config.get("attention_bias") is True


def _attention_softcap(family: Family, config: Mapping[str, object]) -> float | None:
    value = config.get("attn_logit_softcapping")
    if value is None:
        return None
    if not family.attention_softcap:
        raise SizingError("config.json: attn_logit_softcapping is built for Gemma 2 only.")
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
        raise SizingError("config.json: attn_logit_softcapping must be a positive number.")
    if value > MAX_SOFTCAP:
        raise SizingError(f"config.json: attn_logit_softcapping is over {MAX_SOFTCAP:,}.")
    return float(value)


def _max_position(family: Family, config: Mapping[str, object]) -> int:
    """Yarn reaches `factor` times the original length. Linear scaling reaches `factor` times the
    config's length (as in vLLM, but not in Gemma 3). Other kinds reach the config's length."""
    told, rope = positive(config, "max_position_embeddings"), _rope(config)
    kind, factor = rope_kind(rope), rope.get("factor")
    if not isinstance(factor, int | float) or not 1 <= factor <= 1 << 20:
        return told
    if kind == "linear":
        return told if family.local_rope else int(factor * told)
    if kind != "yarn":
        return told
    return max(told, int(factor * positive(rope, "original_max_position_embeddings", 1)))


def _original_position(family: Family, config: Mapping[str, object]) -> int | None:
    rope, name = _rope(config), "original_max_position_embeddings"
    if rope_kind(rope) == "linear" and not family.local_rope:
        return positive(config, "max_position_embeddings")
    if rope_kind(rope) != "longrope":
        return None
    values = config if config.get(name) is not None else rope
    return positive(values, name) if values.get(name) is not None else None


def _rope(config: Mapping[str, object]) -> Mapping[str, object]:
    """The config's rotary settings: the older field goes first, as in transformers."""
    rope = config.get("rope_scaling") or config.get("rope_parameters")
    return rope if isinstance(rope, Mapping) else {}


def rope_kind(values: Mapping[str, object]) -> str:
    """The kind of rotary positions, under its name of today."""
    kind = str(values.get("rope_type", values.get("type", "default")))[:32]
    if kind == "su" or (kind == "yarn" and "short_factor" in values):
        return "longrope"  # its names in the first checkpoints of Phi-3
    return kind


def _sliding_layers(
    family: Family, config: Mapping[str, object], num_layers: int
) -> tuple[int, ...]:
    """Layers with a window, by the family's rule or by the config's own list."""
    window, kinds = config.get("sliding_window"), config.get("layer_types")
    if window is None or config.get("use_sliding_window") is False:
        family_layers: tuple[int, ...] = ()
    else:
        family_layers = _slid_by_rule(family, config, num_layers)
    if kinds is None:
        return family_layers
    if not isinstance(kinds, list) or len(kinds) != num_layers:
        raise SizingError(f"config.json: layer_types must be a list of {num_layers} names.")
    for kind in kinds:
        if kind not in ("full_attention", "sliding_attention"):
            raise SizingError(f"config.json: layer type {str(kind)[:32]} is not supported.")
    listed = tuple(i for i, kind in enumerate(kinds) if kind == "sliding_attention")
    if family.slides not in ("late", "periodic") and listed != family_layers:
        raise SizingError("config.json: layer_types differs from what its architecture does.")
    if listed and (window is None or config.get("use_sliding_window") is False):
        raise SizingError("config.json: layer_types names sliding layers, but there is no window.")
    return listed


def _slid_by_rule(family: Family, config: Mapping[str, object], num_layers: int) -> tuple[int, ...]:
    layers = range(num_layers)
    if family.slides == "all":
        return tuple(layers)
    if family.slides == "late":
        first = config.get("max_window_layers")
        if isinstance(first, bool) or not isinstance(first, int) or first < 0:
            raise SizingError("config.json: max_window_layers must be a whole number.")
        return tuple(layers[first:])
    if family.slides == "periodic":
        period = positive(config, "sliding_window_pattern")
        return tuple(layer for layer in layers if (layer + 1) % period)
    raise SizingError("config.json: sliding_window is not built for this architecture.")


def _experts(family: Family, config: Mapping[str, object], num_layers: int) -> Experts | None:
    names = family.experts
    if names is None:
        return None
    told = [name for name in names.count if config.get(name) is not None]
    count = positive(config, told[0] if told else names.count[0], most=MAX_EXPERTS)
    per_token = positive(config, "num_experts_per_tok")
    if per_token > count:
        raise SizingError(f"config.json: num_experts_per_tok {per_token} is over {count} experts.")
    dense, step = config.get("mlp_only_layers") or [], positive(config, "decoder_sparse_step", 1)
    if not isinstance(dense, list) or not all(isinstance(layer, int) for layer in dense):
        raise SizingError("config.json: mlp_only_layers must be a list of whole numbers.")
    sparse = set(range(num_layers)) - set(dense)
    layers = tuple(layer for layer in sorted(sparse) if (layer + 1) % step == 0)
    return Experts(count, per_token, positive(config, names.width), layers)


def names_dtype(config: Mapping[str, object]) -> object:
    """The dtype in config.json: transformers 5 writes `dtype`, older versions `torch_dtype`."""
    return config.get("dtype") or config.get("torch_dtype")


def dtype_of(config: Mapping[str, object]) -> str:
    name = names_dtype(config) or "float32"
    if not isinstance(name, str) or name.removeprefix("torch.") not in DTYPE_BYTES:
        raise SizingError(f"config.json: dtype must be one of {', '.join(sorted(DTYPE_BYTES))}.")
    return name.removeprefix("torch.")


def resolve_dtype(requested: str, shape: ModelShape, *, on_cpu: bool) -> str:
    """The dtype to run with: `requested`, or the checkpoint's own for "auto".

    A checkpoint's float16 becomes bfloat16 on a CPU, as in vLLM: few CPUs have fast float16
    products. Gemma's becomes bfloat16 on every device.
    """
    name = shape.dtype if requested == "auto" else requested
    if requested == "auto" and name == "float16" and (on_cpu or shape.family.gemma):
        name = "bfloat16"
    if name not in DTYPE_BYTES:
        raise SizingError(
            f"dtype {name[:32]} is not one of auto, {', '.join(sorted(DTYPE_BYTES))}."
        )
    if name == "float16" and shape.family.gemma:
        # Its residual stream passes float16's 65,504; vLLM refuses it too.
        raise SizingError(
            f"dtype float16 overflows in {shape.architecture}; take bfloat16 or float32."
        )
    return name


def weights_bytes(shape: ModelShape, dtype_bytes: int) -> int:
    """Bytes of a model's weights in a checkpoint, by its shape alone.

    The worker holds a little more of some: norms of Gemma in float32, those of heads for each head.
    """
    hidden, layers = shape.hidden_size, shape.num_layers
    query, kv = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    attention = hidden * (2 * query + 2 * kv)
    attention += shape.qkv_bias * (query + 2 * kv) + shape.output_bias * hidden
    norms = hidden * (4 if shape.family.gemma else 2) + 2 * shape.head_dim * shape.family.qk_norm
    embeddings = shape.vocab_size * hidden * (1 if shape.tie_word_embeddings else 2)
    return dtype_bytes * (layers * (attention + norms) + _mlps(shape) + embeddings + hidden)


def bytes_saved(shape: ModelShape, dtype: str, quantization: str | None) -> int:
    """Bytes of `weights_bytes` that quantisation saves: 0 for None. Raises SizingError.

    Of the linear layers' weights: those of w8a8 take 1 byte each and a float32 scale for each
    output; another engine's, the bits of LOADED_BITS. Embeddings, head, norms and routers stay as
    they are. Biases, which become float32, are too few to count.
    """
    if quantization is None:
        return 0
    elements, outputs = _linear(shape)
    if quantization in LOADED_BITS:
        return int((8 * DTYPE_BYTES[dtype] - LOADED_BITS[quantization]) / 8 * elements)
    if dtype == "float16":
        raise SizingError(f"{quantization} needs dtype bfloat16 or float32.")
    return (DTYPE_BYTES[dtype] - 1) * elements - 4 * outputs


def _linear(shape: ModelShape) -> tuple[int, int]:
    """Elements and outputs of the linear layers, embeddings, head and routers left out."""
    hidden, experts = shape.hidden_size, shape.experts
    query, kv = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    elements = shape.num_layers * hidden * (2 * query + 2 * kv)
    outputs = shape.num_layers * (query + 2 * kv + hidden)
    num_dense = shape.num_layers - len(experts.layers if experts else ())
    mlps = [(num_dense, shape.intermediate_size)]
    mlps += [(len(experts.layers) * experts.count, experts.width)] if experts else []
    elements += 3 * hidden * sum(count * width for count, width in mlps)
    outputs += sum(count * (2 * width + hidden) for count, width in mlps)
    return elements, outputs


def _mlps(shape: ModelShape) -> int:
    """Elements of all layers' MLPs."""
    hidden, width = shape.hidden_size, shape.intermediate_size
    dense = 3 * hidden * width + shape.mlp_bias * (2 * width + hidden)
    if shape.experts is None:
        return shape.num_layers * dense
    experts = shape.experts.count * hidden * (3 * shape.experts.width + 1)  # and its router's row
    num_sparse = len(shape.experts.layers)
    return num_sparse * experts + (shape.num_layers - num_sparse) * dense
