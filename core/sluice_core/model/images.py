"""Models that read images: architectures, sizes, and how an image becomes pixels. Pure.

The facts are transformers' (modeling_*, configuration_* and image_processing_pil_* of version
5.23). A file that asks for another way refuses the checkpoint: a wrong vector is worse than none.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import exp, fsum
from operator import mul
from typing import Literal, NamedTuple

from ..errors import CheckpointError
from .architecture import SizingError, positive
from .encoders import EncoderFamily, EncoderShape, LayerNames
from .files import Source, json_object, read_bytes
from .sentence import MAX_BYTES, MODULES, Sentence, tokenizer_config, tokenizer_length
from .stored import Weights, read_number

MAX_SIDE = 2048
CHANNELS = 3
MAX_LOGIT_SCALE = 20.0
MAX_PIXELS = 1 << 25
"""Of an image as it is sent, and as it is resized."""
DECODING_BYTES = 7 * MAX_PIXELS
"""For one image at a time: as it is in its file, with transparency, and in RGB."""
PROCESSOR = "preprocessor_config.json"
PROCESSORS = "processor_config.json"
"""Of version 5 on, for models that read texts too."""
Ending = Literal["first", "first_and_mean", "first_two", "attention"]
Rgb = tuple[float, float, float]
_HALF: Rgb = (0.5, 0.5, 0.5)
_CLIP_MEAN: Rgb = (0.48145466, 0.4578275, 0.40821073)
_CLIP_STD: Rgb = (0.26862954, 0.26130258, 0.27577711)
_BILINEAR, _BICUBIC = 2, 3


class _Usual(NamedTuple):
    """What an image processor does where its file says nothing. `is_square`: a size of one number
    is that of both sides, not of the shorter."""

    size: Mapping[str, int]
    resample: int
    is_square: bool
    crops: bool
    mean: Rgb
    std: Rgb


_USUAL: Mapping[str, _Usual] = {
    "ViT": _Usual({"height": 224, "width": 224}, _BILINEAR, True, False, _HALF, _HALF),
    "DeiT": _Usual({"height": 256, "width": 256}, _BICUBIC, True, True, _HALF, _HALF),
    "CLIP": _Usual({"shortest_edge": 224}, _BICUBIC, False, True, _CLIP_MEAN, _CLIP_STD),
    "Bit": _Usual({"shortest_edge": 224}, _BICUBIC, False, True, _CLIP_MEAN, _CLIP_STD),
    "Siglip": _Usual({"height": 224, "width": 224}, _BICUBIC, False, False, _HALF, _HALF),
}


@dataclass(frozen=True, slots=True)
class ImageFamily:
    """One architecture. patches: a convolution. tokens: rows in front of the patches. `first_norm`:
    in front of the layers. ending: the rows that a vector or a class is made of. processor: the
    usual one. `stretches`: positions are made for the image's size."""

    layers: EncoderFamily
    patches: str
    positions: str
    tokens: tuple[str, ...]
    ending: Ending
    processor: str
    patch_bias: bool = True
    first_norm: str | None = None
    stretches: bool = False


def _vit_layer(
    norms: tuple[str, str], mlp: tuple[str, str], scales: tuple[str, str] | None = None
) -> LayerNames:
    return LayerNames(
        "encoder.layer.{}.",
        tuple(f"attention.attention.{part}" for part in ("query", "key", "value")),
        "attention.output.dense",
        norms[0],
        *mlp,
        norms[1],
        scales=scales,
    )


def _vision(
    prefix: str, names: LayerNames, final_norm: str, defaults: Mapping[str, object]
) -> EncoderFamily:
    return EncoderFamily(
        prefix,
        names,
        None,
        {**_VIT_DEFAULTS, **defaults},
        {},
        words=None,
        embeddings_norm=None,
        final_norm=final_norm,
        pre_norm=True,
    )


