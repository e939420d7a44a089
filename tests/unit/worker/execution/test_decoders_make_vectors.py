"""Decoders as embedders equal transformers and sentence-transformers."""

from pathlib import Path
from typing import Any

import pytest
import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Normalize, Pooling, Transformer
from sluice_core.errors import UnsupportedModel
from sluice_core.model.files import Directory, read_json
from sluice_core.model.tasks import task_of, text_shape, without_head
from sluice_kernels.interface import Kernels
from sluice_worker.execution.encoders.decoded import DecodedTexts
from sluice_worker.execution.encoders.files import VectorFiles, of_decoder
from sluice_worker.execution.encoders.texts import FlatTexts
from sluice_worker.execution.models.config import DecoderConfig
from sluice_worker.execution.models.decoder import DecoderBody
from torch import Tensor
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM
from unit.worker.engine.factories import PLAIN, best_kernels
from unit.worker.execution.encoder_models import SMALL, VOCAB, save_tokenizer
from unit.worker.execution.test_vectors_equal_sentence_transformers import (
    TEXTS,
    assert_equal,
    pooled,
)

CPU = torch.device("cpu")
LENGTHS = [1, 2, 16, 17, 17, 40]
HEADS = {**SMALL, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": 9},
    "qwen2": {},
    "qwen3": {"tie_word_embeddings": True},
    "gemma3_text": {"sliding_window": 9, "query_pre_attn_scalar": 16},
}
"""A window of 9 tokens ends within a page of 16."""


def save(path: Path, name: str, auto: Any = AutoModel) -> Any:
    """A small random model of the family `name`."""
    torch.manual_seed(0)
    model = auto.from_config(AutoConfig.for_model(name, **HEADS, **FAMILIES[name])).eval()
    model.save_pretrained(path)
    return model


def load(path: Path, kernels: Kernels) -> tuple[DecodedTexts, VectorFiles]:
    config = DecoderConfig.from_json(without_head(read_json(path, "config.json")))
    files = VectorFiles(path, torch.float32, CPU, of_decoder)
    model = DecodedTexts(DecoderBody(config, files.read, kernels), 16)
    files.finish()
    return model, files


def texts() -> list[list[int]]:
    return [torch.randint(5, VOCAB, (length,)).tolist() for length in LENGTHS]


def rows(model: DecodedTexts, token_ids: list[list[int]]) -> list[Tensor]:
    with torch.inference_mode():
        flat = model.hidden(FlatTexts.of(token_ids, CPU))
    return list(torch.split(flat, [len(text) for text in token_ids]))


@pytest.mark.parametrize("auto", [AutoModel, AutoModelForCausalLM])
@pytest.mark.parametrize("name", FAMILIES)
def test_rows_equal_transformers_at_ragged_lengths(name: str, auto: Any, tmp_path: Path) -> None:
    theirs = save(tmp_path, name, auto)
    for kernels in (PLAIN, best_kernels()):
        model, _ = load(tmp_path, kernels)
        for asked in (texts()[-3:], texts(), texts()[:2]):  # pages of the step before are there
            for token_ids, found in zip(asked, rows(model, asked), strict=True):
                with torch.inference_mode():
                    last = theirs.base_model(torch.tensor([token_ids])).last_hidden_state[0]
                assert torch.allclose(found, last, atol=2e-5, rtol=1e-3)
                assert torch.cosine_similarity(found, last).min() >= 0.9999


def test_a_text_that_is_not_finite_spoils_no_later_one(tmp_path: Path) -> None:
    save(tmp_path, "qwen3")
    (model, _), asked = load(tmp_path, PLAIN), texts()
    before = rows(model, asked)
    words = model.model.embedding
    kept = words[5].clone()
    words[5] = torch.nan
    assert rows(model, [[5] * 40])[0].isnan().any()
    words[5] = kept
    for first, again in zip(before, rows(model, asked), strict=True):
        assert torch.equal(first, again)


def test_last_token_with_prompts_as_qwen3_embedding(tmp_path: Path) -> None:
    save(tmp_path / "base", "qwen3")
    save_tokenizer(tmp_path / "base")
    modules = [
        Transformer(str(tmp_path / "base"), max_seq_length=32),
        Pooling(32, "lasttoken"),
        Normalize(),
    ]
    theirs = SentenceTransformer(modules=modules, prompts={"query": "find: "}, device="cpu")
    theirs.save(str(tmp_path / "saved"))
    model, files = load(tmp_path / "saved", PLAIN)
    for prompt in (None, "query"):
        ours = pooled(tmp_path / "saved", files, model, TEXTS, prompt)
        assert_equal(ours, theirs.encode(TEXTS, prompt_name=prompt))


@pytest.mark.parametrize(
    ("architecture", "files", "expected"),
    [
        ("Qwen3Model", (), "embed"),
        ("Gemma3TextModel", (), "embed"),
        ("Qwen3ForCausalLM", (), "generate"),
        ("Qwen3ForCausalLM", ("modules.json",), "embed"),
        ("Qwen3ForSequenceClassification", (), "classify"),
        ("BertModel", (), "embed"),
        ("BertForSequenceClassification", ("modules.json",), "classify"),
    ],
)
def test_the_task_of_a_checkpoint(
    architecture: str, files: tuple[str, ...], expected: str, tmp_path: Path
) -> None:
    for name in files:
        (tmp_path / name).write_text('[{"type": "x.Transformer", "path": ""}]')
    assert task_of(Directory(tmp_path), {"architectures": [architecture]}) == expected


def test_attention_to_later_tokens_is_refused(tmp_path: Path) -> None:
    save(tmp_path, "qwen2")
    config = read_json(tmp_path, "config.json")
    with pytest.raises(UnsupportedModel, match="is_causal false is not built"):
        text_shape({**config, "is_causal": False})
