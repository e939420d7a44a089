"""The examples say what they are meant to show: two models fit, one cannot, and the sizes hold."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType

import pytest
import tokenizers
import yaml
from sluice_operator.model.checkpoint import ModelFacts, read
from sluice_operator.model.fit import judge
from sluice_operator.spec.service import parse
from unit.operator.objects import valid_object

EXAMPLES = Path(__file__).parents[4] / "examples"
MODELS = EXAMPLES / "models"


def make_models() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_models", EXAMPLES / "make_models.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def checkpoint(name: str) -> ModelFacts:
    found = read(f"file:///models/{name}", "auto", MODELS, on_cpu=True)
    assert isinstance(found, ModelFacts)
    return found


def test_the_committed_models_are_what_the_script_writes(tmp_path: Path) -> None:
    make_models().main(tmp_path)
    written = {p.relative_to(tmp_path): p.read_bytes() for p in tmp_path.rglob("*.json")}
    assert len(written) == 17
    for path, content in written.items():
        assert (MODELS / path).read_bytes() == content, path


def test_too_large_is_a_model_of_70_billion_parameters() -> None:
    assert checkpoint("too-large").num_parameters == 70_553_706_496
    assert checkpoint("too-large").weights_bytes == 141_107_412_992


def test_too_large_does_not_fit_and_the_answer_says_what_would() -> None:
    service = parse(yaml.safe_load((EXAMPLES / "too-large.yaml").read_text()))
    fit = judge(service.spec, checkpoint("too-large"))
    assert (fit.status, fit.reason) == ("False", "InsufficientMemory")
    assert "131.4 GiB" in fit.message
    assert "It would fit with" in fit.message


def test_the_example_of_a_hub_names_the_secret_that_the_docs_create() -> None:
    spec = parse(yaml.safe_load((EXAMPLES / "qwen.yaml").read_text())).spec
    page = (EXAMPLES.parent / "docs" / "install.md").read_text()
    assert spec.model.secret_ref is None, "whoever tries it has no token"
    assert spec.api_key_secret_ref
    name = spec.api_key_secret_ref.name
    assert f"kubectl create secret generic {name} --from-literal=keys=" in page


def test_random_60m_fits_beside_the_interpreter() -> None:
    service = parse(valid_object())
    found = checkpoint("random-60m")
    assert 60_000_000 < found.num_parameters < 61_000_000
    assert judge(service.spec, found).status == "True"


@pytest.mark.parametrize("text", ["def f(x):\n    return x1 + 42\n", "naïve 🙂 \x00\ttabs", "aab"])
def test_any_text_comes_back_from_the_random_models_tokenizer(text: str) -> None:
    tokenizer = tokenizers.Tokenizer.from_file(str(MODELS / "random-60m" / "tokenizer.json"))
    assert tokenizer.decode(tokenizer.encode(text).ids) == text
    config = json.loads((MODELS / "random-60m" / "config.json").read_text())
    assert tokenizer.get_vocab_size() == config["vocab_size"]
