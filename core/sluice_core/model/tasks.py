"""What a checkpoint is for: text, or vectors or classes of texts and images. Pure."""

from collections.abc import Mapping
from typing import Literal

from ..errors import UnsupportedModel
from .architecture import ModelShape, SizingError
from .encoders import CLASSIFIER, ENCODERS, EncoderShape, encoder_architecture
from .families import FAMILIES
from .files import Source
from .images import ImageShape, JointShape, image_shape, image_task, read_captions
from .sentence import MODULES, Sentence, scores_tokens, tokenizer_length

Task = Literal["generate", "embed", "classify"]
_DECODER = "ForCausalLM"
_STEMS = {name.removesuffix(_DECODER): name for name in FAMILIES if name != "Gemma3ForCausalLM"}
_STEMS["Gemma3Text"] = "Gemma3ForCausalLM"  # Gemma3Model reads images too
_HEADLESS = {f"{stem}Model": name for stem, name in _STEMS.items()}
_CLASSIFYING = {f"{stem}{CLASSIFIER}": name for stem, name in _STEMS.items()}
"""Decoders with another head than that for text, or none: the name of the same with that one."""


def task_of(source: Source, config: Mapping[str, object]) -> Task:
    """The task of a checkpoint. A decoder makes vectors if it has no head, or if
    sentence-transformers' modules lie beside it, as in vLLM; classes if one is LogitScore."""
    name = _name(config)
    if (task := image_task(name)) is not None:
        return task
    if name.endswith(CLASSIFIER) and (name in ENCODERS or name in _CLASSIFYING):
        return "classify"
    if name in FAMILIES and MODULES in source.names():
        return "classify" if scores_tokens(source) else "embed"
    return "embed" if name in ENCODERS or name in _HEADLESS else "generate"


def without_head(config: Mapping[str, object]) -> Mapping[str, object]:
    """The config of a decoder whose head nobody reads: its architecture's usual name, and tied."""
    name = _name(config)
    usual = _HEADLESS.get(name) or _CLASSIFYING.get(name) or name
    return {**config, "architectures": [usual], "tie_word_embeddings": True}


Shape = EncoderShape | ModelShape | ImageShape | JointShape
"""Of a model that makes vectors or classes."""


def image_part(shape: object) -> ImageShape | None:
    """The part of a model that reads images; None if it reads none."""
    part = shape.images if isinstance(shape, JointShape) else shape
    return part if isinstance(part, ImageShape) else None


def vector_shape(config: Mapping[str, object]) -> Shape:
    """The shape of a model that makes vectors or classes; raises UnsupportedModel."""
    try:
        if (shape := image_shape(config)) is not None:
            return shape
    except SizingError as error:
        raise UnsupportedModel(str(error)) from error
    return text_shape(config)


def text_shape(config: Mapping[str, object]) -> EncoderShape | ModelShape:
    """The shape of a model that reads texts alone; raises UnsupportedModel."""
    try:
        if encoder_architecture(config) is not None:
            return EncoderShape.from_config(config)
        return ModelShape.from_config(without_head(config))
    except SizingError as error:
        raise UnsupportedModel(str(error)) from error


def read_sentence(task: Task, source: Source, shape: Shape) -> Sentence:
    """How a checkpoint reads its texts, and makes vectors of them if that is its task."""
    if isinstance(shape, JointShape):
        return read_captions(source, shape)
    if task == "embed":
        return Sentence.read(source, shape.hidden_size)
    return Sentence(max_seq_length=tokenizer_length(source))


def _name(config: Mapping[str, object]) -> str:
    names = config.get("architectures")
    return names[0] if isinstance(names, list) and names and isinstance(names[0], str) else ""
