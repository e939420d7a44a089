"""A walk over every file that a start reads: what is wrong with one is told in one sentence."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from sluice_core.errors import SluiceError
from sluice_frontend.http.guards import Inflight
from sluice_worker.api.app import admin_app, api_app
from sluice_worker.api.service import Service
from sluice_worker.base.config import parse
from sluice_worker.engine.startup import start
from sluice_worker.tasks import all_served
from unit.worker.api.tiny import VOCAB_SIZE, write_tokenizer
from unit.worker.engine.factories import save_llama
from unit.worker.ordinary_user import ordinary_user

POINTER = (
    "version https://git-lfs.github.com/spec/v1\n"
    "oid sha256:4d7a214614ab2935c943f9e0ff69d22eadbb8f32b1258daaa5e2ca24d17e2393\nsize 12345\n"
)
TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}{{ eos_token }}"
TOKENS: dict[str, Any] = {"eos_token": "<|end|>", "pad_token": {"content": "<|end|>"}}
DAMAGES = ("denied", "empty", "half", "directory", "pointer")
LOST_CAUSES = ("Traceback", "not a tokenizer.", "No such file", "Error(", "[Errno")


class Case(NamedTuple):
    """A file, where a start finds it, and what is told of it; None where half a file, or an empty
    one, is as good as any other."""

    name: str
    where: str = "model"
    half: str | None = "not valid JSON .*"
    empty: str | None = "empty"


CUT_TOKENIZER = r"not a tokenizer \(.*EOF while parsing .*\)"
HALF_TENSORS = r"truncated: [\d,]+ bytes are there, and its header asks for [\d,]+"
CASES = (
    Case("config.json"),
    Case("generation_config.json"),
    Case("tokenizer.json", half=CUT_TOKENIZER, empty=CUT_TOKENIZER),
    Case("tokenizer_config.json"),
    Case("special_tokens_map.json", "older"),
    Case("added_tokens.json", "older"),
    # A template that is none, or that leaves the messages out, is told to each chat: the other
    # routes do not need it, and transformers reads an empty one too.
    Case("chat_template.jinja", half=None, empty=None),
    Case("additional_chat_templates/tool_use.jinja", half=None, empty=None),
    Case("model.safetensors", half=HALF_TENSORS),
    Case("model.safetensors.index.json", "sharded"),
    Case("model-00001-of-*.safetensors", "sharded", half=HALF_TENSORS),
    Case("model-00002-of-*.safetensors", "sharded", half=HALF_TENSORS),
    Case("keys", "flags", half=None),
    Case("token", "flags", half=None),
    Case("template", "flags", half="is not a valid template: .*"),
    Case("cap", "runtime", half=None, empty=".*, not ''"),
)


def write_checkpoint(directory: Path, *, sharded: bool = False, lists_tokens: bool = True) -> None:
    """A small random Llama with every file that a start may read."""
    save_llama(directory, vocab_size=VOCAB_SIZE, num_hidden_layers=1, sharded=sharded)
    write_tokenizer(directory / "tokenizer.json")
    listed = {"added_tokens_decoder": {"0": {"content": "<|end|>", "special": True}}}
    files = {
        "tokenizer_config.json": {**TOKENS, **(listed if lists_tokens else {})},
        "special_tokens_map.json": TOKENS,
        "added_tokens.json": {"<|end|>": 0},
        "generation_config.json": {"eos_token_id": 0, "temperature": 0.7},
    }
    for name, content in files.items():
        (directory / name).write_text(json.dumps(content))
    (directory / "additional_chat_templates").mkdir()
    for name in ("chat_template.jinja", "additional_chat_templates/tool_use.jinja"):
        (directory / name).write_text(TEMPLATE)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Undamaged files."""
    root = tmp_path_factory.mktemp("whole")
    write_checkpoint(root / "model")
    write_checkpoint(root / "older", lists_tokens=False)
    write_checkpoint(root / "sharded", sharded=True)
    for folder, name, text in (
        ("flags", "keys", "key-one\nkey-two\n"),
        ("flags", "token", "the-token\n"),
        ("flags", "template", TEMPLATE),
        ("runtime", "cap", "16"),
    ):
        (root / folder).mkdir(exist_ok=True)
        (root / folder / name).write_text(text)
    assert sentences(root, root / "model") == []
    return root


