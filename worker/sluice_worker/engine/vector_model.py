"""From a checkpoint to a model that makes vectors: what its files ask for, and its weights."""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol

import torch
from sluice_core.errors import UnsupportedModel
from sluice_core.model.architecture import HEAD, ModelShape
from sluice_core.model.classes import Classes
from sluice_core.model.encoders import EncoderShape
from sluice_core.model.files import Directory
from sluice_core.model.images import ImageShape, JointShape, Pixels
from sluice_core.model.sentence import Sentence, TokenScore
from sluice_core.model.sizing import DEFAULT_BLOCK_SIZE
from sluice_core.model.stored import Weights, read_config, with_stored_dtype
from sluice_core.model.tasks import (
    Shape,
    image_part,
    read_sentence,
    task_of,
    vector_shape,
    without_head,
)
from sluice_core.model.vectors import runs_as
from sluice_kernels.interface import Kernels
from torch import Tensor

from ..base.config import EngineConfig
from ..execution.encoders.classifier import DecoderHead, EncoderHead, TokenHead
from ..execution.encoders.decoded import DecodedTexts
from ..execution.encoders.encoder import Encoder
from ..execution.encoders.files import Spellings, VectorFiles, of_decoder, of_encoder
from ..execution.encoders.images import (
    ImageEncoder,
    ImageEnding,
    TextVectors,
    first_row,
    read_classifier,
    read_image_vectors,
)
from ..execution.encoders.pooling import Pooler
from ..execution.encoders.texts import FlatTexts
from ..execution.models.config import DecoderConfig
from ..execution.models.decoder import DecoderBody
from ..execution.models.linear import ReadTensor
from ..execution.weights import random_weights
from ..scheduling.texts import WaitingText
from .machine import Machine

Ending = Callable[[Tensor, FlatTexts], Tensor]
"""(rows [num_rows, hidden_size], texts) -> float32 [num_texts, width]."""


class TextRows(Protocol):
    """A model that reads texts."""

    def hidden(self, texts: FlatTexts) -> Tensor:
        """The last layer's output, [num_rows, hidden_size]."""


class Texts(NamedTuple):
    """How texts are read: the model, and what makes a vector of the rows of each."""

    rows: TextRows
    ending: Ending


class Images(NamedTuple):
    """How images of one size are read, as `Texts`."""

    rows: ImageEncoder
    ending: ImageEnding
    pixels: Pixels


class VectorModel:
    """The model of an `EncodingEngine` on one device: it makes a vector of each text and image, or
    the numbers of its classes. `texts`, `images`: None for those that it does not read."""

    def __init__(self, texts: Texts | None, images: Images | None, device: torch.device) -> None:
        self._texts, self._images, self._device = texts, images, device

    @torch.inference_mode()
    def vectors(self, texts: Sequence[WaitingText]) -> list[bytes | None]:
        """Packed float32 of each text or image, or None if it is not finite."""
        found = dict[str, bytes | None]()
        words = [text for text in texts if not text.pixels]
        seen = [text for text in texts if text.pixels]
        if words:
            found |= _packed(words, self._of_texts(words))
        if seen:
            found |= _packed(seen, self._of_images(seen))
        return [found[text.request_id] for text in texts]

    def _of_texts(self, texts: Sequence[WaitingText]) -> Tensor:
        assert self._texts is not None  # the API process has looked
        batch = FlatTexts.of(
            [text.token_ids for text in texts],
            self._device,
            skipped=[text.num_skipped for text in texts],
            seconds=[text.num_second for text in texts],
        )
        return self._texts.ending(self._texts.rows.hidden(batch), batch)

    def _of_images(self, images: Sequence[WaitingText]) -> Tensor:
        assert self._images is not None
        both = bytearray().join(image.pixels for image in images)
        batch = torch.frombuffer(both, dtype=torch.uint8).to(self._device)
        rows = self._images.rows.hidden(batch.view(len(images), *self._images.pixels.shape, -1))
        return self._images.ending(rows)


def _packed(texts: Sequence[WaitingText], found: Tensor) -> dict[str, bytes | None]:
    found = found.cpu()
    is_finite = found.isfinite().all(dim=-1).tolist()
    each = zip(texts, found.numpy(), is_finite, strict=True)
    return {text.request_id: row.tobytes() if fine else None for text, row, fine in each}


class Asked(NamedTuple):
    """What is to be loaded. `dtype`: its name; `max_len`: tokens of the longest text; `classes`:
    of a classifier; `pixels`: of a model that reads images."""

    classes: Classes | None
    config_json: Mapping[str, object]
    shape: Shape
    sentence: Sentence
    pixels: Pixels | None
    dtype: str
    max_len: int

    @property
    def image(self) -> ImageShape | None:
        """The part that reads images."""
        return image_part(self.shape)

    @property
    def image_rows(self) -> int:
        """Rows of an image; 0 if none is read."""
        shape = self.image
        return shape.num_rows(self.pixels) if shape is not None and self.pixels is not None else 0


