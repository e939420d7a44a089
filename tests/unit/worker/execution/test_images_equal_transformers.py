"""Vectors and classes of images, and of texts in their space, equal transformers."""

import json
from base64 import b64encode
from dataclasses import replace
from pathlib import Path
from typing import Any

import PIL.Image
import pytest
import torch
from sluice_core.errors import CheckpointError
from sluice_core.model.files import Directory
from sluice_frontend.api.pooling.texts import Image, TextsRequest
from sluice_worker.api.prompts import Prompts
from sluice_worker.api.vector_facts import VectorFacts, read_vector_facts
from sluice_worker.base.config import EngineConfig
from sluice_worker.base.resources import Resources
from sluice_worker.engine.machine import Machine
from sluice_worker.engine.vector_model import load, read_asked
from sluice_worker.scheduling.texts import WaitingText
from sluice_worker.text.texts import Read, TextReader
from sluice_worker.text.tokenizer import Tokenizer
from torch import Tensor
from transformers import AutoImageProcessor, AutoTokenizer
from unit.worker.engine.factories import PLAIN
from unit.worker.execution.image_models import (
    CLASSIFIERS,
    EMBEDDERS,
    PROCESSORS,
    pictures,
    random_images_model,
    random_joint_model,
    save,
    sent,
)

TEXTS = ["a dog", "The quick Brown fox, isn't it", "x", "on and on it runs"]


def facts(path: Path, task: Any) -> VectorFacts:
    config = json.loads((path / "config.json").read_text())
    return read_vector_facts(task, Directory(path), config, EngineConfig(model=str(path)))


def vectors(path: Path, read: list[Read], *, own_kernels: bool = False) -> Tensor:
    """Ours, in one step, by the engine's own way from files to numbers."""
    config = EngineConfig(model=str(path), dtype="float32", load_format="auto")
    machine = Machine(config, Resources())
    asked = read_asked(Directory(path), config, machine.kind)
    kernels = machine.kernels("float32") if own_kernels else PLAIN
    model = load(config, Directory(path), asked, machine, kernels)
    waiting = [
        WaitingText(str(n), list(one.token_ids), 0, 0.0, pixels=one.pixels)
        for n, one in enumerate(read)
    ]
    order = sorted(waiting, key=lambda text: len(text.token_ids))
    found = dict(zip((text.request_id for text in order), model.vectors(order), strict=True))
    packed = [found[text.request_id] for text in waiting]
    assert all(packed)
    return torch.stack(
        [torch.frombuffer(bytearray(one or b""), dtype=torch.float32) for one in packed]
    )


def images_read(
    path: Path, task: Any, images: list[PIL.Image.Image], form: str = "PNG"
) -> list[Read]:
    reader = facts(path, task).images
    assert reader is not None
    each = enumerate(sent(image, form) for image in images)
    return [Read(range(reader.num_rows), 0, pixels=reader.read(image, n)) for n, image in each]


def theirs(path: Path, name: str, images: list[PIL.Image.Image]) -> Tensor:
    kind = type(PROCESSORS[name.split()[0]]())
    pixels = [
        kind.from_pretrained(path)(image, return_tensors="pt")["pixel_values"] for image in images
    ]
    return torch.cat(pixels)


def assert_equal(ours: Tensor, expected: Tensor) -> None:
    assert torch.cosine_similarity(ours, expected).min() >= 0.9999
    assert torch.allclose(ours, expected, atol=5e-5, rtol=1e-3)


@pytest.mark.parametrize("own_kernels", [False, True])
@pytest.mark.parametrize("name", EMBEDDERS)
def test_vectors_of_images_equal_transformers(name: str, own_kernels: bool, tmp_path: Path) -> None:
    model = random_images_model(name)
    save(tmp_path, name, model)
    with torch.inference_mode():
        expected = model(theirs(tmp_path, name, pictures())).last_hidden_state[:, 0]
    read = images_read(tmp_path, "embed", pictures())
    assert_equal(vectors(tmp_path, read, own_kernels=own_kernels), expected)


@pytest.mark.parametrize("name", CLASSIFIERS)
def test_classes_of_images_equal_transformers(name: str, tmp_path: Path) -> None:
    model = random_images_model(name, num_labels=5)
    save(tmp_path, name, model)
    with torch.inference_mode():
        expected = model(theirs(tmp_path, name, pictures())).logits
    ours = vectors(tmp_path, images_read(tmp_path, "classify", pictures()))
    assert_equal(ours, expected)
    assert torch.equal(ours.argmax(-1), expected.argmax(-1))