@pytest.fixture
def root(whole: Path, tmp_path: Path) -> Path:
    return shutil.copytree(whole, tmp_path / "files")


class Loaded(Exception):
    """All files have been read."""


def until_loaded(phase: str, percent: int) -> None:
    if phase == "profile":
        raise Loaded


def sentences(root: Path, model: Path, *more: str) -> list[str]:
    """What a worker that starts with these files says is wrong, by the code of both processes."""
    flags = {
        "model": model,
        "api-key-file": root / "flags" / "keys",
        "admin-token-file": root / "flags" / "token",
        "runtime-config-dir": root / "runtime",
    }
    line = [*(f"--{name}={value}" for name, value in flags.items()), *more]
    try:
        config = parse([*line, "--device=cpu", "--dtype=float32"], {})
        service = Service(config)
        api_app(service, all_served(service), Inflight())
        admin_app(service)
        start(config.engine, until_loaded)
    except SluiceError as error:
        return error.message.splitlines()
    except Loaded:
        return []
    raise AssertionError("the start went on")


def make_directory(path: Path) -> None:
    """In the file's place."""
    path.unlink()
    path.mkdir()


def damage(path: Path, kind: str) -> None:
    """Do to a file what happens to files."""
    data = path.read_bytes()
    damages: dict[str, Callable[[], object]] = {
        "denied": lambda: path.chmod(0),
        "empty": lambda: path.write_bytes(b""),
        "half": lambda: path.write_bytes(data[: len(data) // 2]),
        "directory": lambda: make_directory(path),
        "pointer": lambda: path.write_text(POINTER),
    }
    damages[kind]()


def expected(case: Case, kind: str, user: int) -> str | None:
    """The cause that must be told."""
    pointer = "a git-lfs pointer, not the file; run `git lfs pull`"
    return {
        "denied": f"permission denied for user {user}",
        "empty": case.empty,
        "half": case.half,
        "directory": "Is a directory",
        "pointer": "must be a whole number .*" if case.where == "runtime" else pointer,
    }[kind]


@pytest.mark.parametrize("kind", DAMAGES)
@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.where}-{case.name}")
def test_a_damaged_file_is_one_sentence_with_its_name_and_its_cause(
    root: Path, case: Case, kind: str
) -> None:
    model = root / (case.where if case.where in ("older", "sharded") else "model")
    more = [f"--chat-template={root / 'flags/template'}"] if case.name == "template" else []
    folder = model if case.where == "model" else root / case.where
    (path,) = folder.glob(case.name)
    damage(path, kind)
    with ordinary_user() as user:
        told = sentences(root, model, *more)
    cause = expected(case, kind, user)
    assert len(told) == (cause is not None), told
    for sentence in told:
        assert re.search(rf"{re.escape(path.name)}\b.*{cause}\.?$", sentence), sentence
        assert not any(lost in sentence for lost in LOST_CAUSES), sentence


@pytest.mark.parametrize(
    ("folder", "begins", "says"),
    [
        ("model", "--model ", " cannot be read: "),
        ("runtime", "--runtime-config-dir ", " cannot be read: "),
        ("model/additional_chat_templates", "", ": "),
    ],
)
def test_a_folder_that_may_not_be_looked_into_is_named_with_the_cause(
    root: Path, folder: str, begins: str, says: str
) -> None:
    (root / folder).chmod(0)
    with ordinary_user() as user:
        (told,) = sentences(root, root / "model")
    assert told.rstrip(".") == f"{begins}{root / folder}{says}permission denied for user {user}"
