"""Text encoders and classifiers: architectures, sizes and names of tensors. Pure.

The facts are transformers' (modeling_* and configuration_* of version 5.23).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, get_args

from .architecture import IS_QUANTISED, MAX_LAYERS, SizingError, dtype_of, positive

Activation = Literal["gelu", "gelu_new", "gelu_pytorch_tanh", "quick_gelu", "relu", "silu"]
MAX_BUCKETS = 1 << 10
CLASSIFIER = "ForSequenceClassification"


@dataclass(frozen=True, slots=True)
class LayerNames:
    """Names of a layer's tensors, without `.weight`. `qkv`: one of three projections, or the three.
    `gated`: `up` has two halves, of which the activated first one is a factor of the second; or
    `gate` is the first.
    `scales`: factors of what attention and MLP add, under their whole names."""

    layer: str
    qkv: tuple[str, ...]
    output: str
    attention_norm: str
    up: str
    down: str
    mlp_norm: str
    gated: bool = False
    gate: str | None = None
    scales: tuple[str, str] | None = None


@dataclass(frozen=True, slots=True)
class HeadNames:
    """A classifier's layers behind one row a text: `first`, its activation, `norm` and `last`."""

    first: str
    activation: Literal["tanh", "relu", "gelu"]
    last: str
    norm: str | None = None


@dataclass(frozen=True, slots=True)
class EncoderFamily:
    """The differences of one architecture from BERT.

    prefix: of the tensors in a checkpoint that holds a head as well. head: of its classifiers.
    defaults: values that transformers assumes for missing keys. keys: what the config calls a size.
    words: None where no tokens are read. first_position: the row of the first token's position.
    pre_norm: norms stand in front of attention and MLP. first_norm: in front of the first attention
    too. is_causal: a token sees those before it. is_modern: as ModernBERT, with rotary positions.
    is_rotary: with rotary positions, and no biases in linear layers. refused: values that are not
    built, for keys that may lack.
    """

    prefix: str
    names: LayerNames
    head: HeadNames | None
    defaults: Mapping[str, object]
    keys: Mapping[str, str]
    words: str | None = "embeddings.word_embeddings"
    embeddings_norm: str | None = "embeddings.LayerNorm"
    positions: str | None = "embeddings.position_embeddings"
    types: str | None = None
    final_norm: str | None = None
    first_position: int = 0
    pre_norm: bool = False
    first_norm: bool = True
    is_causal: bool = False
    is_modern: bool = False
    is_rotary: bool = False
    refused: Mapping[str, tuple[object, ...]] = field(default_factory=dict)
    relative_bias: str | None = None


