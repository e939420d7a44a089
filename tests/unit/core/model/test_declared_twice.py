"""What a checkpoint declares in two places counts as in transformers, or one sentence refuses."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from sluice_core.errors import CheckpointError
from sluice_core.model.files import Directory
from sluice_core.model.stored import INDEX, Weights
from sluice_worker.base.config import EngineConfig
from sluice_worker.base.resources import Resources
from sluice_worker.engine.startup import _Start
from sluice_worker.execution.models.config import DecoderConfig
from sluice_worker.execution.models.rotary import read_rotary
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, LlamaForCausalLM
from unit.worker.engine.factories import (
    create_engine,
    create_requests,
    create_scheduler,
    load_decoder,
    run_all,
    save_llama,
)
from unit.worker.execution.test_equals_transformers import reference
from unit.worker.execution.test_model_configs import SMALL

WEIGHTS, SHARD = "model.safetensors", "model-00001-of-00001.safetensors"
DOWN = "model.layers.0.mlp.down_proj.weight"
Tensors = dict[str, Tensor]


@pytest.fixture
def tensors(tmp_path: Path) -> Tensors:
    """Those of a checkpoint in `tmp_path`, whose weights are still to be written."""
    save_llama(tmp_path, num_hidden_layers=1, hidden_size=32, intermediate_size=48)
    found: Tensors = load_file(tmp_path / WEIGHTS)
    (tmp_path / WEIGHTS).unlink()
    return found


def write(directory: Path, name: str, tensors: Tensors) -> None:
    save_file(tensors, directory / name, metadata={"format": "pt"})


def write_index(directory: Path, weight_map: dict[str, str], **metadata: object) -> None:
    text = json.dumps({"metadata": {"total_size": 1, **metadata}, "weight_map": weight_map})
    (directory / INDEX).write_text(text)


def edit_config(directory: Path, **changes: object) -> None:
    """`...` takes a key out."""
    config = {**json.loads((directory / "config.json").read_text()), **changes}
    kept = {key: value for key, value in config.items() if value is not ...}
    (directory / "config.json").write_text(json.dumps(kept))


def theirs(directory: Path, dtype: str = "auto") -> LlamaForCausalLM:
    return AutoModelForCausalLM.from_pretrained(directory, dtype=dtype).eval()


def outputs(directory: Path) -> dict[str, list[int]]:
    engine = create_engine(directory, create_scheduler())
    return run_all(engine, create_requests((1, 17, 30), max_tokens=24))


def expected(directory: Path) -> dict[str, list[int]]:
    return reference(theirs(directory), create_requests((1, 17, 30), max_tokens=24))


@pytest.mark.parametrize("delta", ["delta.safetensors", "z-delta.safetensors"])
def test_a_tensor_is_read_from_the_file_that_weight_map_names(
    tmp_path: Path, tensors: Tensors, delta: str
) -> None:
    """The base shard holds every tensor, `delta` a new one (colibri#1479). transformers reads both
    files on the folder itself, and the last by name wins: it is right for one of the two names."""
    edited = {**tensors, DOWN: tensors[DOWN].flip(0).contiguous()}
    (tmp_path / "whole").mkdir()
    write(tmp_path / "whole", WEIGHTS, edited)
    (tmp_path / "whole/config.json").write_text((tmp_path / "config.json").read_text())
    write(tmp_path, SHARD, tensors)
    write(tmp_path, delta, {DOWN: edited[DOWN]})
    write_index(tmp_path, {**dict.fromkeys(tensors, SHARD), DOWN: delta})
    assert outputs(tmp_path) == outputs(tmp_path / "whole") == expected(tmp_path / "whole")
    assert (expected(tmp_path) == outputs(tmp_path)) == (delta > SHARD)


def test_a_tensor_that_weight_map_does_not_name_is_read_from_the_shard_that_holds_it(
    tmp_path: Path, tensors: Tensors
) -> None:
    write(tmp_path, SHARD, tensors)
    write_index(tmp_path, {name: SHARD for name in tensors if name != DOWN})
    assert outputs(tmp_path) == expected(tmp_path)
    write(tmp_path, "other.safetensors", {DOWN: tensors[DOWN], "model.norm.weight": torch.ones(32)})
    named = {name: SHARD for name in tensors if name != DOWN}
    write_index(tmp_path, {**named, "model.norm.weight": "other.safetensors"})
    with pytest.raises(CheckpointError, match=f"other.safetensors: tensor {DOWN} is in another"):
        load_decoder(tmp_path)


def test_a_tensor_that_is_not_where_weight_map_says_is_named(
    tmp_path: Path, tensors: Tensors
) -> None:
    write(tmp_path, SHARD, tensors)
    write(tmp_path, "other.safetensors", {"model.norm.weight": torch.ones(32)})
    moved = {"model.norm.weight": "other.safetensors", DOWN: "other.safetensors"}
    write_index(tmp_path, {**dict.fromkeys(tensors, SHARD), **moved})
    with pytest.raises(CheckpointError, match=f"other.safetensors: tensor {DOWN} is missing, and"):
        load_decoder(tmp_path)


def test_one_file_goes_before_an_index_of_others(tmp_path: Path, tensors: Tensors) -> None:
    write(tmp_path, SHARD, tensors)
    write(tmp_path, WEIGHTS, {**tensors, DOWN: tensors[DOWN].flip(0).contiguous()})
    write_index(tmp_path, dict.fromkeys(tensors, SHARD))
    assert outputs(tmp_path) == expected(tmp_path)
    assert Weights.of(Directory(tmp_path)).files == (WEIGHTS,)
    write_index(tmp_path, {**dict.fromkeys(tensors, WEIGHTS), DOWN: SHARD})
    assert Weights.of(Directory(tmp_path)).files == (SHARD, WEIGHTS)


BF16, HALF, SINGLE = torch.bfloat16, torch.float16, torch.float32


@pytest.mark.parametrize(
    ("config", "stored", "head"),
    [
        ({"dtype": ...}, BF16, BF16),
        ({"dtype": None}, BF16, BF16),
        ({"dtype": ...}, HALF, HALF),
        ({"dtype": ...}, BF16, SINGLE),  # the first by name counts, which is the head
        ({"dtype": ...}, BF16, torch.int32),  # the first floating one
        ({"dtype": "float32"}, BF16, BF16),
        ({"dtype": ..., "torch_dtype": "float16"}, BF16, BF16),
        ({"dtype": "float32", "torch_dtype": "float16"}, BF16, BF16),
        ({"dtype": None, "torch_dtype": "float16"}, BF16, BF16),
    ],
)
@pytest.mark.parametrize("is_sharded", [False, True], ids=["one", "shards"])
def test_the_dtype_is_the_configs_or_else_that_of_the_stored_tensors(
    tmp_path: Path,
    tensors: Tensors,
    config: dict[str, object],
    stored: torch.dtype,
    head: torch.dtype,
    is_sharded: bool,
) -> None:
    edit_config(tmp_path, **config)
    written = {name: tensor.to(stored) for name, tensor in tensors.items()}
    written["lm_head.weight"] = tensors["lm_head.weight"].to(head)
    write(tmp_path, SHARD if is_sharded else WEIGHTS, written)
    if is_sharded:
        write_index(tmp_path, dict.fromkeys(tensors, SHARD))
    started = _Start(EngineConfig(model=str(tmp_path), dtype="auto"), Resources())
    assert getattr(torch, started.decoder.shape.dtype) == theirs(tmp_path).dtype


def test_stored_tensors_of_a_type_that_nothing_runs_in_are_named(
    tmp_path: Path, tensors: Tensors
) -> None:
    edit_config(tmp_path, dtype=...)
    write(tmp_path, WEIGHTS, {name: tensor.double() for name, tensor in tensors.items()})
    with pytest.raises(CheckpointError, match="model.safetensors: tensors of float64, and config"):
        _Start(EngineConfig(model=str(tmp_path)), Resources())


LINEAR = {"rope_type": "linear", "factor": 4.0}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}
PLAIN = {"rope_type": "default", "rope_theta": 5e5}


@pytest.mark.parametrize("name", ["Llama", "Gemma3"])
@pytest.mark.parametrize(
    "declared",
    [
        {},
        {"rope_theta": 7e5, "rope_scaling": LINEAR},
        {"rope_theta": 7e5, "rope_scaling": {**LINEAR, "rope_theta": 3e5}},
        {"rope_theta": 7e5, "rope_scaling": {"type": "linear", "factor": 4.0}},
        {"rope_theta": 7e5, "rope_scaling": {**LINEAR, "type": "yarn"}},
        {"rope_theta": 7e5, "rope_scaling": YARN, "original_max_position_embeddings": 2048},
        {"rope_theta": 7e5, "rope_scaling": YARN, "rope_parameters": None},
    ],
)
def test_rotary_positions_are_transformers(name: str, declared: dict[str, object]) -> None:
    compare_positions(name, declared)


@pytest.mark.parametrize(
    "declared",
    [
        {"rope_theta": 7e5, "rope_parameters": PLAIN},
        {"rope_theta": 7e5, "rope_parameters": LINEAR},
        {"rope_theta": 7e5, "rope_parameters": PLAIN, "rope_scaling": LINEAR},
        {"rope_theta": 7e5, "rope_parameters": PLAIN, "rope_scaling": {}},
        {"rope_parameters": {**YARN, "rope_theta": 5e5}, "rope_scaling": None},
    ],
)
def test_of_two_fields_of_rotary_positions_the_older_one_counts(
    declared: dict[str, object],
) -> None:
    compare_positions("Llama", declared)


def compare_positions(name: str, declared: dict[str, object]) -> None:
    kind = {"Llama": "llama", "Gemma3": "gemma3_text"}[name]
    declared = json.loads(json.dumps(declared))  # transformers changes what it is given
    config = {**SMALL, "head_dim": 16, "pad_token_id": None, **declared}
    ours = DecoderConfig.from_json({**config, "architectures": [f"{name}ForCausalLM"]})
    made = AutoConfig.for_model(kind, **config)
    rotary = AutoModelForCausalLM.from_config(made).model.rotary_emb
    for layers, rope in (("full", ours.rope), ("sliding", ours.sliding_rope)):
        named = "" if name == "Llama" else f"{layers}_attention_"
        found = read_rotary(rope, 16, torch.device("cpu"))
        torch.testing.assert_close(found.frequencies, getattr(rotary, f"{named}inv_freq"))
        assert rope.magnitude == pytest.approx(getattr(rotary, f"{named}attention_scaling"))
