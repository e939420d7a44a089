"""Small random models that read images, as transformers saves them, and pictures for them."""

import base64
import random
from io import BytesIO
from pathlib import Path
from typing import Any

import PIL.Image
import torch
from sluice_frontend.api.pooling.texts import Image
from transformers import AutoConfig, AutoModel, AutoModelForImageClassification
from transformers.models.bit.image_processing_pil_bit import BitImageProcessorPil
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.deit import (
    DeiTForImageClassification,
    DeiTForImageClassificationWithTeacher,
)
from transformers.models.deit.image_processing_pil_deit import DeiTImageProcessorPil
from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil
from transformers.models.vit.image_processing_pil_vit import ViTImageProcessorPil
from unit.worker.execution.encoder_models import VOCAB, save_tokenizer

SIDE = 32
SIZES = {
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 64,
}
VISION = {**SIZES, "image_size": SIDE, "patch_size": 8}
TEXT = {**SIZES, "vocab_size": VOCAB, "max_position_embeddings": 40}
SQUARE = {"height": SIDE, "width": SIDE}
_SINGLE: dict[str, dict[str, Any]] = {
    "vit": VISION,
    "deit": VISION,
    "dinov2": {**VISION, "image_size": 48, "mlp_ratio": 2, "layerscale_value": 0.7},
}
PROCESSORS: dict[str, Any] = {
    "vit": lambda: ViTImageProcessorPil(size=SQUARE),
    "deit": lambda: DeiTImageProcessorPil(size={"height": 40, "width": 40}, crop_size=SQUARE),
    "dinov2": lambda: BitImageProcessorPil(size={"shortest_edge": 40}, crop_size=SQUARE),
    "clip": lambda: CLIPImageProcessorPil(size={"shortest_edge": SIDE}, crop_size=SQUARE),
    "siglip": lambda: SiglipImageProcessorPil(size=SQUARE),
}
CLASSIFIERS = ("vit", "deit", "dinov2", "deit with teacher")
EMBEDDERS = ("vit", "deit", "dinov2")


def random_images_model(name: str, *, num_labels: int = 0) -> Any:
    """A model of images alone; a classifier if there are labels."""
    torch.manual_seed(0)
    kind = name.split()[0]
    more = {"num_labels": num_labels} if num_labels else {}
    config = AutoConfig.for_model(kind, **_SINGLE[kind], **more)
    if "teacher" in name:
        return shaken(DeiTForImageClassificationWithTeacher(config))
    if kind == "deit" and num_labels:
        return shaken(DeiTForImageClassification(config))
    loader = AutoModelForImageClassification if num_labels else AutoModel
    return shaken(loader.from_config(config))


def random_joint_model(name: str, **text: Any) -> Any:
    """A model of images and texts."""
    torch.manual_seed(0)
    own = {"projection_dim": 24} if name == "clip" else {}
    parts = {"text_config": {**TEXT, **text}, "vision_config": VISION}
    return shaken(AutoModel.from_config(AutoConfig.for_model(name, **parts, **own)))


def shaken(model: Any) -> Any:
    """`model` for inference, with no weight as it is at the start: zeros would hide a fault."""
    with torch.no_grad():
        for weight in model.parameters():
            weight += 0.1 * torch.randn_like(weight)
    return model.eval()


def save(path: Path, name: str, model: Any) -> None:
    """As its author would."""
    kind = name.split()[0]
    model.save_pretrained(path)
    PROCESSORS[kind]().save_pretrained(path)
    if kind in ("clip", "siglip"):
        save_tokenizer(path)


def pictures() -> list[PIL.Image.Image]:
    """Of many sizes, with smooth and rough parts; some are larger than others' crops."""
    rng, found = random.Random(3), []
    for width, height in ((64, 48), (33, 90), (17, 20), (SIDE, SIDE), (200, 31)):
        small = PIL.Image.frombytes("RGB", (5, 4), rng.randbytes(60))
        picture = small.resize((width, height), PIL.Image.Resampling.BICUBIC)
        picture.paste((255, 0, 10), (2, 3, width // 2, height // 2))
        found.append(picture)
    return found


def base64_of(picture: PIL.Image.Image, form: str = "PNG") -> str:
    """A file's base64."""
    file = BytesIO()
    picture.save(file, form)
    return base64.b64encode(file.getvalue()).decode()


def sent(picture: PIL.Image.Image, form: str = "PNG") -> Image:
    """A picture as a request brings it."""
    return Image(base64_of(picture, form))
