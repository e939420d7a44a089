"""Rerankers that write: what their files say, and what is refused."""

import json
from pathlib import Path
from typing import Any

import pytest
from sluice_core.errors import CheckpointError
from sluice_core.model.files import Directory
from sluice_core.model.sentence import TokenScore
from sluice_core.model.tasks import task_of

PREFIX = "sentence_transformers.cross_encoder.modules.logit_score."
MODULES = [
    {"type": "sentence_transformers.base.modules.transformer.Transformer", "path": ""},
    {"type": f"{PREFIX}LogitScore", "path": "1_LogitScore"},
]
FILES: dict[str, Any] = {
    "modules.json": MODULES,
    "1_LogitScore/config.json": {"true_token_id": 7, "false_token_id": 9},
    "sentence_bert_config.json": {
        "modality_config": {"text": {}, "message": {}},
        "processing_kwargs": {"chat_template": {"add_generation_prompt": True}},
    },
    "config_sentence_transformers.json": {
        "prompts": {"web": "find"},
        "default_prompt_name": "web",
    },
}
VOCAB = 64


def write(path: Path, changes: dict[str, Any] | None = None) -> Directory:
    for name, content in {**FILES, **(changes or {})}.items():
        (path / name).parent.mkdir(exist_ok=True)
        (path / name).write_text(json.dumps(content))
    return Directory(path)


def test_tokens_prompt_and_variables_come_from_the_files(tmp_path: Path) -> None:
    found = TokenScore.read(write(tmp_path), VOCAB)
    assert found == TokenScore(7, 9, "find", {"add_generation_prompt": True})
    assert task_of(Directory(tmp_path), {"architectures": ["Qwen3ForCausalLM"]}) == "classify"


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("1_LogitScore/config.json", {"true_token_id": 64}, "outside the vocabulary"),
        ("1_LogitScore/config.json", {"false_token_id": 1}, "outside the vocabulary"),
        (
            "1_LogitScore/config.json",
            {"true_token_id": 1, "module_input_name": "embeddings"},
            "built for logits only",
        ),
        (
            "sentence_bert_config.json",
            {"modality_config": {"message": {}}, "processing_kwargs": {"text": {"max_length": 9}}},
            "processing_kwargs are built",
        ),
        (
            "sentence_bert_config.json",
            {"modality_config": {"text": {}}},
            "pairs without a chat template",
        ),
        (
            "modules.json",
            [*MODULES, {"type": "x.Normalize", "path": ""}],
            "built behind Transformer alone",
        ),
    ],
)
def test_what_is_not_built_is_refused(name: str, content: Any, said: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=said):
        TokenScore.read(write(tmp_path, {name: content}), VOCAB)


def test_other_checkpoints_have_none(tmp_path: Path) -> None:
    assert TokenScore.read(Directory(tmp_path), VOCAB) is None
