"""Checkpoint files that lie, lack or lead astray: one typed sentence that names the file."""

import json
import os
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from sluice_core.errors import CheckpointError, StartupError, UnsupportedModel
from sluice_core.model.architecture import ModelShape, weights_bytes
from sluice_core.model.files import Directory, checkpoint_dir, read_json
from sluice_kernels.linear import PlainLinear
from sluice_worker.execution.models.config import DecoderConfig
from sluice_worker.execution.models.decoder import Decoder
from sluice_worker.execution.weights import Checkpoint, random_weights
from sluice_worker.text.tokenizer_config import TokenizerConfig, eos_token_ids
from unit.worker.engine.factories import PLAIN, load_decoder, save_llama

CPU = torch.device("cpu")
WEIGHTS = "model.safetensors"


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    path = tmp_path / "model"
    save_llama(path, num_hidden_layers=1, hidden_size=32, intermediate_size=48)
    return path


def edit_config(path: Path, **changes: object) -> None:
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, **changes}))


def edit_tensors(path: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    tensors = load_file(path / WEIGHTS)
    change(tensors)
    save_file(tensors, path / WEIGHTS)


TRUNCATED = (
    r"model.safetensors: truncated: [\d,]{6,} bytes are there, and its header asks for [\d,]+"
)


def truncate(path: Path) -> None:
    data = (path / WEIGHTS).read_bytes()
    (path / WEIGHTS).write_bytes(data[: len(data) // 2])


def huge_header(path: Path) -> None:
    (path / WEIGHTS).write_bytes(struct.pack("<Q", 1 << 40) + b"{}")


def overlapping(path: Path) -> None:
    header = {name: {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]} for name in ("a", "b")}
    body = json.dumps(header).encode()
    (path / WEIGHTS).write_bytes(struct.pack("<Q", len(body)) + body + bytes(8))


def written(data: bytes) -> Callable[[Path], None]:
    def write(path: Path) -> None:
        (path / WEIGHTS).write_bytes(data)

    return write


def directory_in_place(path: Path) -> None:
    (path / WEIGHTS).unlink()
    (path / WEIGHTS).mkdir()


def only_pickle(path: Path) -> None:
    (path / WEIGHTS).rename(path / "pytorch_model.bin")


def fifo(path: Path) -> None:
    (path / WEIGHTS).unlink()
    os.mkfifo(path / WEIGHTS)


def link_outside(path: Path) -> None:
    (path / WEIGHTS).rename(path.parent / "elsewhere.safetensors")
    (path / WEIGHTS).symlink_to(path.parent / "elsewhere.safetensors")


def link_to_nothing(path: Path) -> None:
    (path / WEIGHTS).unlink()
    (path / WEIGHTS).symlink_to("gone.safetensors")


def link_in_a_circle(path: Path) -> None:
    (path / "a.safetensors").symlink_to("b.safetensors")
    (path / "b.safetensors").symlink_to("a.safetensors")
    index(file_name="a.safetensors")(path)


def index(*, file_name: str) -> Callable[[Path], None]:
    def write(path: Path) -> None:
        (path / WEIGHTS).unlink()
        weight_map = {"model.norm.weight": file_name}
        text = json.dumps({"weight_map": weight_map})
        (path / "model.safetensors.index.json").write_text(text)

    return write


@pytest.mark.parametrize(
    ("damage", "sentence"),
    [
        (truncate, TRUNCATED),
        (huge_header, "10 bytes are there, and its header alone asks for 1,099,511,627,784"),
        (written(b""), "model.safetensors: empty"),
        (written(b"version https://git-lfs.github.com/spec/v1\n"), "model.safetensors: a git-lfs"),
        (directory_in_place, "model.safetensors: Is a directory"),
        (overlapping, "model.safetensors: not a safetensors file .*invalid offset"),
        (only_pickle, "pytorch_model.bin: only safetensors are read"),
        (fifo, "model.safetensors: not a regular file"),
        (link_outside, "model.safetensors: leads outside"),
        (link_to_nothing, "model.safetensors: a link to gone.safetensors, which is not there"),
        (link_in_a_circle, "a.safetensors: Too many levels of symbolic links"),
        (index(file_name="../other.safetensors"), "is not a safetensors file beside it"),
        (index(file_name="absent.safetensors"), "absent.safetensors: missing"),
        (index(file_name="weights.bin"), "weights.bin is not a safetensors file"),
    ],
)
def test_damaged_files_are_named(
    checkpoint: Path, damage: Callable[[Path], None], sentence: str
) -> None:
    damage(checkpoint)
    with pytest.raises(CheckpointError, match=sentence):
        load_decoder(checkpoint)


def drop_norm(tensors: dict[str, torch.Tensor]) -> None:
    del tensors["model.norm.weight"]


def widen_norm(tensors: dict[str, torch.Tensor]) -> None:
    tensors["model.norm.weight"] = torch.ones(33)


def add_rows(tensors: dict[str, torch.Tensor]) -> None:
    tensors["model.embed_tokens.weight"] = torch.ones(200, 32)


def integer_norm(tensors: dict[str, torch.Tensor]) -> None:
    tensors["model.norm.weight"] = torch.ones(32, dtype=torch.int32)


def extra_bias(tensors: dict[str, torch.Tensor]) -> None:
    tensors["model.layers.0.self_attn.q_proj.bias"] = torch.ones(32)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (drop_norm, "tensor model.norm.weight is missing"),
        (widen_norm, r"has shape \[33\], but config.json asks for \[32\]"),
        (add_rows, r"has shape \[200, 32\], but config.json asks for \[199, 32\]"),
        (integer_norm, "not of a floating dtype"),
        (extra_bias, "q_proj.bias has no place in the model"),
    ],
)
def test_tensors_that_do_not_match_the_config_are_named(
    checkpoint: Path, change: Callable[[dict[str, torch.Tensor]], None], sentence: str
) -> None:
    edit_tensors(checkpoint, change)
    with pytest.raises(CheckpointError, match=f"model.safetensors: .*{sentence}"):
        load_decoder(checkpoint)


