"""Vectors equal sentence-transformers, from the files that it writes and wrote."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import (
    Dense,
    Normalize,
    Pooling,
    Transformer,
)
from sluice_core.errors import CheckpointError
from sluice_core.model.encoders import EncoderShape
from sluice_core.model.files import Directory, read_json
from sluice_core.model.sentence import Sentence
from sluice_core.model.tasks import text_shape
from sluice_frontend.api.pooling.texts import TextsRequest
from sluice_worker.api.prompts import Prompts
from sluice_worker.engine.vector_model import TextRows
from sluice_worker.execution.encoders.encoder import Encoder
from sluice_worker.execution.encoders.files import VectorFiles, of_encoder
from sluice_worker.execution.encoders.pooling import Pooler
from sluice_worker.execution.encoders.texts import FlatTexts
from sluice_worker.text.texts import TextReader
from sluice_worker.text.tokenizer import Tokenizer
from torch import Tensor
from unit.worker.engine.factories import PLAIN
from unit.worker.execution.encoder_models import random_model, save_tokenizer

CPU = torch.device("cpu")
TEXTS = ["a", "abc", "the quick brown fox", "jumps over", "the lazy dog and on and on it runs"]


def save(path: Path, *behind: Any, prompts: dict[str, str] | None = None) -> SentenceTransformer:
    """A BERT with these modules behind it."""
    random_model("Bert").save_pretrained(path / "base")
    save_tokenizer(path / "base")
    modules = [Transformer(str(path / "base"), max_seq_length=32), *behind]
    model = SentenceTransformer(modules=modules, prompts=prompts, device="cpu")
    model.save(str(path / "saved"))
    return model


def vectors(path: Path, texts: list[str], prompt: str | None = None) -> Tensor:
    """Ours, in the order of `texts`."""
    shape = EncoderShape.from_config(read_json(path, "config.json"))
    files = VectorFiles(path, torch.float32, CPU, of_encoder(shape.family))
    return pooled(path, files, Encoder(shape, files.read, PLAIN), texts, prompt)


def pooled(
    path: Path, files: VectorFiles, encoder: TextRows, texts: list[str], prompt: str | None
) -> Tensor:
    """The vectors of `texts`, in their order."""
    config = read_json(path, "config.json")
    sentence = Sentence.read(Directory(path), text_shape(config).hidden_size)
    prompts = Prompts(Tokenizer(path), config, parse_special=True)
    most = sentence.max_seq_length or 64
    asked = TextsRequest(inputs=tuple(texts), prompt_name=prompt)
    read = TextReader(prompts, sentence).read(asked, most, cut=most)
    order = sorted(range(len(read)), key=lambda i: len(read[i].token_ids))
    with torch.inference_mode():
        batch = FlatTexts.of(
            [read[i].token_ids for i in order], CPU, skipped=[read[i].num_skipped for i in order]
        )
        found = Pooler(sentence, files.folder)(encoder.hidden(batch), batch)
    files.finish()
    back = sorted(range(len(order)), key=order.__getitem__)
    return found[back]


def assert_equal(ours: Tensor, theirs: Any) -> None:
    expected = torch.as_tensor(theirs)
    assert ours.shape == expected.shape
    assert torch.allclose(ours, expected, atol=2e-5, rtol=1e-4)
    assert torch.cosine_similarity(ours, expected).min() >= 0.9999


@pytest.mark.parametrize(
    "mode",
    ["cls", "max", "mean", "mean_sqrt_len_tokens", "weightedmean", "lasttoken", ("cls", "mean")],
)
def test_each_pooling(mode: Any, tmp_path: Path) -> None:
    model = save(tmp_path, Pooling(32, mode))
    assert_equal(vectors(tmp_path / "saved", TEXTS), model.encode(TEXTS))


def test_dense_layers_and_normalisation_in_their_order(tmp_path: Path) -> None:
    behind = Dense(64, 24, activation_function=torch.nn.GELU()), Normalize(), Dense(24, 8, False)
    model = save(tmp_path, Pooling(32, ("max", "mean")), *behind)
    assert_equal(vectors(tmp_path / "saved", TEXTS), model.encode(TEXTS))


@pytest.mark.parametrize("mode", ["cls", "max", "mean", "weightedmean", "lasttoken"])
@pytest.mark.parametrize("include_prompt", [True, False])
def test_prompts_count_or_not(mode: Any, include_prompt: bool, tmp_path: Path) -> None:
    pooling = Pooling(32, mode, include_prompt=include_prompt)
    model = save(tmp_path, pooling, Normalize(), prompts={"query": "find: "})
    ours = vectors(tmp_path / "saved", TEXTS, "query")
    assert_equal(ours, model.encode(TEXTS, prompt_name="query"))


def test_the_older_format_is_read_too(tmp_path: Path) -> None:
    model = save(tmp_path, Pooling(32, ("cls", "mean")), Normalize())
    saved = tmp_path / "saved"
    modules = json.loads((saved / "modules.json").read_text())
    for module in modules:
        module["type"] = f"sentence_transformers.models.{module['type'].rpartition('.')[2]}"
    (saved / "modules.json").write_text(json.dumps(modules))
    old = {"word_embedding_dimension": 32, "pooling_mode_cls_token": True}
    old |= {"pooling_mode_mean_tokens": True, "pooling_mode_max_tokens": False}
    (saved / "1_Pooling" / "config.json").write_text(json.dumps(old))
    assert_equal(vectors(saved, TEXTS), model.encode(TEXTS))


def test_texts_are_cut_and_lower_cased_as_the_files_say(tmp_path: Path) -> None:
    model = save(tmp_path, Pooling(32, "mean"))
    saved, long = tmp_path / "saved", ["abcdefgh" * 9, "ab"]
    assert_equal(vectors(saved, long), model.encode(long))
    config = json.loads((saved / "sentence_bert_config.json").read_text())
    (saved / "sentence_bert_config.json").write_text(json.dumps(config | {"do_lower_case": True}))
    assert_equal(vectors(saved, ["AbC"]), model.encode(["abc"]))


@pytest.mark.parametrize(
    ("name", "change", "said"),
    [
        ("modules.json", {"type": "x.models.LSTM"}, "module LSTM is not built"),
        ("modules.json", {"path": "../else"}, "leads outside"),
        (
            "sentence_bert_config.json",
            {"modality_config": {"text": {}, "message": {}}},
            "texts for a chat template",
        ),
        ("1_Pooling/config.json", {"pooling_mode": "median"}, "pooling_mode median is not of"),
        ("1_Pooling/config.json", {"embedding_dimension": 7}, "pools 7 numbers a token"),
        ("2_Dense/config.json", {"activation_function": "os.system"}, "os.system is not of"),
        ("2_Dense/config.json", {"in_features": 5}, "do not follow a vector of 32"),
    ],
)
def test_what_is_not_built_is_refused_by_its_name(
    name: str, change: dict[str, Any], said: str, tmp_path: Path
) -> None:
    save(tmp_path, Pooling(32, "mean"), Dense(32, 8))
    path = tmp_path / "saved" / name
    written = json.loads(path.read_text())
    if isinstance(written, list):
        written[1] |= change
    else:
        written |= change
    path.write_text(json.dumps(written))
    with pytest.raises(CheckpointError, match=said):
        Sentence.read(Directory(tmp_path / "saved"), 32)


def test_without_its_files_it_is_the_mean_as_in_sentence_transformers(tmp_path: Path) -> None:
    random_model("Bert").save_pretrained(tmp_path)
    save_tokenizer(tmp_path)
    model = SentenceTransformer(str(tmp_path), device="cpu")
    assert_equal(vectors(tmp_path, TEXTS), model.encode(TEXTS))
