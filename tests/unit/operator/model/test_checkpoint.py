"""Claims on reading checkpoints: headers only, hostile files refused with the file's name."""

from __future__ import annotations

import json
import os
import struct
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from sluice_core.errors import CheckpointError
from sluice_core.model import files
from sluice_core.model.sizing import SizingError
from sluice_core.model.stored import INDEX, MAX_CONFIG_BYTES, MAX_HEADER_BYTES
from sluice_operator.model.checkpoint import ModelFacts, Unread, read

CONFIG = {
    "architectures": ["LlamaForCausalLM"], "hidden_size": 64, "intermediate_size": 128,
    "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2,
    "vocab_size": 256, "max_position_embeddings": 512, "torch_dtype": "bfloat16",
}  # fmt: skip


def _write_tensors(path: Path, header: dict[str, Any] | bytes, length: int | None = None) -> None:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A checkpoint of one tensor of 1,000 bfloat16 numbers."""
    folder = tmp_path / "models" / "demo"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    tensor = {"dtype": "BF16", "shape": [10, 100], "data_offsets": [0, 2000]}
    _write_tensors(folder / "model.safetensors", {"w": tensor})
    return folder


def _read(model: Path, dtype: str = "auto", uri: str = "file:///models/demo") -> Any:
    return read(uri, dtype, model.parent, on_cpu=True)


def test_weights_come_from_the_headers(model: Path) -> None:
    found = _read(model)
    assert isinstance(found, ModelFacts)
    assert (found.dtype, found.weights_bytes, found.num_parameters) == ("bfloat16", 2000, 1000)


def test_the_stored_head_of_tied_embeddings_is_no_weight_of_its_own(model: Path) -> None:
    """Qwen3-0.6B has one: counted twice it is a fifth of the model."""
    (model / "config.json").write_text(json.dumps({**CONFIG, "tie_word_embeddings": True}))
    head = {"dtype": "BF16", "shape": [256, 64], "data_offsets": [2000, 34768]}
    body = {"dtype": "BF16", "shape": [10, 100], "data_offsets": [0, 2000]}
    _write_tensors(model / "model.safetensors", {"w": body, "lm_head.weight": head})
    assert (_read(model).weights_bytes, _read(model).num_parameters) == (2000, 1000)
    (model / "model.safetensors").unlink()
    weight_map = dict.fromkeys(("w", "lm_head.weight"), "model-1.safetensors")
    index = {"metadata": {"total_size": 34768}, "weight_map": weight_map}
    (model / "model.safetensors.index.json").write_text(json.dumps(index))
    assert (_read(model).weights_bytes, _read(model).num_parameters) == (2000, 1000)


@pytest.mark.parametrize("name", ["auto_map", "use_mrope"])
def test_what_the_worker_would_refuse_is_refused_before_any_pod(model: Path, name: str) -> None:
    changed = {**CONFIG, name: {"AutoModel": "code.Model"}}
    (model / "config.json").write_text(json.dumps(changed))
    with pytest.raises(SizingError, match=name):
        _read(model)


def test_weights_are_counted_in_the_dtype_that_they_run_in(model: Path) -> None:
    assert _read(model, "float32").weights_bytes == 4000


def test_an_index_without_its_files_tells_the_size(model: Path) -> None:
    (model / "model.safetensors").unlink()
    index = {"metadata": {"total_size": 5000}, "weight_map": {"w": "model-1.safetensors"}}
    (model / "model.safetensors.index.json").write_text(json.dumps(index))
    assert _read(model, "float32").weights_bytes == 10_000


def test_more_bytes_than_any_disk_has_are_refused(model: Path) -> None:
    (model / "model.safetensors").unlink()
    index = {"metadata": {"total_size": 10**400}, "weight_map": {"w": "model-1.safetensors"}}
    (model / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match="claims tensors of over 1024 PiB"):
        _read(model)


def test_links_that_lead_to_each_other_are_refused(model: Path) -> None:
    (model / "config.json").unlink()
    (model / "config.json").symlink_to(model / "b")
    (model / "b").symlink_to(model / "config.json")
    with pytest.raises(CheckpointError, match=r"config\.json: Too many levels of symbolic links"):
        _read(model)


def test_shards_are_added_up(model: Path) -> None:
    (model / "model.safetensors").rename(model / "model-1.safetensors")
    tensor = {"dtype": "BF16", "shape": [50], "data_offsets": [0, 100]}
    _write_tensors(model / "model-2.safetensors", {"v": tensor})
    weight_map = {"w": "model-1.safetensors", "v": "model-2.safetensors"}
    (model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    assert _read(model).weights_bytes == 2100


def test_the_file_of_an_impossible_tensor_is_named(model: Path) -> None:
    _write_tensors(model / "model.safetensors", {"w": {"dtype": "Q9", "shape": [1]}})
    with pytest.raises(SizingError, match=r"^model\.safetensors: tensor w has no known dtype"):
        _read(model)


def test_a_tensor_is_counted_once_in_the_file_that_weight_map_names(model: Path) -> None:
    (model / "model.safetensors").rename(model / "model-1.safetensors")
    tensor = {"dtype": "BF16", "shape": [50], "data_offsets": [0, 100]}
    _write_tensors(model / "delta.safetensors", {"w": tensor})
    (model / INDEX).write_text(json.dumps({"weight_map": {"w": "model-1.safetensors"}}))
    assert _read(model).weights_bytes == 2000
    both = {"w": "delta.safetensors", "v": "model-1.safetensors"}
    (model / INDEX).write_text(json.dumps({"weight_map": both}))
    with pytest.raises(CheckpointError, match=r"model-1\.safetensors: tensor v is missing, and"):
        _read(model)
    _write_tensors(model / "model-1.safetensors", {"w": tensor, "v": tensor})
    assert _read(model).weights_bytes == 200


@pytest.mark.parametrize("named", [{}, {"torch_dtype": None}])
def test_without_a_dtype_in_the_config_the_stored_tensors_tell_it(
    model: Path, named: dict[str, Any]
) -> None:
    kept = {key: value for key, value in CONFIG.items() if key != "torch_dtype"}
    (model / "config.json").write_text(json.dumps({**kept, **named}))
    found = _read(model)
    assert (found.dtype, found.weights_bytes, found.num_parameters) == ("bfloat16", 2000, 1000)
    shards = {"w": "model.safetensors", "v": "z.safetensors"}  # of which one is not there
    index = {"metadata": {"total_size": 4000}, "weight_map": shards}
    (model / INDEX).write_text(json.dumps(index))
    found = _read(model)
    assert (found.dtype, found.weights_bytes, found.num_parameters) == ("bfloat16", 4000, 2000)


@pytest.mark.parametrize("uri", ["pvc://claim/demo", "file:///models/absent"])
def test_what_is_not_here_is_unknown_and_no_error(model: Path, uri: str) -> None:
    assert isinstance(_read(model, uri=uri), Unread)


@pytest.mark.parametrize(
    ("content", "length"),
    [(b"{}", 1000), (b"", 2**63), (b"[]", None), (b"{", None), (b"\xff\xfe", None)],
)
def test_a_broken_header_is_refused_with_the_files_name(
    model: Path, content: bytes, length: int | None
) -> None:
    _write_tensors(model / "model.safetensors", content, length)
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        _read(model)


def test_an_empty_file_is_refused(model: Path) -> None:
    (model / "model.safetensors").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"model\.safetensors: empty"):
        _read(model)


def test_deeply_nested_json_is_refused(model: Path) -> None:
    (model / "config.json").write_text("[" * 200_000)
    with pytest.raises(CheckpointError, match=r"config\.json: not valid JSON \(nested"):
        _read(model)


def test_pickles_are_named_and_not_opened(model: Path) -> None:
    (model / "model.safetensors").rename(model / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin"):
        _read(model)


def test_only_the_weights_that_a_worker_loads_are_counted(model: Path) -> None:
    """Without an index that is the file of the usual name: others beside it are somebody's own."""
    tensor = {"dtype": "F32", "shape": [1000], "data_offsets": [0, 4000]}
    alone = _read(model)
    _write_tensors(model / "consolidated.safetensors", {"w": tensor})
    assert _read(model) == alone
    (model / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"holds no model\.safetensors, and no index"):
        _read(model)