_BERT_LAYER = LayerNames(
    "encoder.layer.{}.",
    tuple(f"attention.self.{part}" for part in ("query", "key", "value")),
    "attention.output.dense",
    "attention.output.LayerNorm",
    "intermediate.dense",
    "output.dense",
    "output.LayerNorm",
)
_BERT_DEFAULTS = {
    "hidden_size": 768,
    "num_attention_heads": 12,
    "num_hidden_layers": 12,
    "intermediate_size": 3072,
    "max_position_embeddings": 512,
    "hidden_act": "gelu",
    "layer_norm_eps": 1e-12,
    "type_vocab_size": 2,
}
_TYPES = "embeddings.token_type_embeddings"
_DENSE_HEAD = HeadNames("classifier.dense", "tanh", "classifier.out_proj")
_ROBERTA = EncoderFamily(
    "roberta.", _BERT_LAYER, _DENSE_HEAD, _BERT_DEFAULTS, {}, types=_TYPES, first_position=2
)
_FAMILIES: Mapping[str, EncoderFamily] = {
    "Bert": EncoderFamily(
        "bert.",
        _BERT_LAYER,
        HeadNames("pooler.dense", "tanh", "classifier"),
        _BERT_DEFAULTS,
        {},
        types=_TYPES,
    ),
    "Roberta": _ROBERTA,
    "XLMRoberta": _ROBERTA,
    "MPNet": EncoderFamily(
        "mpnet.",
        LayerNames(
            "encoder.layer.{}.",
            tuple(f"attention.attn.{part}" for part in "qkv"),
            "attention.attn.o",
            "attention.LayerNorm",
            "intermediate.dense",
            "output.dense",
            "output.LayerNorm",
        ),
        _DENSE_HEAD,
        {**_BERT_DEFAULTS, "relative_attention_num_buckets": 32},
        {},
        first_position=2,
        relative_bias="encoder.relative_attention_bias",
    ),
    "DistilBert": EncoderFamily(
        "distilbert.",
        LayerNames(
            "transformer.layer.{}.",
            tuple(f"attention.{part}_lin" for part in "qkv"),
            "attention.out_lin",
            "sa_layer_norm",
            "ffn.lin1",
            "ffn.lin2",
            "output_layer_norm",
        ),
        HeadNames("pre_classifier", "relu", "classifier"),
        {
            "dim": 768,
            "n_heads": 12,
            "n_layers": 6,
            "hidden_dim": 3072,
            "max_position_embeddings": 512,
            "activation": "gelu",
        },
        {
            "hidden_size": "dim",
            "num_attention_heads": "n_heads",
            "num_hidden_layers": "n_layers",
            "intermediate_size": "hidden_dim",
            "hidden_act": "activation",
        },
    ),
    "ModernBert": EncoderFamily(
        "model.",
        LayerNames(
            "layers.{}.",
            ("attn.Wqkv",),
            "attn.Wo",
            "attn_norm",
            "mlp.Wi",
            "mlp.Wo",
            "mlp_norm",
            gated=True,
        ),
        HeadNames("head.dense", "gelu", "classifier", norm="head.norm"),
        {
            "hidden_size": 768,
            "num_attention_heads": 12,
            "num_hidden_layers": 22,
            "intermediate_size": 1152,
            "max_position_embeddings": 8192,
            "hidden_activation": "gelu",
            "norm_eps": 1e-5,
            "local_attention": 128,
            "global_attn_every_n_layers": 3,
            "global_rope_theta": 160_000.0,
            "local_rope_theta": 10_000.0,
            "classifier_pooling": "cls",
            "classifier_activation": "gelu",
        },
        {"hidden_act": "hidden_activation", "layer_norm_eps": "norm_eps"},
        words="embeddings.tok_embeddings",
        embeddings_norm="embeddings.norm",
        positions=None,
        final_norm="final_norm",
        pre_norm=True,
        first_norm=False,
        is_modern=True,
    ),
    "NomicBert": EncoderFamily(
        "nomic_bert.",
        LayerNames(
            "encoder.layers.{}.",
            ("attn.Wqkv",),
            "attn.out_proj",
            "norm1",
            "mlp.fc11",
            "mlp.fc2",
            "norm2",
            gated=True,
            gate="mlp.fc12",
        ),
        None,
        {
            **_BERT_DEFAULTS,
            "vocab_size": 30528,
            "max_position_embeddings": 2048,
            "hidden_act": "silu",
            "rotary_emb_base": 1000.0,
        },
        {
            "hidden_size": "n_embd",
            "num_attention_heads": "n_head",
            "num_hidden_layers": "n_layer",
            "intermediate_size": "n_inner",
            "max_position_embeddings": "n_positions",
            "layer_norm_eps": "layer_norm_epsilon",
            "hidden_act": "activation_function",
        },
        embeddings_norm="emb_ln",
        positions=None,
        types=_TYPES,
        is_rotary=True,
        refused={
            "rotary_emb_interleaved": (True,),
            "prenorm": (True,),
            "use_rms_norm": (True,),
            "causal": (True,),
            "qkv_proj_bias": (True,),
            "mlp_fc1_bias": (True,),
            "mlp_fc2_bias": (True,),
        },
    ),
}
ENCODERS: Mapping[str, EncoderFamily] = {
    f"{name}{end}": family
    for name, family in _FAMILIES.items()
    for end in ("Model", "ForMaskedLM", "ForPreTraining", CLASSIFIER)
    if end != CLASSIFIER or family.head is not None
}
"""By the name in config.json's `architectures`."""


@dataclass(frozen=True, slots=True)
class EncoderRotary:
    """Rotary positions: bases of layers that see all tokens and of those that see a window.

    window: tokens that the latter see to each side.
    """

    theta: float
    sliding_theta: float
    window: int
    sliding_layers: frozenset[int]


