"""Where a model's chat template comes from, and what is told where there is none."""

import json
import pickle
from pathlib import Path
from typing import Any

import pytest
from sluice_core.errors import CheckpointError, ConfigError, RequestError
from sluice_frontend.api.chat import Conversation
from sluice_worker.text.renderer import MAX_PIECES, Templates
from sluice_worker.text.tokenizer import Tokenizer
from transformers import PreTrainedTokenizerFast
from unit.worker.api.tiny import write_tokenizer

HELLO: dict[str, Any] = {"role": "user", "content": "hello"}
SAID = " {{ messages[0].content }}"
READS_TOOLS = "{% if tools %}{% endif %}" + SAID
TOOL: dict[str, Any] = {"type": "function", "function": {"name": "f"}}


def text_of(directory: Path, flag: Path | None = None, **fields: Any) -> str:
    """The prompt of one message, in text."""
    tokenizer = Tokenizer(directory)
    pieces = Templates.of(directory, flag, tokenizer).render(Conversation((HELLO,), **fields))
    ids = tokenizer.encode_rendered(pieces)
    return tokenizer.decode(ids, skip_special_tokens=False)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    write_tokenizer(tmp_path / "tokenizer.json")
    return tmp_path


def configure(directory: Path, **fields: Any) -> None:
    (directory / "tokenizer_config.json").write_text(json.dumps(fields))


def test_the_flag_is_before_the_file_and_the_file_before_the_configuration(
    directory: Path,
) -> None:
    configure(directory, chat_template="configured" + SAID)
    assert text_of(directory) == "configured hello"
    (directory / "chat_template.jinja").write_text("in the file" + SAID)
    assert text_of(directory) == "in the file hello"
    (directory / "mine").write_text("by the flag" + SAID)
    assert text_of(directory, directory / "mine") == "by the flag hello"


def test_special_tokens_are_read_as_texts_or_objects(directory: Path) -> None:
    template = "{{ bos_token }}|{{ eos_token }}|{{ add_bos_token }}" + SAID
    tokens = {"bos_token": "<|end|>", "eos_token": {"content": "<e>"}, "add_bos_token": True}
    configure(directory, chat_template=template, **tokens)
    assert text_of(directory) == "<|end|>|<e>| hello"


def test_tools_have_a_template_of_their_own_where_there_is_one(directory: Path) -> None:
    named = [
        {"name": "default", "template": "plain" + SAID},
        {"name": "tool_use", "template": "{{ tools | length }} tools" + SAID},
    ]
    configure(directory, chat_template=named)
    assert text_of(directory) == "plain hello"
    assert text_of(directory, tools=(TOOL, TOOL)) == "2 tools hello"


@pytest.mark.parametrize("files", ["", "default", "tool_use", "default other tool_use"])
@pytest.mark.parametrize("configured", [None, "text", [], ["tool_use"], ["default", "tool_use"]])
@pytest.mark.parametrize("tools", [(), (TOOL,)])
def test_the_template_is_the_one_that_transformers_takes(
    directory: Path, files: str, configured: list[str] | str | None, tools: tuple[Any, ...]
) -> None:
    """Files go before the configuration, all of them; chat_template.json is of processors."""
    (directory / "additional_chat_templates").mkdir()
    (directory / "chat_template.json").write_text('{"chat_template": "of a processor"}')
    for name in files.split():
        file = "chat_template" if name == "default" else f"additional_chat_templates/{name}"
        (directory / f"{file}.jinja").write_text(f"{name} in a file{READS_TOOLS}")
    if isinstance(configured, list):
        named = [
            {"name": name, "template": f"{name} configured{READS_TOOLS}"} for name in configured
        ]
        configure(directory, chat_template=named)
    elif configured:
        configure(directory, chat_template=configured + READS_TOOLS)
    theirs = PreTrainedTokenizerFast.from_pretrained(directory)
    try:
        expected = theirs.get_chat_template(tools=list(tools) or None)
    except ValueError:
        with pytest.raises(RequestError, match="no chat template"):
            text_of(directory, tools=tools)
    else:
        assert text_of(directory, tools=tools) == expected.removesuffix(READS_TOOLS) + " hello"


def test_a_model_without_a_template_says_so(directory: Path) -> None:
    with pytest.raises(RequestError, match="no chat template; start the worker with --chat-t"):
        text_of(directory)


def test_a_template_that_is_none_is_told_to_each_chat_and_refused_as_a_flag(
    directory: Path,
) -> None:
    (directory / "chat_template.jinja").write_text("{% for %}")
    with pytest.raises(RequestError, match="is not a valid template"):
        text_of(directory)
    with pytest.raises(ConfigError, match="is not a valid template"):
        text_of(directory, directory / "chat_template.jinja")


def test_a_flag_that_names_no_text_is_refused(directory: Path) -> None:
    (directory / "bytes").write_bytes(b"\xff")
    for name in ("bytes", "missing"):
        with pytest.raises(ConfigError, match="cannot be read"):
            text_of(directory, directory / name)


def test_a_template_outside_the_checkpoint_is_not_read(directory: Path) -> None:
    outside = directory.parent / "outside.jinja"
    outside.write_text("secret")
    (directory / "chat_template.jinja").symlink_to(outside)
    with pytest.raises(CheckpointError, match="outside"):
        text_of(directory)


def test_a_lone_surrogate_is_refused(directory: Path) -> None:
    (directory / "chat_template.jinja").write_text("{{ '\\ud800' }}" + SAID)
    with pytest.raises(RequestError, match="surrogate"):
        text_of(directory)


def test_messages_that_are_nested_too_deeply_are_refused(directory: Path) -> None:
    (directory / "chat_template.jinja").write_text("{{ messages | tojson }}")
    deep: list[Any] = []
    for _ in range(900):
        deep = [deep]
    with pytest.raises(RequestError):
        Templates.of(directory, None, Tokenizer(directory)).render(
            Conversation(({**HELLO, "x": deep},))
        )


def test_a_chat_of_nothing_but_control_tokens_is_refused(directory: Path) -> None:
    """Each is a piece of its own, of a hundred bytes of memory."""
    (directory / "chat_template.jinja").write_text(SAID)
    templates = Templates.of(directory, None, Tokenizer(directory))
    assert len(templates.render(Conversation(({**HELLO, "content": "<|end|>" * 1000},)))) > 1000
    with pytest.raises(RequestError, match="control tokens"):
        templates.render(Conversation(({**HELLO, "content": "<|end|>" * MAX_PIECES},)))


def test_templates_go_to_another_process_as_they_are(directory: Path) -> None:
    (directory / "chat_template.jinja").write_text(SAID)
    templates = Templates.of(directory, None, Tokenizer(directory))
    assert pickle.loads(pickle.dumps(templates)) == templates  # noqa: S301 - our own