@pytest.mark.parametrize("name", ["../other/model.safetensors", "/etc/passwd", "a/b.safetensors"])
def test_an_index_that_points_outside_is_refused(model: Path, name: str) -> None:
    index = {"weight_map": {"w": name}}
    (model / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match="is not a safetensors file beside it"):
        _read(model)


def test_a_link_out_of_the_models_directory_is_refused(model: Path, tmp_path: Path) -> None:
    secret = tmp_path / "secret.json"
    secret.write_text(json.dumps(CONFIG))
    (model / "config.json").unlink()
    (model / "config.json").symlink_to(secret)
    with pytest.raises(CheckpointError, match="outside"):
        _read(model)


def test_a_pipe_is_refused_without_waiting_for_a_writer(model: Path) -> None:
    (model / "model.safetensors").unlink()
    os.mkfifo(model / "model.safetensors")
    with pytest.raises(CheckpointError, match="regular file"):
        _read(model)


def test_a_header_that_would_take_the_operators_memory_is_refused(model: Path) -> None:
    large = b'{"w":' + b" " * MAX_HEADER_BYTES + b"{}}"
    _write_tensors(model / "model.safetensors", large)
    with pytest.raises(CheckpointError, match=r"model\.safetensors: a header of over 8 MiB"):
        _read(model)


def test_a_config_that_would_take_the_operators_memory_is_refused(model: Path) -> None:
    (model / "config.json").write_text("{}" + " " * MAX_CONFIG_BYTES)
    with pytest.raises(CheckpointError, match=r"config\.json: larger than 1 MiB"):
        _read(model)


def test_an_index_of_millions_of_empty_values_is_refused(model: Path) -> None:
    """Within its size limit, and half a gigabyte of objects."""
    index = b'{"weight_map": {"w": "model.safetensors"}, "metadata": [' + b"{}," * 210_000
    (model / INDEX).write_bytes(index + b"{}]}")
    with pytest.raises(CheckpointError, match=r"index\.json: more than 400,000 values"):
        _read(model)


def test_one_text_is_parsed_at_a_time(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As objects a text of 16 MiB takes ten times that, and there are eight readers."""
    parse, busy, most = json.loads, 0, 0

    def counted(data: bytes) -> Any:
        nonlocal busy, most
        busy += 1
        most = max(most, busy)
        time.sleep(0.01)
        busy -= 1
        return parse(data)

    monkeypatch.setattr(files, "json", SimpleNamespace(loads=counted))
    with ThreadPoolExecutor(4) as readers:
        assert all(readers.map(_read, 4 * [model]))
    assert most == 1