@dataclass(frozen=True, slots=True)
class EncoderShape:
    """Sizes and arithmetic of one encoder. `max_position`: tokens of the longest text, or rows of
    an image.

    `has_bias`: of the linear layers of attention and MLP. `norm_bias`: of the norms.
    `relative_buckets`: of a bias on scores by distance; 0 without. `head_bias`: of a classifier's
    first layer. `pools_mean`: a classifier reads the mean of all rows, not the first.
    """

    family: EncoderFamily
    num_layers: int
    hidden_size: int
    num_heads: int
    intermediate_size: int
    vocab_size: int
    max_position: int
    type_vocab_size: int
    norm_eps: float
    activation: Activation
    dtype: str
    attention_bias: bool = True
    mlp_bias: bool = True
    norm_bias: bool = True
    head_bias: bool = True
    pools_mean: bool = False
    relative_buckets: int = 0
    rotary: EncoderRotary | None = None

    @staticmethod
    def from_config(config: Mapping[str, object]) -> "EncoderShape":
        """The shape in a config.json of an architecture of `ENCODERS`; raises SizingError."""
        architecture = encoder_architecture(config)
        if architecture is None:
            raise SizingError("config.json: architectures names no text encoder that is built.")
        return EncoderShape.of(config, ENCODERS[architecture])

    @staticmethod
    def of(config: Mapping[str, object], family: EncoderFamily) -> "EncoderShape":
        """The shape of a model, or of a part of one, of this family; raises SizingError."""
        values = _values(config, family)
        hidden_size, num_heads = (
            positive(values, "hidden_size"),
            positive(values, "num_attention_heads"),
        )
        if hidden_size % num_heads:
            raise SizingError(
                f"config.json: hidden_size {hidden_size} is not a multiple of "
                f"num_attention_heads {num_heads}."
            )
        num_layers = positive(values, "num_hidden_layers", most=MAX_LAYERS)
        is_modern, has_bias = family.is_modern, not family.is_rotary
        return EncoderShape(
            family=family,
            num_layers=num_layers,
            hidden_size=hidden_size,
            num_heads=num_heads,
            intermediate_size=positive(values, "intermediate_size"),
            vocab_size=positive(values, "vocab_size") if family.words else 0,
            max_position=_max_position(values, family),
            type_vocab_size=positive(values, "type_vocab_size", 2) if family.types else 0,
            norm_eps=_number(values, "layer_norm_eps", 1e-12),
            activation=_activation(values),
            dtype=dtype_of(config),
            attention_bias=has_bias and (not is_modern or values.get("attention_bias") is True),
            mlp_bias=has_bias and (not is_modern or values.get("mlp_bias") is True),
            norm_bias=not is_modern or values.get("norm_bias") is True,
            head_bias=not is_modern or values.get("classifier_bias") is True,
            pools_mean=_pools_mean(values),
            relative_buckets=_buckets(values) if family.relative_bias else 0,
            rotary=_rotary(values, num_layers, family),
        )

    @property
    def default_len(self) -> int:
        """As `max_position`."""
        return self.max_position

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_heads

    def weights_bytes(self, dtype_bytes: int) -> int:
        """Bytes of the weights, biases and norms included."""
        hidden, width = self.hidden_size, self.intermediate_size
        up = width * (2 if self.family.names.gated else 1)
        attention = 4 * hidden * hidden + 4 * hidden * self.attention_bias
        mlp = hidden * (up + width) + (up + hidden) * self.mlp_bias
        norm = hidden * (1 + self.norm_bias)
        rows = self.vocab_size + self.type_vocab_size
        if self.family.positions:
            rows += self.max_position + self.family.first_position
        bias = self.relative_buckets * self.num_heads
        total = self.num_layers * (attention + mlp + 2 * norm) + rows * hidden + 2 * norm + bias
        return total * dtype_bytes

    def activation_bytes(self, num_tokens: int, dtype_bytes: int) -> int:
        """Peak bytes of a step of `num_tokens`: the wider of attention and MLP, and the residual
        stream."""
        wide = self.intermediate_size * (3 if self.family.names.gated else 2)
        return num_tokens * dtype_bytes * (3 * self.hidden_size + max(wide, 5 * self.hidden_size))


def encoder_architecture(config: Mapping[str, object]) -> str | None:
    """The name of a text encoder that is built here, or None."""
    names = config.get("architectures")
    if isinstance(names, list) and len(names) == 1 and names[0] in ENCODERS:
        return str(names[0])
    return None


