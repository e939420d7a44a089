"""What the API process must know of a model that makes vectors or classes, from its files."""

from collections.abc import Mapping
from dataclasses import dataclass

from sluice_core.model.architecture import ModelShape
from sluice_core.model.classes import Classes
from sluice_core.model.files import Directory
from sluice_core.model.images import ImageShape, JointShape, Pixels, Similarity
from sluice_core.model.sentence import Sentence, TokenScore
from sluice_core.model.stored import Weights
from sluice_core.model.tasks import Task, read_sentence, vector_shape

from ..base.config import EngineConfig
from .images import ImageReader


@dataclass(frozen=True, slots=True)
class VectorFacts:
    """`sentence`: how texts are read, None if none are; `images` likewise. `classes`: of a
    classifier; `token_score`: of one that writes. `similarity`: of images and texts in one space.
    """

    sentence: Sentence | None
    images: ImageReader | None
    classes: Classes | None
    token_score: TokenScore | None
    similarity: Similarity | None

    @property
    def normalizes(self) -> bool:
        """True if vectors have the length 1."""
        own = self.sentence is not None and self.sentence.normalizes
        return own or self.similarity is not None


def read_vector_facts(
    task: Task, source: Directory, config: Mapping[str, object], engine: EngineConfig
) -> VectorFacts:
    """Read them. Raises StartupError with one sentence."""
    shape = vector_shape(config)
    classes = Classes.read(source, config) if task == "classify" else None
    if isinstance(shape, ImageShape):
        return VectorFacts(None, _reader(source, shape), classes, None, None)
    sentence = read_sentence(task, source, shape)
    if isinstance(shape, JointShape):
        weights = Weights.of(source) if engine.load_format != "dummy" else None
        similarity = Similarity.read(shape, weights)
        return VectorFacts(sentence, _reader(source, shape.images), None, None, similarity)
    score = None
    if classes is not None and isinstance(shape, ModelShape):
        score = TokenScore.read(source, shape.vocab_size)
    return VectorFacts(sentence, None, classes, score, None)


def _reader(source: Directory, shape: ImageShape) -> ImageReader:
    pixels = Pixels.read(source, shape)
    return ImageReader(pixels, shape.num_rows(pixels))