def test_a_stored_head_of_tied_embeddings_is_theirs_or_refused(checkpoint: Path) -> None:
    edit_config(checkpoint, tie_word_embeddings=True)

    def tie(tensors: dict[str, torch.Tensor]) -> None:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()

    edit_tensors(checkpoint, tie)
    model = load_decoder(checkpoint)
    shape = ModelShape.from_config(read_json(checkpoint, "config.json"))
    planned = Checkpoint(checkpoint, torch.float32, CPU).num_elements(shape) * 4
    assert planned == weights_bytes(shape, 4) == model.num_bytes

    def train(tensors: dict[str, torch.Tensor]) -> None:
        tensors["lm_head.weight"][-1, -1] += 1

    edit_tensors(checkpoint, train)
    with pytest.raises(CheckpointError, match="is not the embeddings that tie_word_embeddings"):
        load_decoder(checkpoint)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"auto_map": {"AutoModel": "code.Model"}}, "auto_map"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"rope_parameters": {"rope_type": "axial"}}, "rope type axial"),
        ({"rope_parameters": {"rope_theta": "big"}}, "rope_theta must be a positive number"),
        ({"architectures": ["GPT2LMHeadModel"]}, "GPT2LMHeadModel is not supported"),
        ({"rms_norm_eps": -1}, "rms_norm_eps must be a positive number"),
        ({"head_dim": 7}, "head_dim 7 is odd"),
    ],
)
def test_what_is_not_built_is_refused_by_name(
    checkpoint: Path, changes: dict[str, object], sentence: str
) -> None:
    edit_config(checkpoint, **changes)
    with pytest.raises(StartupError, match=sentence):
        DecoderConfig.from_json(read_json(checkpoint, "config.json"))