def read_asked(source: Directory, config: EngineConfig, kind: str) -> Asked:
    """What a checkpoint's files and the flags ask for. `kind`: of the device."""
    config_json = read_config(source)
    if config.load_format != "dummy":
        config_json = with_stored_dtype(config_json, Weights.of(source))
    shape = vector_shape(config_json)
    task = task_of(source, config_json)
    sentence = read_sentence(task, source, shape)
    most = shape.default_len
    dtype = runs_as(config.dtype, shape, on_cpu=kind == "cpu")
    if sentence.is_padded and (config.max_model_len or most) < (sentence.max_seq_length or most):
        raise UnsupportedModel(
            f"--max-model-len {config.max_model_len}: this model's texts are padded to "
            f"{sentence.max_seq_length} tokens."
        )
    limits = (most, sentence.max_seq_length or most, config.max_model_len or most)
    classes = Classes.read(source, config_json) if task == "classify" else None
    asked = Asked(classes, config_json, shape, sentence, None, dtype, min(limits))
    image = asked.image
    if image is None:
        return asked
    asked = asked._replace(pixels=Pixels.read(source, image))
    return asked if isinstance(shape, JointShape) else asked._replace(max_len=asked.image_rows)


def load(
    config: EngineConfig, source: Directory, asked: Asked, machine: Machine, kernels: Kernels
) -> VectorModel:
    """The model with its weights, or random ones."""
    dtype, device = getattr(torch, asked.dtype), machine.device
    files = None
    if config.load_format != "dummy":
        spellings: Spellings = of_decoder
        if not isinstance(asked.shape, ModelShape):
            layers = asked.image.layers if asked.image is not None else asked.shape
            assert isinstance(layers, EncoderShape)
            spellings = of_encoder(layers.family)
        files = VectorFiles(source.path, dtype, device, spellings)
    read = files.read if files else random_weights(config.seed or 0, dtype, device)
    block_size = config.block_size or DEFAULT_BLOCK_SIZE[machine.kind]
    texts = _texts(source, asked, read, files, kernels, block_size)
    model = VectorModel(texts, _images(asked, read, kernels), device)
    if files:
        files.finish()
    return model


def _texts(
    source: Directory,
    asked: Asked,
    read: ReadTensor,
    files: VectorFiles | None,
    kernels: Kernels,
    block_size: int,
) -> Texts | None:
    match asked.shape:
        case ImageShape():
            return None
        case JointShape() as shape:
            return Texts(Encoder(shape.texts, read, kernels), TextVectors(shape, read))
        case EncoderShape() as shape:
            rows: TextRows = Encoder(shape, read, kernels)
        case ModelShape():
            config = DecoderConfig.from_json(without_head(asked.config_json), asked.max_len)
            rows = DecodedTexts(DecoderBody(config, read, kernels), block_size)
    ending = _token_head(source, asked, read, rows) or _ending(asked, read, files)
    return Texts(rows, ending)


def _images(asked: Asked, read: ReadTensor, kernels: Kernels) -> Images | None:
    image, pixels = asked.image, asked.pixels
    if image is None or pixels is None:
        return None
    rows = ImageEncoder(image, pixels, read, kernels)
    if isinstance(asked.shape, JointShape):
        return Images(rows, read_image_vectors(asked.shape, read, kernels), pixels)
    if asked.classes is None:
        return Images(rows, first_row, pixels)
    return Images(rows, read_classifier(image, len(asked.classes.labels), read), pixels)


def _ending(asked: Asked, read: ReadTensor, files: VectorFiles | None) -> Ending:
    if asked.classes is None:
        return Pooler(asked.sentence, files.folder if files else lambda folder: read)
    num_classes = len(asked.classes.labels)
    if isinstance(asked.shape, EncoderShape):
        return EncoderHead(asked.shape, num_classes, read)
    assert isinstance(asked.shape, ModelShape)
    return DecoderHead(asked.shape, num_classes, read)


def _token_head(source: Directory, asked: Asked, read: ReadTensor, rows: TextRows) -> Ending | None:
    """The head of a reranker that writes; None for another model."""
    if asked.classes is None or not isinstance(rows, DecodedTexts):
        return None
    shape = ModelShape.from_config(asked.config_json)
    score = TokenScore.read(source, shape.vocab_size)
    if score is None:
        return None
    head = rows.model.embedding
    if not shape.tie_word_embeddings:
        head = read(HEAD, (shape.vocab_size, shape.hidden_size))
    return TokenHead(head, rows.model, score.true_id, score.false_id)
