"""Quantised checkpoints: sized from their stored bytes, for the engines that read them."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from sluice_core.model.sizing import SizingError, safetensors_header_bytes
from sluice_core.model.stored import INDEX
from sluice_operator.model.checkpoint import ModelFacts, read
from sluice_operator.model.fit import Fit, judge
from sluice_operator.reasons import Reason
from unit.operator.model.test_checkpoint import _write_tensors as write_tensors
from unit.operator.observations import create_service

BITS = {
    "F32": 32, "F16": 16, "BF16": 16, "I32": 32, "U8": 8, "F8_E4M3": 8, "F8_E8M0": 8, "F4": 4,
    "F6_E2M3": 6, "F6_E3M2": 6, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8, "C64": 64,
}  # fmt: skip
WIDTH = 4096
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "hidden_size": WIDTH, "intermediate_size": 14336,
    "num_attention_heads": 32, "num_key_value_heads": 8, "num_hidden_layers": 32,
    "vocab_size": 128256, "max_position_embeddings": 8192, "torch_dtype": "bfloat16",
    "quantization_config": {"quant_method": "awq", "bits": 4, "group_size": 128},
}  # fmt: skip
TABLES = {
    "model.embed_tokens.weight": ("BF16", [128256, WIDTH]),
    "lm_head.weight": ("BF16", [128256, WIDTH]),
}
FORMS: dict[str, tuple[float, dict[str, tuple[str, list[int]]]]] = {
    "awq": (4.156, {
        "qweight": ("I32", [WIDTH, WIDTH // 8]), "qzeros": ("I32", [WIDTH // 128, WIDTH // 8]),
        "scales": ("F16", [WIDTH // 128, WIDTH]),
    }),
    "gptq": (4.164, {
        "qweight": ("I32", [WIDTH // 8, WIDTH]), "qzeros": ("I32", [WIDTH // 128, WIDTH // 8]),
        "scales": ("F16", [WIDTH // 128, WIDTH]), "g_idx": ("I32", [WIDTH]),
    }),
    "fp8": (8.002, {
        "weight": ("F8_E4M3", [WIDTH, WIDTH]), "weight_scale_inv": ("F32", [32, 32]),
    }),
    "nvfp4": (4.5, {
        "weight": ("U8", [WIDTH, WIDTH // 2]), "weight_scale": ("F8_E4M3", [WIDTH, WIDTH // 16]),
        "weight_scale_2": ("F32", []), "input_scale": ("F32", []),
    }),
    "mxfp4": (4.25, {
        "weight_packed": ("U8", [WIDTH, WIDTH // 2]), "weight_scale": ("U8", [WIDTH, WIDTH // 32]),
    }),
    "packed": (4.25, {
        "weight": ("F4", [WIDTH, WIDTH]), "weight_scale": ("F8_E8M0", [WIDTH, WIDTH // 32]),
    }),
}  # fmt: skip
"""Of one matrix of 4096 x 4096 in each format: bits of a weight, and its tensors."""


def header(tensors: dict[str, tuple[str, list[int]]]) -> dict[str, Any]:
    """As safetensors writes it, with a place for each."""
    entries, at = {}, 0
    for name, (dtype, dims) in tensors.items():
        end = at + math.prod(dims) * BITS[dtype] // 8
        entries[name] = {"dtype": dtype, "shape": dims, "data_offsets": [at, end]}
        at = end
    return entries


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "models" / "demo"
    path.mkdir(parents=True)
    (path / "config.json").write_text(json.dumps(CONFIG))
    matrix = FORMS["awq"][1]
    tensors = {f"model.layers.{i}.{name}": one for i in range(416) for name, one in matrix.items()}
    write_tensors(path / "model.safetensors", header({**tensors, **TABLES}))
    return path


def facts(folder: Path, dtype: str = "auto") -> ModelFacts:
    found = read("file:///models/demo", dtype, folder.parent, on_cpu=False)
    assert isinstance(found, ModelFacts)
    return found


def fit(found: ModelFacts, **changes: Any) -> Fit:
    asked = {
        "engine__name": "VLLM", "hardware__accelerator": "nvidia", "hardware__memory": "24Gi",
        **changes,
    }  # fmt: skip
    return judge(create_service(**asked).spec, found)


@pytest.mark.parametrize("form", FORMS)
def test_a_quantised_matrix_takes_the_bits_of_its_format(form: str) -> None:
    bits, tensors = FORMS[form]
    for dtype_bytes in (2, 4, None):
        stored = safetensors_header_bytes(header(tensors), dtype_bytes, quantised=True)
        assert round(stored * 8 / WIDTH**2, 3) == bits


def test_only_what_is_not_quantised_is_converted() -> None:
    kept = {"a.scales": ("F16", [100]), "b.weight_scale_inv": ("F32", [100])}
    tensors = header({"a.weight": ("BF16", [100]), "a.qweight": ("I32", [100]), **kept})
    assert safetensors_header_bytes(tensors, 4, quantised=True) == 400 + 400 + 200 + 400
    assert safetensors_header_bytes(tensors, 4) == 1600


def test_a_type_that_is_not_known_yet_counts_by_its_place() -> None:
    tensor = {"dtype": "F2_NEW", "shape": [64, 64], "data_offsets": [10, 1034]}
    assert safetensors_header_bytes({"w": tensor}, 2, quantised=True) == 1024
    for entry in ({**tensor, "data_offsets": [9, 3]}, {**tensor, "data_offsets": ["1", 1 << 90]}):
        with pytest.raises(SizingError, match="no known dtype"):
            safetensors_header_bytes({"w": entry}, 2, quantised=True)
    with pytest.raises(SizingError, match="no known dtype"):
        safetensors_header_bytes({"w": tensor}, 2)


@pytest.mark.parametrize("dtype", BITS)
def test_each_dtype_of_safetensors_has_its_bits(dtype: str) -> None:
    entry = {"dtype": dtype, "shape": [3, 8], "data_offsets": [0, 3 * BITS[dtype]]}
    assert safetensors_header_bytes({"w": entry}, None) == 3 * BITS[dtype]
    odd = {"w": {**entry, "shape": [3]}}
    assert safetensors_header_bytes(odd, None) == math.ceil(3 * BITS[dtype] / 8)


def test_the_ceiling_of_a_quantised_model_is_memorys(folder: Path) -> None:
    """416 matrices of 4096 x 4096 are the linear layers of Llama-3-8B."""
    found = facts(folder)
    matrices = 416 * WIDTH**2
    assert found.is_quantised
    assert found.weights_bytes == pytest.approx(4.156 / 8 * matrices + 2 * 2 * 128256 * WIDTH, 1e-3)
    assert found.num_parameters == pytest.approx(8.03e9, rel=1e-2)
    fitted = fit(found)
    assert (fitted.status, fitted.reason) == ("True", Reason.FITS)
    assert fitted.memory
    assert fitted.memory.kv_bytes_per_token == 128 << 10
    assert 100 < fitted.memory.ceiling < 256
    assert "weights 5.3 GiB" in fitted.message
    small = fit(found, hardware__memory="4Gi")
    assert (small.status, small.reason) == ("False", Reason.INSUFFICIENT_MEMORY)


def test_keys_and_values_have_the_configs_dtype_or_that_of_the_argument(folder: Path) -> None:
    for argument in ("--kv-cache-dtype=fp8", "--kv_cache_dtype=fp8_e5m2"):
        fitted = fit(facts(folder), engine__args=[argument])
        assert fitted.memory
        assert fitted.memory.kv_bytes_per_token == 64 << 10
    config = {key: value for key, value in CONFIG.items() if key != "torch_dtype"}
    (folder / "config.json").write_text(json.dumps(config))
    assert facts(folder).dtype == "bfloat16"


def test_our_own_engine_and_those_that_size_themselves_are_as_before(folder: Path) -> None:
    refused = fit(facts(folder), engine__name="Sluice")
    assert (refused.status, refused.reason) == ("False", Reason.UNSUPPORTED_CHECKPOINT)
    assert refused.message == "config.json: quantization_config is not supported."
    assert fit(facts(folder), engine__name="Ollama").status == "Unknown"


def test_without_headers_the_index_tells_what_is_stored(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    index = {"metadata": {"total_size": 5_700_000_000}, "weight_map": {"w": "m-1.safetensors"}}
    (folder / INDEX).write_text(json.dumps(index))
    assert facts(folder).weights_bytes == facts(folder, "float32").weights_bytes == 5_700_000_000


def test_weights_that_an_engine_quantises_take_less_and_quantised_ones_stay(folder: Path) -> None:
    plain = {key: value for key, value in CONFIG.items() if key != "quantization_config"}
    quantised = fit(facts(folder)).memory
    assert quantised == fit(facts(folder), engine__args=["--quantization=fp8"]).memory
    (folder / "config.json").write_text(json.dumps(plain))
    matrix = {f"{i}.weight": ("BF16", [WIDTH, WIDTH]) for i in range(416)}
    write_tensors(folder / "model.safetensors", header({**matrix, **TABLES}))
    sizes = []
    for args in ([], ["--quantization=fp8"], ["-q", "bitsandbytes"], ["--quantization=other"]):
        fitted = fit(facts(folder), engine__args=args)
        assert fitted.memory
        sizes.append(fitted.memory.weights_bytes)
    linear = 416 * WIDTH**2
    assert sizes[0] - sizes[1] == pytest.approx(linear, rel=1e-3)
    assert sizes[0] - sizes[2] == pytest.approx(linear * 11.5 / 8, rel=1e-3)
    assert sizes[3] == sizes[0]


def test_a_share_of_a_quantised_model_keeps_the_tables_in_16_bits(folder: Path) -> None:
    whole = facts(folder).weights_bytes
    tables = 2 * 2 * 128256 * WIDTH
    two = ["--pipeline-parallel-size=4"]
    fitted = fit(facts(folder), engine__args=two, hardware__gpus=4)
    assert fitted.memory
    assert fitted.memory.stage == 4
    expected = (whole - tables) / 4 + tables / 2
    assert fitted.memory.weights_bytes == pytest.approx(expected, rel=1e-3)