_VIT_DEFAULTS = {
    "hidden_size": 768,
    "num_attention_heads": 12,
    "num_hidden_layers": 12,
    "intermediate_size": 3072,
    "hidden_act": "gelu",
    "layer_norm_eps": 1e-12,
    "image_size": 224,
    "patch_size": 16,
}
_VIT_NAMES = _vit_layer(
    ("layernorm_before", "layernorm_after"), ("intermediate.dense", "output.dense")
)
_PATCHES, _POSITIONS = "embeddings.patch_embeddings.projection", "embeddings.position_embeddings"
_VIT = ImageFamily(
    _vision("vit.", _VIT_NAMES, "layernorm", {}),
    _PATCHES,
    _POSITIONS,
    ("embeddings.cls_token",),
    "first",
    "ViT",
)
_DEIT = ImageFamily(
    _vision("deit.", _VIT_NAMES, "layernorm", {}),
    _PATCHES,
    _POSITIONS,
    ("embeddings.cls_token", "embeddings.distillation_token"),
    "first",
    "DeiT",
)
_DINOV2 = ImageFamily(
    _vision(
        "dinov2.",
        _vit_layer(
            ("norm1", "norm2"),
            ("mlp.fc1", "mlp.fc2"),
            scales=("layer_scale1.lambda1", "layer_scale2.lambda1"),
        ),
        "layernorm",
        {"layer_norm_eps": 1e-6, "patch_size": 14},
    ),
    _PATCHES,
    _POSITIONS,
    ("embeddings.cls_token",),
    "first",
    "Bit",
    stretches=True,
)
_IMAGE_MODELS: Mapping[str, ImageFamily] = {
    "ViTModel": _VIT,
    "DeiTModel": _DEIT,
    "Dinov2Model": _DINOV2,
}
_IMAGE_CLASSIFIERS: Mapping[str, ImageFamily] = {
    "ViTForImageClassification": _VIT,
    "DeiTForImageClassification": _DEIT,
    "DeiTForImageClassificationWithTeacher": replace(_DEIT, ending="first_two"),
    "Dinov2ForImageClassification": replace(_DINOV2, ending="first_and_mean"),
}


def _tower_names(tower: str) -> LayerNames:
    return LayerNames(
        f"{tower}.encoder.layers.{{}}.",
        tuple(f"self_attn.{part}_proj" for part in "qkv"),
        "self_attn.out_proj",
        "layer_norm1",
        "mlp.fc1",
        "mlp.fc2",
        "layer_norm2",
    )


def _texts(defaults: Mapping[str, object], *, is_causal: bool) -> EncoderFamily:
    return EncoderFamily(
        "",
        _tower_names("text_model"),
        None,
        defaults,
        {},
        words="text_model.embeddings.token_embedding",
        embeddings_norm=None,
        positions="text_model.embeddings.position_embedding",
        final_norm="text_model.final_layer_norm",
        pre_norm=True,
        is_causal=is_causal,
    )


def _images(defaults: Mapping[str, object]) -> EncoderFamily:
    names = _tower_names("vision_model")
    return _vision("", names, "vision_model.post_layernorm", defaults)


@dataclass(frozen=True, slots=True)
class JointFamily:
    """Texts and images in one space. `logit_scale`, `logit_bias`: a random model's."""

    texts: EncoderFamily
    images: ImageFamily
    is_siglip: bool
    logit_scale: float
    logit_bias: float | None


_SIGLIP_DEFAULTS = {
    "hidden_size": 768,
    "num_attention_heads": 12,
    "num_hidden_layers": 12,
    "intermediate_size": 3072,
    "hidden_act": "gelu_pytorch_tanh",
    "layer_norm_eps": 1e-6,
}
_CLIP_DEFAULTS = {"hidden_act": "quick_gelu", "layer_norm_eps": 1e-5}
_JOINT: Mapping[str, JointFamily] = {
    "CLIPModel": JointFamily(
        _texts(
            {
                "hidden_size": 512,
                "num_attention_heads": 8,
                "num_hidden_layers": 12,
                "intermediate_size": 2048,
                "vocab_size": 49408,
                "max_position_embeddings": 77,
                "eos_token_id": 49407,
                **_CLIP_DEFAULTS,
            },
            is_causal=True,
        ),
        ImageFamily(
            _images({"patch_size": 32, **_CLIP_DEFAULTS}),
            "vision_model.embeddings.patch_embedding",
            "vision_model.embeddings.position_embedding.weight",
            ("vision_model.embeddings.class_embedding",),
            "first",
            "CLIP",
            patch_bias=False,
            first_norm="vision_model.pre_layrnorm",
        ),
        is_siglip=False,
        logit_scale=2.6592,
        logit_bias=None,
    ),
    "SiglipModel": JointFamily(
        _texts(
            {"vocab_size": 32000, "max_position_embeddings": 64, **_SIGLIP_DEFAULTS},
            is_causal=False,
        ),
        ImageFamily(
            _images(_SIGLIP_DEFAULTS),
            "vision_model.embeddings.patch_embedding",
            "vision_model.embeddings.position_embedding.weight",
            (),
            "attention",
            "Siglip",
        ),
        is_siglip=True,
        logit_scale=2.3026,
        logit_bias=-10.0,
    ),
}


