"""Sizes of models that read images, and the numbers that compare images with texts."""

import struct
from math import exp
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import save_file
from sluice_core.errors import CheckpointError, UnsupportedModel
from sluice_core.hub.listing import Listing, RemoteFile, small_files
from sluice_core.model.files import Directory
from sluice_core.model.images import ImageShape, JointShape, Similarity, image_shape
from sluice_core.model.stored import Weights, read_number
from sluice_core.model.tasks import task_of, vector_shape
from torch import Tensor, bfloat16, float16, float32, float64, tensor

VIT: dict[str, Any] = {"architectures": ["ViTModel"], "hidden_size": 32, "num_attention_heads": 4}


def test_what_is_left_out_is_as_in_transformers() -> None:
    shape = vector_shape({"architectures": ["ViTForImageClassification"]})
    assert isinstance(shape, ImageShape)
    assert (shape.layers.max_position, shape.hidden_size) == (197, 768)
    assert 85e6 < shape.weights_bytes(1) < 86.5e6  # ViT-B without its head
    clip = vector_shape({"architectures": ["CLIPModel"]})
    assert isinstance(clip, JointShape)
    assert (clip.images.layers.max_position, clip.texts.max_position, clip.width) == (50, 77, 512)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"qkv_bias": False}, "qkv_bias false is not built"),
        ({"num_channels": 1}, "num_channels"),
        ({"image_size": [32, 48]}, "image_size must be a positive integer"),
        ({"image_size": 4096}, "at most 2,048"),
        ({"architectures": ["Dinov2Model"], "use_swiglu_ffn": True}, "use_swiglu_ffn true"),
        ({"architectures": ["CLIPModel"], "text_config": 3}, "must be objects"),
        (
            {"architectures": ["SiglipModel"], "text_config": {"projection_size": 5}},
            "projection_size",
        ),
    ],
)
def test_other_sizes_are_refused(changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UnsupportedModel, match=sentence):
        vector_shape(VIT | changes)


@pytest.mark.parametrize(
    ("name", "task"),
    [
        ("ViTForImageClassification", "classify"),
        ("DeiTForImageClassificationWithTeacher", "classify"),
        ("Dinov2Model", "embed"),
        ("SiglipModel", "embed"),
    ],
)
def test_the_task_of_a_checkpoint(name: str, task: str, tmp_path: Path) -> None:
    assert task_of(Directory(tmp_path), {"architectures": [name]}) == task
    assert image_shape({"architectures": [name]}) is not None


@pytest.mark.parametrize("dtype", [float64, float32, float16, bfloat16])
def test_a_number_of_a_file_is_read_in_any_type(dtype: Any, tmp_path: Path) -> None:
    own: dict[str, Tensor] = {"a": tensor([1.0, 2.0, 3.0]), "logit_scale": tensor(2.5, dtype=dtype)}
    save_file(own, tmp_path / "model.safetensors")
    weights = Weights.of(Directory(tmp_path))
    assert read_number(weights, "logit_scale") == 2.5
    with pytest.raises(CheckpointError, match="no place"):
        read_number(weights, "a")
    with pytest.raises(CheckpointError, match="logit_bias is missing"):
        read_number(weights, "logit_bias")


def test_alike_is_the_cosine_times_the_scale(tmp_path: Path) -> None:
    clip = vector_shape({"architectures": ["CLIPModel"]})
    assert isinstance(clip, JointShape)
    save_file({"logit_scale": tensor(1.5)}, tmp_path / "model.safetensors")
    similarity = Similarity.read(clip, Weights.of(Directory(tmp_path)))
    assert similarity.of([1.0, 0.0], [0.6, 0.8]) == pytest.approx(0.6 * exp(1.5))
    assert Similarity.read(clip, None).scale == pytest.approx(14.28, abs=0.01)


def test_a_model_of_images_needs_no_tokenizer_from_the_hub() -> None:
    names = ["config.json", "preprocessor_config.json", "model.safetensors"]
    listing = Listing("0" * 40, {name: RemoteFile(name, 1, "") for name in names})
    found = [file.name for file in small_files("a/b", listing, weights=True)]
    assert found == ["config.json", "preprocessor_config.json"]
    without = {name: file for name, file in listing.files.items() if name != names[1]}
    with pytest.raises(CheckpointError, match=r"has no tokenizer\.json"):
        small_files("a/b", Listing("0" * 40, without), weights=True)


def test_eight_bytes_are_read_of_a_tensor_at_most(tmp_path: Path) -> None:
    save_file({"a": tensor([1.0])}, tmp_path / "model.safetensors")
    data = (tmp_path / "model.safetensors").read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    broken = data[8 : 8 + length].replace(b"[0,4]", b"[0,99]")
    assert broken != data[8 : 8 + length]
    head = struct.pack("<Q", len(broken)) + broken
    (tmp_path / "model.safetensors").write_bytes(head + b"\0" * 99)
    with pytest.raises(CheckpointError):
        read_number(Weights.of(Directory(tmp_path)), "a")
