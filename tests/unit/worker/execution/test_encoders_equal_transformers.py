"""Encoders equal transformers, with texts of any lengths in one batch and no padding."""

import json
import os
from pathlib import Path

import pytest
import torch
from sluice_core.errors import UnsupportedModel
from sluice_core.model.encoders import EncoderShape
from sluice_core.model.files import read_json
from sluice_core.model.tasks import text_shape
from sluice_kernels.choose import choose
from sluice_kernels.interface import Kernels
from sluice_worker.execution.encoders.encoder import Encoder
from sluice_worker.execution.encoders.files import VectorFiles, of_encoder
from sluice_worker.execution.encoders.texts import FlatTexts
from unit.worker.engine.factories import PLAIN
from unit.worker.execution.encoder_models import CONFIGS, VOCAB, random_model

CPU = torch.device("cpu")
LENGTHS = [1, 2, 7, 7, 7, 20, 33, 64, 64]


def texts() -> list[list[int]]:
    torch.manual_seed(1)
    return [torch.randint(5, VOCAB, (length,)).tolist() for length in LENGTHS]


def load(path: Path, kernels: Kernels = PLAIN) -> Encoder:
    shape = EncoderShape.from_config(read_json(path, "config.json"))
    files = VectorFiles(path, torch.float32, CPU, of_encoder(shape.family))
    encoder = Encoder(shape, files.read, kernels)
    files.finish()
    return encoder


@pytest.mark.parametrize("kind", ["Model", "ForMaskedLM"])
@pytest.mark.parametrize("name", CONFIGS)
def test_rows_equal_transformers_at_ragged_lengths(name: str, kind: str, tmp_path: Path) -> None:
    model = random_model(name, kind)
    model.save_pretrained(tmp_path)
    with torch.inference_mode():
        rows = torch.split(load(tmp_path).hidden(FlatTexts.of(texts(), CPU)), LENGTHS)
        for token_ids, found in zip(texts(), rows, strict=True):
            expected = model.base_model(torch.tensor([token_ids])).last_hidden_state[0]
            assert torch.allclose(found, expected, atol=2e-5, rtol=1e-4)
            assert torch.cosine_similarity(found, expected).min() >= 0.9999


def test_a_text_does_not_depend_on_those_beside_it(tmp_path: Path) -> None:
    random_model("Bert").save_pretrained(tmp_path)
    encoder, asked = load(tmp_path), texts()
    with torch.inference_mode():
        together = torch.split(encoder.hidden(FlatTexts.of(asked, CPU)), LENGTHS)
        for token_ids, found in zip(asked, together, strict=True):
            assert torch.allclose(found, encoder.hidden(FlatTexts.of([token_ids], CPU)), atol=1e-5)


@pytest.mark.parametrize("activation", ["gelu", "gelu_new", "relu"])
@pytest.mark.parametrize("name", CONFIGS)
def test_the_machines_own_kernels_give_the_same(name: str, activation: str, tmp_path: Path) -> None:
    """Attention without padding where they have it, and activations behind their products."""
    key = {"DistilBert": "activation", "ModernBert": "hidden_activation"}.get(name, "hidden_act")
    random_model(name, **{key: activation}).save_pretrained(tmp_path)
    own = choose(
        CPU, torch.float32, None, os.environ, max_gather_bytes=1 << 24, max_scores_bytes=1 << 24
    )
    with torch.inference_mode():
        plain, found = (
            load(tmp_path, kernels).hidden(FlatTexts.of(texts(), CPU)) for kernels in (PLAIN, own)
        )
    assert torch.allclose(found, plain, atol=2e-5, rtol=1e-4)


OLD_NAMES = {
    "n_embd": "hidden_size",
    "n_head": "num_attention_heads",
    "n_layer": "num_hidden_layers",
    "n_inner": "intermediate_size",
    "n_positions": "max_position_embeddings",
    "layer_norm_epsilon": "layer_norm_eps",
}


def test_nomics_own_config_is_read_as_transformers_has_it(tmp_path: Path) -> None:
    """As on the hub: names of GPT-2, and swiglu."""
    random_model("NomicBert").save_pretrained(tmp_path)
    expected = load(tmp_path).hidden(FlatTexts.of(texts(), CPU))
    config = read_json(tmp_path, "config.json")
    old = {name: config[new] for name, new in OLD_NAMES.items()}
    old |= {"architectures": ["NomicBertModel"], "vocab_size": VOCAB, "type_vocab_size": 2}
    old |= {"activation_function": "swiglu", "rotary_emb_base": 1000, "qkv_proj_bias": False}
    (tmp_path / "config.json").write_text(json.dumps(old))
    assert torch.equal(load(tmp_path).hidden(FlatTexts.of(texts(), CPU)), expected)
    for name, value in (("prenorm", True), ("rotary_scaling_factor", 2.0), ("qkv_proj_bias", True)):
        with pytest.raises(UnsupportedModel, match=name):
            text_shape({**old, name: value})