@dataclass(frozen=True, slots=True)
class ImageShape:
    """Sizes of a model that reads images. `image_size`: of each side, for which the positions are
    stored; `layers.max_position`: rows of an image of that size."""

    family: ImageFamily
    layers: EncoderShape
    image_size: int
    patch_size: int

    @staticmethod
    def of(config: Mapping[str, object], family: ImageFamily) -> "ImageShape":
        """The shape in a config of this family; raises SizingError."""
        values = {**family.layers.defaults, **{k: v for k, v in config.items() if v is not None}}
        side, patch = _side(values, "image_size"), _side(values, "patch_size")
        refused = {"use_swiglu_ffn": True, "qkv_bias": False, "vision_use_head": False}
        for name, value in refused.items():
            if values.get(name) is value:
                raise SizingError(f"config.json: {name} {str(value).lower()} is not built.")
        if values.get("num_channels", CHANNELS) != CHANNELS:
            raise SizingError(f"config.json: num_channels is built for {CHANNELS} only.")
        if "intermediate_size" not in config and isinstance(ratio := config.get("mlp_ratio"), int):
            values["intermediate_size"] = ratio * positive(values, "hidden_size")
        num_rows = (side // patch) ** 2 + len(family.tokens)
        values["max_position_embeddings"] = num_rows
        return ImageShape(family, EncoderShape.of(values, family.layers), side, patch)

    def num_rows(self, pixels: "Pixels") -> int:
        """Rows of an image as `pixels` has it."""
        height, width = (side // self.patch_size for side in pixels.shape)
        return height * width + len(self.family.tokens)

    def weights_bytes(self, dtype_bytes: int) -> int:
        """Bytes of the weights, heads left out."""
        patch = CHANNELS * self.patch_size**2 + 1
        return self.layers.weights_bytes(dtype_bytes) + patch * self.hidden_size * dtype_bytes

    @property
    def hidden_size(self) -> int:
        return self.layers.hidden_size

    @property
    def dtype(self) -> str:
        return self.layers.dtype

    @property
    def default_len(self) -> int:
        """Rows of an image of the stored size."""
        return self.layers.max_position


@dataclass(frozen=True, slots=True)
class JointShape:
    """Sizes of a model that reads images and texts. `width`: numbers of a vector. `eos_token_id`:
    of CLIP's texts, whose row is taken; where it is 2, that of the largest token id is."""

    family: JointFamily
    texts: EncoderShape
    images: ImageShape
    width: int
    eos_token_id: int

    @staticmethod
    def of(config: Mapping[str, object], family: JointFamily) -> "JointShape":
        """The shape in a config of this family; raises SizingError."""
        parts = [config.get(name) or {} for name in ("text_config", "vision_config")]
        if not all(isinstance(part, Mapping) for part in parts):
            raise SizingError("config.json: text_config and vision_config must be objects.")
        dtype = {k: config[k] for k in ("dtype", "torch_dtype") if k in config}
        text, vision = ({**part, **dtype} for part in parts if isinstance(part, Mapping))
        texts = EncoderShape.of(text, family.texts)
        images = ImageShape.of(vision, family.images)
        if family.is_siglip:
            width = images.hidden_size
            if positive(text, "projection_size", texts.hidden_size) != width:
                raise SizingError("config.json: projection_size is not the vision's hidden_size.")
        else:
            width = positive(config, "projection_dim", 512)
        eos = text.get("eos_token_id")
        return JointShape(family, texts, images, width, eos if isinstance(eos, int) else 49407)

    @property
    def hidden_size(self) -> int:
        return self.width

    @property
    def dtype(self) -> str:
        return self.texts.dtype

    @property
    def default_len(self) -> int:
        """Tokens of the longest text."""
        return self.texts.max_position


@dataclass(frozen=True, slots=True)
class Similarity:
    """How alike a text and an image are: their cosine times `scale`, plus `bias`; None for CLIP,
    whose numbers are a share of all texts'."""

    scale: float
    bias: float | None

    @staticmethod
    def read(shape: JointShape, weights: Weights | None) -> "Similarity":
        """That of a checkpoint; of a random model without weights. Raises CheckpointError."""
        family, bias = shape.family, shape.family.logit_bias
        if weights is None:
            return Similarity(exp(family.logit_scale), bias)
        scale = read_number(weights, "logit_scale")
        if bias is not None:
            bias = read_number(weights, "logit_bias")
        return Similarity(exp(min(scale, MAX_LOGIT_SCALE)), bias)

    def of(self, image: Sequence[float], text: Sequence[float]) -> float:
        """That of two vectors of the length 1."""
        return self.scale * fsum(map(mul, image, text)) + (self.bias or 0.0)


def image_shape(config: Mapping[str, object]) -> ImageShape | JointShape | None:
    """The shape of a model that reads images, or None for another; raises SizingError."""
    names = config.get("architectures")
    name = names[0] if isinstance(names, list) and len(names) == 1 else None
    if name in _JOINT:
        return JointShape.of(config, _JOINT[str(name)])
    family = {**_IMAGE_MODELS, **_IMAGE_CLASSIFIERS}.get(str(name))
    return ImageShape.of(config, family) if family is not None else None


def image_task(name: str) -> Literal["embed", "classify"] | None:
    """The task of an architecture that reads images; None for another."""
    if name in _IMAGE_CLASSIFIERS:
        return "classify"
    return "embed" if name in _JOINT or name in _IMAGE_MODELS else None


def read_captions(source: Source, shape: JointShape) -> Sentence:
    """How the texts of a model that reads images too are read: SigLIP has seen them padded only,
    without capitals and, with its own tokenizer, without punctuation. Raises CheckpointError."""
    most = min(shape.texts.max_position, tokenizer_length(source) or shape.texts.max_position)
    if not shape.family.is_siglip:
        return Sentence(max_seq_length=most)
    own = tokenizer_config(source).get("tokenizer_class") == "SiglipTokenizer"
    return Sentence(max_seq_length=most, lower_case=True, is_padded=True, lacks_punctuation=own)


@dataclass(frozen=True, slots=True)
class Pixels:
    """How an image becomes pixels: RGB, `size` (height and width, or the shorter side) by Pillow's
    filter `resample`, the middle of `crop`, and (value * scale - mean) / std of each channel."""

    size: tuple[int, int] | int
    resample: int
    crop: tuple[int, int] | None
    scale: float
    mean: Rgb
    std: Rgb

    @property
    def shape(self) -> tuple[int, int]:
        """Height and width of the result."""
        if self.crop is not None:
            return self.crop
        assert not isinstance(self.size, int)  # `read` refuses that
        return self.size

    @property
    def num_bytes(self) -> int:
        """Bytes of an image, before its numbers are scaled."""
        height, width = self.shape
        return height * width * CHANNELS

    @staticmethod
    def read(source: Source, shape: ImageShape) -> "Pixels":
        """As the image processor's file says; raises CheckpointError."""
        if MODULES in source.names():
            raise CheckpointError(f"{MODULES} is not built for a model that reads images.")
        config, name = _processor(source)
        kind = str(config.get("image_processor_type", config.get("feature_extractor_type", "")))
        for end in ("Fast", "Pil", "ImageProcessor", "FeatureExtractor"):
            kind = kind.removesuffix(end)
        usual = _USUAL.get(kind or shape.family.processor)
        if usual is None:
            raise CheckpointError(f"{name}: image_processor_type {kind[:64]} is not built.")
        if config.get("do_resize") is False or config.get("do_pad") is True:
            raise CheckpointError(f"{name}: do_resize false and do_pad are not built.")
        size = _size(config.get("size", usual.size), usual.is_square, f"{name}: size")
        crops = config.get("do_center_crop", usual.crops) is True
        crop = None
        if crops:
            crop = _pair(_size(config.get("crop_size", 224), True, f"{name}: crop_size"))
        if isinstance(size, int) and crop is None:
            raise CheckpointError(f"{name}: images of different sizes are not built.")
        rescales = config.get("do_rescale") is not False
        normalizes = config.get("do_normalize") is not False
        found = Pixels(
            size,
            _resample(config.get("resample", usual.resample), name),
            crop,
            _factor(config, name) if rescales else 1.0,
            _rgb(config, "image_mean", usual.mean, name) if normalizes else (0.0, 0.0, 0.0),
            _rgb(config, "image_std", usual.std, name) if normalizes else (1.0, 1.0, 1.0),
        )
        if not shape.family.stretches and found.shape != (shape.image_size,) * 2:
            raise CheckpointError(
                f"{name}: images of {found.shape[0]} x {found.shape[1]}, and config.json has an "
                f"image_size of {shape.image_size}."
            )
        if min(found.shape) < shape.patch_size or 0.0 in found.std:
            raise CheckpointError(f"{name}: a patch is larger than an image, or image_std is 0.")
        return found


def _processor(source: Source) -> tuple[Mapping[str, object], str]:
    names = source.names()
    if PROCESSOR in names:
        return json_object(read_bytes(source, PROCESSOR, MAX_BYTES), PROCESSOR), PROCESSOR
    if PROCESSORS in names:
        config = json_object(read_bytes(source, PROCESSORS, MAX_BYTES), PROCESSORS)
        own = config.get("image_processor")
        if isinstance(own, Mapping):
            return own, PROCESSORS
    raise CheckpointError(f"{source.title} has no {PROCESSOR}, which says how images are read.")


def _side(values: Mapping[str, object], name: str) -> int:
    """A size of two equal numbers, or of one; raises SizingError."""
    given = values.get(name)
    if isinstance(given, list) and len(given) == 2 and given[0] == given[1]:
        given = given[0]
    return positive({name: given}, name, most=MAX_SIDE)


def _size(given: object, is_square: bool, what: str) -> tuple[int, int] | int:
    """Height and width, or the shorter side; raises CheckpointError."""
    numbers: list[object] = [given]
    if isinstance(given, Mapping):
        keys = {name for name, value in given.items() if value is not None}
        if keys == {"height", "width"}:
            numbers = [given["height"], given["width"]]
        elif keys == {"shortest_edge"}:
            numbers, is_square = [given["shortest_edge"]], False
        else:
            raise CheckpointError(f"{what} {str(given)[:64]} is not built.")
    elif isinstance(given, list):
        numbers = given
    sides = [n for n in numbers if isinstance(n, int) and 0 < n <= MAX_SIDE]
    if len(sides) != len(numbers) or not 1 <= len(sides) <= 2:
        raise CheckpointError(f"{what} must be of sides of 1 to {MAX_SIDE}.")
    if len(sides) == 1 and not is_square:
        return sides[0]
    return sides[0], sides[-1]


def _pair(size: tuple[int, int] | int) -> tuple[int, int]:
    return (size, size) if isinstance(size, int) else size


def _resample(given: object, name: str) -> int:
    if isinstance(given, bool) or not isinstance(given, int) or not 0 <= given <= 5:
        raise CheckpointError(f"{name}: resample must be the number of a filter of Pillow.")
    return given


def _factor(config: Mapping[str, object], name: str) -> float:
    factor = config.get("rescale_factor", 1 / 255)
    if isinstance(factor, bool) or not isinstance(factor, int | float) or not 0 < factor <= 1:
        raise CheckpointError(f"{name}: rescale_factor must be over 0 and at most 1.")
    return float(factor)


def _rgb(config: Mapping[str, object], key: str, usual: Rgb, name: str) -> Rgb:
    given = config.get(key, usual)
    if isinstance(given, list | tuple) and len(given) == CHANNELS:
        numbers = [float(n) for n in given if isinstance(n, int | float) and abs(n) < 1e6]
        if len(numbers) == CHANNELS:
            return numbers[0], numbers[1], numbers[2]
    raise CheckpointError(f"{name}: {key} must be {CHANNELS} numbers.")
