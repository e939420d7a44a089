"""Classifiers equal transformers, with texts and pairs of any lengths in one batch."""

from pathlib import Path
from typing import Any

import pytest
import torch
from sluice_core.model.classes import Classes
from sluice_core.model.encoders import EncoderShape
from sluice_core.model.files import Directory, read_json
from sluice_core.model.sentence import Sentence
from sluice_core.model.tasks import task_of, text_shape, without_head
from sluice_frontend.api.pooling.texts import Pair, TextsRequest
from sluice_worker.api.prompts import Prompts
from sluice_worker.execution.encoders.classifier import DecoderHead, EncoderHead
from sluice_worker.execution.encoders.decoded import DecodedTexts
from sluice_worker.execution.encoders.encoder import Encoder
from sluice_worker.execution.encoders.files import VectorFiles, of_decoder, of_encoder
from sluice_worker.execution.encoders.texts import FlatTexts
from sluice_worker.execution.models.config import DecoderConfig
from sluice_worker.execution.models.decoder import DecoderBody
from sluice_worker.text.texts import TextReader
from sluice_worker.text.tokenizer import Tokenizer
from torch import Tensor
from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer
from unit.worker.engine.factories import PLAIN
from unit.worker.execution.encoder_models import CONFIGS, VOCAB, random_model, save_tokenizer
from unit.worker.execution.test_decoders_make_vectors import FAMILIES, HEADS

CPU = torch.device("cpu")
LENGTHS = [2, 7, 7, 20, 33]
KIND = "ForSequenceClassification"


def logits(path: Path, texts: list[list[int]], seconds: list[int] | None = None) -> Tensor:
    """Ours: float32 [num_texts, num_classes]."""
    config = read_json(path, "config.json")
    shape, num = text_shape(config), len(Classes.read(Directory(path), config).labels)
    rows: Any
    head: EncoderHead | DecoderHead
    if isinstance(shape, EncoderShape):
        files = VectorFiles(path, torch.float32, CPU, of_encoder(shape.family))
        rows, head = Encoder(shape, files.read, PLAIN), EncoderHead(shape, num, files.read)
    else:
        files = VectorFiles(path, torch.float32, CPU, of_decoder)
        body = DecoderBody(DecoderConfig.from_json(without_head(config)), files.read, PLAIN)
        rows, head = DecodedTexts(body, 16), DecoderHead(shape, num, files.read)
    files.finish()
    with torch.inference_mode():
        batch = FlatTexts.of(texts, CPU, seconds=seconds)
        return head(rows.hidden(batch), batch)


def texts() -> list[list[int]]:
    torch.manual_seed(1)
    return [torch.randint(5, VOCAB, (length,)).tolist() for length in LENGTHS]


def assert_equal(ours: Tensor, model: Any, asked: list[list[int]]) -> None:
    with torch.inference_mode():
        for token_ids, found in zip(asked, ours, strict=True):
            expected = model(torch.tensor([token_ids])).logits[0]
            assert torch.allclose(found, expected, atol=5e-5, rtol=1e-3)


@pytest.mark.parametrize("num_labels", [1, 3])
@pytest.mark.parametrize("name", [name for name in CONFIGS if name != "NomicBert"])
def test_an_encoders_numbers_equal_transformers(name: str, num_labels: int, tmp_path: Path) -> None:
    model = random_model(name, KIND, num_labels=num_labels)
    model.save_pretrained(tmp_path)
    assert task_of(Directory(tmp_path), read_json(tmp_path, "config.json")) == "classify"
    assert_equal(logits(tmp_path, texts()), model, texts())


def test_modernbert_may_read_the_mean(tmp_path: Path) -> None:
    model = random_model("ModernBert", KIND, classifier_pooling="mean", classifier_bias=True)
    model.save_pretrained(tmp_path)
    assert_equal(logits(tmp_path, texts()), model, texts())


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma3_text"])
def test_a_decoders_numbers_equal_transformers(name: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = AutoConfig.for_model(name, **HEADS, **FAMILIES[name], num_labels=3, pad_token_id=None)
    model = AutoModelForSequenceClassification.from_config(config).eval()
    model.save_pretrained(tmp_path)
    assert_equal(logits(tmp_path, texts()), model, texts())


@pytest.mark.parametrize("name", ["Bert", "Roberta", "DistilBert"])
@pytest.mark.parametrize("most", [64, 12])
def test_pairs_are_read_and_cut_as_transformers_reads_them(
    name: str, most: int, tmp_path: Path
) -> None:
    model = random_model(name, KIND, num_labels=1)
    model.save_pretrained(tmp_path)
    save_tokenizer(tmp_path, tells_pairs=name == "Bert")
    pairs = [
        Pair("ab", "cdefghijzklmn"),
        Pair("abcdefghzijklm", "xyz"),
        Pair("abcdefghi", "jklmnopq"),
    ]
    config = read_json(tmp_path, "config.json")
    reader = TextReader(Prompts(Tokenizer(tmp_path), config, parse_special=True), Sentence())
    read = reader.read(TextsRequest(inputs=tuple(pairs)), 64, cut=most)
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    asked = [
        theirs(*pair, truncation="longest_first", max_length=most, return_tensors="pt")
        for pair in pairs
    ]
    for ours, expected in zip(read, asked, strict=True):
        assert list(ours.token_ids) == expected["input_ids"][0].tolist()
    order = sorted(range(3), key=lambda number: len(read[number].token_ids))
    found = logits(
        tmp_path,
        [list(read[number].token_ids) for number in order],
        [read[number].num_second for number in order],
    )
    for row, number in zip(found, order, strict=True):
        with torch.inference_mode():
            assert torch.allclose(row, model(**asked[number]).logits[0], atol=5e-5, rtol=1e-3)