@pytest.mark.parametrize("own_kernels", [False, True])
@pytest.mark.parametrize(("name", "eos"), [("clip", 3), ("clip", 2), ("siglip", 3)])
def test_images_and_texts_in_one_step_equal_transformers(
    name: str, eos: int, own_kernels: bool, tmp_path: Path
) -> None:
    model = random_joint_model(name, eos_token_id=eos)
    save(tmp_path, name, model)
    known = facts(tmp_path, "embed")
    config = json.loads((tmp_path / "config.json").read_text())
    tokenizer = Tokenizer(tmp_path)
    prompts = Prompts(tokenizer, config, parse_special=True)
    reader = TextReader(prompts, known.sentence, known.images, pad_id=tokenizer.pad_id)
    asked = TextsRequest(inputs=(*TEXTS, *(sent(picture) for picture in pictures())))
    ours = vectors(tmp_path, reader.read(asked, 40, cut=40), own_kernels=own_kernels)
    theirs_texts = AutoTokenizer.from_pretrained(tmp_path)
    texts = [text.lower() for text in TEXTS] if name == "siglip" else TEXTS
    padding: Any = {"padding": "max_length", "max_length": 40} if name == "siglip" else {}
    with torch.inference_mode():
        pixels = theirs(tmp_path, name, pictures())
        for number, text in enumerate(texts):
            ids = theirs_texts(text, return_tensors="pt", **padding)["input_ids"]
            both = model(input_ids=ids, pixel_values=pixels)
            assert_equal(ours[number : number + 1], both.text_embeds)
            assert known.similarity is not None
            found = [known.similarity.of(one, ours[number].tolist()) for one in ours[4:].tolist()]
            assert found == pytest.approx(both.logits_per_image[:, 0].tolist(), abs=1e-3)
        assert_equal(ours[4:], both.image_embeds)


def test_a_photo_is_turned_upright_and_a_small_one_is_framed(tmp_path: Path) -> None:
    """As transformers' `load_image` and its center crop have it."""
    name, picture = "dinov2", pictures()[0]
    save(tmp_path, name, random_images_model(name))
    exif = PIL.Image.Exif()
    exif[0x0112] = 6  # turned by a quarter
    picture.save(tmp_path / "turned.png", exif=exif)
    upright = picture.transpose(PIL.Image.Transpose.ROTATE_270)
    with_flag, without = images_read(tmp_path, "embed", [upright, upright])
    reader = facts(tmp_path, "embed").images
    assert reader is not None
    data = b64encode((tmp_path / "turned.png").read_bytes()).decode()
    assert reader.read(Image(data), 0) == with_flag.pixels == without.pixels


def changed(path: Path, **changes: Any) -> Directory:
    config = json.loads((path / "preprocessor_config.json").read_text())
    (path / "preprocessor_config.json").write_text(json.dumps({**config, **changes}))
    return Directory(path)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"image_processor_type": "LevitImageProcessor"}, "Levit is not built"),
        ({"do_resize": False}, "do_resize"),
        ({"do_pad": True}, "do_pad"),
        ({"size": {"shortest_edge": 32}}, "different sizes"),
        ({"size": {"longest_edge": 32}}, "is not built"),
        ({"size": {"height": 40, "width": 40}}, "image_size of 32"),
        ({"size": [0, 5]}, "sides of 1 to"),
        ({"image_mean": [0.5]}, "image_mean must be 3 numbers"),
        ({"image_std": [0, 1, 1]}, "image_std is 0"),
        ({"resample": 9}, "resample"),
        ({"rescale_factor": "x"}, "rescale_factor"),
    ],
)
def test_another_way_to_read_images_refuses_the_start(
    changes: dict[str, Any], sentence: str, tmp_path: Path
) -> None:
    save(tmp_path, "vit", random_images_model("vit"))
    changed(tmp_path, **changes)
    with pytest.raises(CheckpointError, match=sentence):
        facts(tmp_path, "embed")


def test_an_old_file_is_read_as_its_class_reads_it(tmp_path: Path) -> None:
    """One number for both sides, and no name: the model's own processor."""
    save(tmp_path, "vit", random_images_model("vit"))
    old = {"do_normalize": True, "do_resize": True, "size": 32, "image_mean": [0.5, 0.5, 0.5]}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(old))
    known, images = facts(tmp_path, "embed"), pictures()
    assert known.images is not None
    ours = [known.images.read(sent(image), 0) for image in images]
    expected = AutoImageProcessor.from_pretrained(tmp_path, backend="pil")
    for one, image in zip(ours, images, strict=True):
        pixels = torch.frombuffer(bytearray(one), dtype=torch.uint8).view(32, 32, 3)
        theirs_ = expected(image, return_tensors="pt")["pixel_values"][0].permute(1, 2, 0)
        assert torch.allclose((pixels / 255 - 0.5) / 0.5, theirs_, atol=1e-5)


def test_a_siglip_tokenizer_leaves_out_punctuation(tmp_path: Path) -> None:
    save(tmp_path, "siglip", random_joint_model("siglip"))
    path = tmp_path / "tokenizer_config.json"
    path.write_text(
        json.dumps({**json.loads(path.read_text()), "tokenizer_class": "SiglipTokenizer"})
    )
    sentence = facts(tmp_path, "embed").sentence
    assert sentence is not None
    tokenizer = Tokenizer(tmp_path)
    prompts = Prompts(tokenizer, {}, parse_special=True)
    asked = TextsRequest(inputs=("Isn't  it, so?",))
    (ours,) = TextReader(prompts, sentence).read(asked, 40, cut=None)
    plain = replace(sentence, lacks_punctuation=False)
    (expected,) = TextReader(prompts, plain).read(
        TextsRequest(inputs=("isnt it so",)), 40, cut=None
    )
    assert list(ours.token_ids) == list(expected.token_ids)
    assert len(ours.token_ids) == 40