def test_bad_json_and_missing_directory_are_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{")
    (tmp_path / "list.json").write_text("[]")
    (tmp_path / "deep.json").write_text("[" * 100_000)
    (tmp_path / "empty.json").touch()
    (tmp_path / "pointer.json").write_text("version https://git-lfs.github.com/spec/v1\n")
    (tmp_path / "folder.json").mkdir()
    for name, sentence in (
        ("config.json", "not valid JSON"),
        ("list.json", "not a JSON object"),
        ("deep.json", "not valid JSON"),
        ("empty.json", "empty.json: empty"),
        ("pointer.json", "pointer.json: a git-lfs pointer, not the file"),
        ("folder.json", "folder.json: Is a directory"),
        ("../secret", "leads outside"),
        ("absent.json", "missing"),
    ):
        with pytest.raises(CheckpointError, match=sentence):
            read_json(tmp_path, name)
    with pytest.raises(CheckpointError, match="not a directory"):
        checkpoint_dir(str(tmp_path / "absent"))
    assert checkpoint_dir(f"file://{tmp_path}") == Directory(tmp_path).locate("config.json").parent


def eos_of(directory: Path, config: dict[str, object]) -> frozenset[int]:
    return eos_token_ids(directory, config, TokenizerConfig(directory))


def test_eos_of_the_generation_config_wins(tmp_path: Path) -> None:
    assert eos_of(tmp_path, {"eos_token_id": 5}) == {5}
    assert eos_of(tmp_path, {"eos_token_id": None}) == frozenset()
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [1, 2]}')
    assert eos_of(tmp_path, {"eos_token_id": 5}) == {1, 2}


def test_the_tokenizers_own_eos_ends_an_output_too(tmp_path: Path) -> None:
    """As after a fine-tune for chats that left the other files as they were."""
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": 1}')
    listed = {"eos_token": "<e>", "added_tokens_decoder": {"7": {"content": "<e>"}}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(listed))
    assert eos_of(tmp_path, {}) == {1, 7}
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": {"content": "<e>"}}')
    assert eos_of(tmp_path, {}) == {1}
    added = [{"id": 3, "content": "<a>"}, {"id": 9, "content": "<e>"}]
    (tmp_path / "tokenizer.json").write_text(json.dumps({"added_tokens": added}))
    assert eos_of(tmp_path, {}) == {1, 9}
    for vocabulary in ({"<a>": 3, "<e>": 5}, [["<a>", 0.0]] * 5 + [["<e>", -1.0]]):
        whole = {"added_tokens": added[:1], "model": {"vocab": vocabulary}}
        (tmp_path / "tokenizer.json").write_text(json.dumps(whole))
        assert eos_of(tmp_path, {}) == {1, 5}
    (tmp_path / "special_tokens_map.json").write_text('{"eos_token": {"content": "<a>"}}')
    assert eos_of(tmp_path, {}) == {1, 3}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(listed))
    assert eos_of(tmp_path, {}) == {1, 7}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_random_weights_follow_their_seed(checkpoint: Path, dtype: torch.dtype) -> None:
    config = DecoderConfig.from_json(read_json(checkpoint, "config.json"))
    first, again = (Decoder(config, random_weights(3, dtype, CPU), PLAIN) for _ in range(2))
    other = Decoder(config, random_weights(4, dtype, CPU), PLAIN)
    weights = [model.layers[0].attention.qkv for model in (first, again, other)]
    one, same, differing = (part.weight for part in weights if isinstance(part, PlainLinear))
    assert torch.equal(one, same)
    assert not torch.equal(one, differing)
    assert one.float().std() == pytest.approx(32**-0.5, rel=0.1)


def test_unsupported_is_not_called_damaged() -> None:
    with pytest.raises(UnsupportedModel, match="architectures"):
        DecoderConfig.from_json({})
