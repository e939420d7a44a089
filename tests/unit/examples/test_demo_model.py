"""The demo's checkpoint is what its card says, and its script repeats and resumes."""

import importlib.util
import json
import math
import random
import re
import sys
import sysconfig
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

MODEL_DIR = Path(__file__).resolve().parents[3] / "examples" / "model"
MAX_WEIGHTS_BYTES = 16 * 1024 * 1024


def load_script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("demo_model_train", MODEL_DIR / "train.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


train = load_script()


@pytest.fixture(scope="module")
def model() -> Any:
    return AutoModelForCausalLM.from_pretrained(MODEL_DIR, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(MODEL_DIR)


def test_weights_are_small_and_of_two_to_six_million_parameters(model: Any) -> None:
    num_parameters = sum(p.numel() for p in model.parameters())
    assert 2_000_000 <= num_parameters <= 6_000_000
    assert (MODEL_DIR / "model.safetensors").stat().st_size <= MAX_WEIGHTS_BYTES


def test_config_is_a_grouped_query_llama_with_tied_embeddings(tokenizer: Any) -> None:
    config = json.loads((MODEL_DIR / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert config["num_key_value_heads"] < config["num_attention_heads"]
    assert config["tie_word_embeddings"] is True
    assert config["rope_theta"] == config["rope_parameters"]["rope_theta"]
    assert config["vocab_size"] == len(tokenizer)
    assert config["eos_token_id"] == tokenizer.eos_token_id


@settings(max_examples=200)
@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_tokenizer_gives_any_utf8_text_back(text: str) -> None:
    tokenizer = Tokenizer.from_file(str(MODEL_DIR / "tokenizer.json"))
    ids = tokenizer.encode(text).ids
    assert tokenizer.decode(ids, skip_special_tokens=False) == text


def complete(model: Any, tokenizer: Any, prompt: str, **how: Any) -> list[str]:
    """120 new tokens at most, each decoded alone."""
    ids = torch.tensor([tokenizer.encode(prompt)])
    with torch.no_grad():
        full = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=120, top_k=0, **how
        )
    return [tokenizer.decode([token]) for token in full[0, ids.shape[1] :].tolist()]


@pytest.mark.parametrize("prompt", ["def ", "import ", "class "])
def test_greedy_completion_is_words_and_ascii(prompt: str, model: Any, tokenizer: Any) -> None:
    pieces = complete(model, tokenizer, prompt, do_sample=False)
    assert sum(piece.isascii() for piece in pieces) >= 0.8 * len(pieces)
    assert re.search(r"[A-Za-z_]\w+", "".join(pieces))


@pytest.mark.parametrize(
    ("prompt", "keyword"),
    [
        ("import ", "import "),
        ("def read_lines(path):\n", "return "),
        ("class Queue:\n    def __init__(self", "def "),
    ],
)
def test_greedy_completion_of_a_prompt_of_the_card_has_lines_of_python(
    prompt: str, keyword: str, model: Any, tokenizer: Any
) -> None:
    completion = "".join(complete(model, tokenizer, prompt, do_sample=False))
    assert completion.count("\n") >= 3
    assert keyword in completion


@pytest.mark.parametrize("prompt", ["def ", "class "])
def test_sampled_completions_have_lines_and_blocks(prompt: str, model: Any, tokenizer: Any) -> None:
    torch.manual_seed(0)
    texts = [
        "".join(complete(model, tokenizer, prompt, do_sample=True, temperature=0.8))
        for _ in range(4)
    ]
    assert sum(":" in text and "\n" in text for text in texts) >= 3


def test_held_out_file_is_as_predictable_as_the_card_says(model: Any, tokenizer: Any) -> None:
    card = (MODEL_DIR / "README.md").read_text(encoding="utf-8")
    stated = re.search(r"`textwrap\.py`.*perplexity below (\d+(?:\.\d+)?)", card)
    assert stated is not None
    assert "textwrap.py" in train.HELD_OUT
    text = (Path(sysconfig.get_path("stdlib")) / "textwrap.py").read_text(encoding="utf-8")
    ids = torch.tensor(tokenizer.encode(text))
    with torch.no_grad():
        losses = [model(row[None], labels=row[None]).loss.item() for row in torch.split(ids, 512)]
    assert math.exp(sum(losses) / len(losses)) < float(stated[1])


def test_report_and_card_belong_to_the_script_s_recipe() -> None:
    report = json.loads((MODEL_DIR / "loss.json").read_text())
    recipe = train.Recipe()
    assert report["recipe"] == train.asdict(recipe)
    assert report["steps_done"] == recipe.steps
    assert report["val"][-1][0] == recipe.steps
    assert report["val"][-1][1] < report["val"][0][1]
    card = (MODEL_DIR / "README.md").read_text(encoding="utf-8")
    assert f"--steps {recipe.steps}" in card
    assert f"{report['val'][-1][1]:.2f}" in card


def write(root: Path, name: str, text: str) -> None:
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


def test_corpus_leaves_out_tests_tables_copies_and_held_out_files(tmp_path: Path) -> None:
    write(tmp_path, "a.py", "a = 1\n")
    write(tmp_path, "copy_of_a.py", "a = 1\n")
    write(tmp_path, "queue.py", "held = 'out'\n")
    write(tmp_path, "copy_of_queue.py", "held = 'out'\n")
    write(tmp_path, "test/test_a.py", "t = 1\n")
    write(tmp_path, "site-packages/other.py", "o = 1\n")
    write(tmp_path, "table.py", "x = 0\n" * 40_000)
    write(tmp_path, "empty.py", "")
    corpus = train.read_corpus(tmp_path)
    assert corpus.train == ("a = 1\n",)
    assert corpus.held_out == ("held = 'out'\n",)


@given(st.text(), st.integers(1, 50), st.integers(0, 1000))
def test_cutting_loses_nothing_and_makes_no_empty_piece(text: str, mean: int, seed: int) -> None:
    pieces = train.cut(text, mean, random.Random(seed))
    assert "".join(pieces) == text
    assert all(0 < len(piece) < 2 * mean for piece in pieces)


def test_cut_text_shows_the_lone_space_that_a_prompt_ends_with() -> None:
    text = "import os\n" * 400
    recipe = train.Recipe(chars_between_cuts=5)
    raw = Tokenizer.from_file(str(MODEL_DIR / "tokenizer.json"))
    lone_space = raw.encode(" ").ids[0]
    assert lone_space not in raw.encode(text).ids
    assert lone_space in train.encode_for_training(raw, [text], recipe)


def test_every_pass_over_the_text_shows_each_window_once() -> None:
    recipe = train.Recipe(steps=1000, tokens_per_step=40, seq_len=10)
    tokens = torch.arange(330)  # 32 windows of 10 besides the shift, 8 steps of 4 rows
    for epoch in (0, 1):
        rows = torch.cat([train.batch_at(tokens, recipe, 8 * epoch + i) for i in range(8)])
        starts = sorted(rows[:, 0].tolist())
        assert [later - earlier for earlier, later in zip(starts, starts[1:], strict=False)] == (
            [10] * 31
        )


def test_learning_rate_warms_up_falls_and_ends_near_zero() -> None:
    recipe = train.Recipe()
    rates = [recipe.lr_at(step) for step in range(recipe.steps)]
    peak = recipe.warmup_steps
    assert rates[:peak] == sorted(rates[:peak])
    assert rates[peak:] == sorted(rates[peak:], reverse=True)
    assert max(rates) == pytest.approx(recipe.peak_lr)
    assert 0 < rates[-1] < recipe.peak_lr / 40


def tiny_run(work: Path, steps: int = 4) -> Any:
    texts = tuple(f"def f{i}(x):\n    return x + {i}\n" for i in range(40))
    corpus = train.Corpus(train=texts, held_out=texts[:20])
    recipe = train.Recipe(steps=steps, tokens_per_step=128, seq_len=32, warmup_steps=1)
    return train.prepare(recipe, corpus, train.train_tokenizer(texts), work)


def test_interrupted_run_ends_with_the_weights_of_an_unbroken_one(tmp_path: Path) -> None:
    unbroken = tiny_run(tmp_path)
    unbroken.to_the_end()
    unbroken.checkpoint.unlink()
    broken = tiny_run(tmp_path)
    broken.advance()
    broken.advance()
    broken.save()
    resumed = tiny_run(tmp_path)
    resumed.resume()
    assert resumed.step == 2
    resumed.to_the_end()
    for name, weight in unbroken.model.state_dict().items():
        assert torch.equal(weight, resumed.model.state_dict()[name]), name


def test_checkpoint_of_another_recipe_is_refused(tmp_path: Path) -> None:
    tiny_run(tmp_path).save()
    with pytest.raises(SystemExit, match="another recipe"):
        tiny_run(tmp_path, steps=5).resume()
