"""Inputs: bodies by offset, and folders of texts and images as the routes take them."""

import base64
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from sluice.batch.sources import CHAT, CLASSIFY, EMBEDDINGS, Folder
from sluice_frontend.api import chat
from sluice_frontend.api.pooling.images import is_data_url, read_image
from sluice_frontend.batches.item import Item, Refusal
from sluice_frontend.batches.lines import JsonLines
from unit.cli.batch.tiny_api import line

PNG = b"\x89PNG\r\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    root = tmp_path / "texts"
    (root / "in" / "deep").mkdir(parents=True)
    (root / "a.txt").write_text("one\n")
    (root / "in" / "b.MD").write_text("zwö")
    (root / "in" / "deep" / "c.png").write_bytes(PNG)
    (root / "d.JPG").write_bytes(b"\xff\xd8")
    (root / "e.webp").write_bytes(b"RIFF")
    (root / "left.pdf").write_bytes(b"%PDF")
    (root / "in" / "round").symlink_to(root)
    return root


def bodies(source: Folder | JsonLines) -> dict[str, Any]:
    items = [found for found in source.found() if isinstance(found, Item)]
    return {item.custom_id: json.loads(source.body(item)) for item in items}


def test_lines_are_read_again_at_their_places(tmp_path: Path) -> None:
    path = tmp_path / "in"
    path.write_text(line("a", input="é" * 9) + "\n  \n" + line("b", input="2").rstrip("\n"))
    source = JsonLines(path)
    found = [each for each in source.found() if isinstance(each, Item)]
    assert [(item.number, item.custom_id) for item in found] == [(1, "a"), (4, "b")]
    assert [json.loads(source.body(item)) for item in reversed(found)] == [
        {"input": "2"}, {"input": "é" * 9},
    ]  # fmt: skip


@pytest.mark.parametrize("ids", [("longer", "b"), ("a", "c")])
def test_a_file_that_changes_while_it_is_sent_is_noticed(
    tmp_path: Path, ids: tuple[str, str]
) -> None:
    path = tmp_path / "in"
    path.write_text(line("a") + line("b"))
    source = JsonLines(path)
    _, last = source.found()
    assert isinstance(last, Item)
    path.write_text("".join(map(line, ids)))
    with pytest.raises(Refusal, match="was changed while it was sent"):
        source.body(last)


def test_each_text_and_image_is_an_input_under_its_path(folder: Path) -> None:
    found = bodies(Folder(folder, EMBEDDINGS, "", {"model": "tiny", "dimensions": 8}))
    assert found.keys() == {"a.txt", "in/b.MD", "in/deep/c.png", "d.JPG", "e.webp"}
    assert found["a.txt"] == {"model": "tiny", "dimensions": 8, "input": "one\n"}
    assert found["in/b.MD"]["input"] == "zwö"
    for name, kind in (("in/deep/c.png", "png"), ("d.JPG", "jpeg"), ("e.webp", "webp")):
        url = found[name]["input"]
        assert url.startswith(f"data:image/{kind};base64,")
        assert is_data_url(url)
        data = (folder / name).read_bytes()
        assert base64.b64decode(str(read_image(url, "input").data)) == data
    assert bodies(Folder(folder, CLASSIFY, "", {})) == {
        name: {"input": body["input"]} for name, body in found.items()
    }


def test_a_prompt_stands_in_front_of_each_document(folder: Path) -> None:
    found = bodies(Folder(folder, CHAT, "Sum up:", {"model": "tiny"}))
    [message] = found["a.txt"]["messages"]
    assert message == {"role": "user", "content": "Sum up:\n\none\n"}
    asked = msgspec.convert(found["a.txt"], chat.ChatFields)
    assert asked.model == "tiny"
    [image] = found["in/deep/c.png"]["messages"]
    text, url = image["content"]
    assert text == {"type": "text", "text": "Sum up:"}
    assert url["image_url"]["url"].startswith("data:image/png;base64,")
    [alone] = bodies(Folder(folder, CHAT, "", {}))["a.txt"]["messages"]
    assert alone["content"] == "one\n"


def test_a_file_that_is_no_text_is_refused_and_named(folder: Path) -> None:
    (folder / "bad.txt").write_bytes(b"\xff\xfe\x00")
    refused = [f for f in Folder(folder, EMBEDDINGS, "", {}).found() if not isinstance(f, Item)]
    assert [str(why) for _, why in refused] == ["'bad.txt': it is not UTF-8"]