def _values(config: Mapping[str, object], family: EncoderFamily) -> dict[str, object]:
    """The config under BERT's names, with what transformers assumes; raises SizingError."""
    values = {**family.defaults, **{k: v for k, v in config.items() if v is not None}}
    named = {ours: values.get(theirs) for ours, theirs in family.keys.items()}
    values |= {name: value for name, value in named.items() if value is not None}
    if values.get("position_embedding_type", "absolute") != "absolute":
        raise SizingError("config.json: position_embedding_type is built for absolute only.")
    for name, refused in family.refused.items():
        if values.get(name) in refused:
            raise SizingError(f"config.json: {name} {str(values[name]).lower()} is not built.")
    if values.get("quantization_config") is not None:
        raise SizingError(IS_QUANTISED)
    return values


def _pools_mean(values: Mapping[str, object]) -> bool:
    """ModernBERT's choice; others read the first row."""
    if values.get("classifier_activation", "gelu") != "gelu":
        raise SizingError("config.json: classifier_activation is built for gelu only.")
    pooling = values.get("classifier_pooling", "cls")
    if pooling not in ("cls", "mean"):
        raise SizingError("config.json: classifier_pooling must be cls or mean.")
    return pooling == "mean"


def _buckets(values: Mapping[str, object]) -> int:
    return positive(values, "relative_attention_num_buckets", most=MAX_BUCKETS)


def _max_position(values: Mapping[str, object], family: EncoderFamily) -> int:
    most = positive(values, "max_position_embeddings") - family.first_position
    if most < 1:
        raise SizingError("config.json: max_position_embeddings leaves no place for a token.")
    return most


def _activation(values: Mapping[str, object]) -> Activation:
    asked = values.get("hidden_act")
    asked = "silu" if asked == "swiglu" else asked
    built: tuple[Activation, ...] = get_args(Activation)
    for activation in built:
        if asked == activation:
            return activation
    raise SizingError(f"config.json: the activation must be one of {', '.join(built)}.")


def _number(values: Mapping[str, object], name: str, default: float) -> float:
    value = values.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e9:
        raise SizingError(f"config.json: {name} must be a positive number.")
    return float(value)


def _rotary(
    values: Mapping[str, object], num_layers: int, family: EncoderFamily
) -> EncoderRotary | None:
    if family.is_rotary:
        scaling = values.get("rotary_scaling_factor")
        if scaling is not None or values.get("rotary_emb_fraction", 1) != 1:
            raise SizingError("config.json: rotary_scaling_factor and _fraction are not built.")
        own = values.get("rope_parameters")
        theta = _own_theta(own if isinstance(own, Mapping) else {}, values, "rotary_emb_base")
        return EncoderRotary(theta, theta, 0, frozenset())
    return _modern_rotary(values, num_layers) if family.is_modern else None


def _modern_rotary(values: Mapping[str, object], num_layers: int) -> EncoderRotary:
    """ModernBERT's: `layer_types` and `rope_parameters`, or the names of older checkpoints."""
    kinds = values.get("layer_types")
    if kinds is None:
        every = positive(values, "global_attn_every_n_layers")
        sliding = frozenset(layer for layer in range(num_layers) if layer % every)
    elif isinstance(kinds, list) and len(kinds) == num_layers:
        if set(kinds) - {"full_attention", "sliding_attention"}:
            raise SizingError("config.json: layer_types names a layer that is not built.")
        sliding = frozenset(i for i, kind in enumerate(kinds) if kind == "sliding_attention")
    else:
        raise SizingError(f"config.json: layer_types must be a list of {num_layers} names.")
    return EncoderRotary(
        _theta(values, "full_attention", "global_rope_theta"),
        _theta(values, "sliding_attention", "local_rope_theta"),
        positive(values, "local_attention") // 2,
        sliding,
    )


def _theta(values: Mapping[str, object], kind: str, old: str) -> float:
    rope = values.get("rope_parameters")
    own = rope.get(kind) if isinstance(rope, Mapping) else None
    return _own_theta(own if isinstance(own, Mapping) else {}, values, old)


def _own_theta(rope: Mapping[str, object], values: Mapping[str, object], old: str) -> float:
    """The base in `rope`, or under its `old` name."""
    if rope.get("rope_type", "default") != "default":
        raise SizingError("config.json: rope_parameters are built for rope_type default only.")
    return _number(rope, "rope_theta", _number(values, old, 10_000.0))
