"""*rim*: a folder of texts and images as an input; each is read when it is sent."""

import base64
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from sluice_frontend.batches.item import Item, Refusal
from sluice_frontend.batches.lines import Found, JsonLines

CHAT, CLASSIFY, EMBEDDINGS = "/v1/chat/completions", "/classify", "/v1/embeddings"
FOLDER_ROUTES = (EMBEDDINGS, CLASSIFY, CHAT)
TEXTS = (".txt", ".md")
IMAGES = {".png": "png", ".jpg": "jpeg", ".jpeg": "jpeg", ".webp": "webp"}
"""Suffixes of images, and their media types after `image/`."""


class Folder:
    """Texts and images of a folder, each the input of one request. `fields`: of every body."""

    noun = "file"

    def __init__(self, root: Path, route: str, prompt: str, fields: Mapping[str, Any]) -> None:
        self._root, self._route, self._prompt = root, route, prompt
        self.fields = dict(fields)

    def found(self) -> Iterator[Found]:
        """What each text and each image is; other files are left out."""
        for number, (path, size) in enumerate(_files(self._root), 1):
            custom_id = path.relative_to(self._root).as_posix()
            try:
                custom_id.encode()
                if path.suffix.lower() in TEXTS:
                    path.read_text(encoding="utf-8")
                yield Item(number, custom_id, self._route, 0, size)
            except (OSError, UnicodeError) as e:
                why = e.strerror if isinstance(e, OSError) else "it is not UTF-8"
                yield number, Refusal(f"{custom_id!r}: {why}")

    def body(self, item: Item) -> bytes:
        """The request of a file; raises OSError or UnicodeError if it cannot be read any more."""
        path = self._root / item.custom_id
        kind = IMAGES.get(path.suffix.lower())
        if kind is None:
            content = path.read_text(encoding="utf-8")
        else:
            content = f"data:image/{kind};base64,{base64.b64encode(path.read_bytes()).decode()}"
        if self._route != CHAT:
            return json.dumps({**self.fields, "input": content}).encode()
        parts = [self._prompt] if self._prompt else []
        said: Any = "\n\n".join([*parts, content])
        if kind is not None:
            said = [{"type": "text", "text": text} for text in parts]
            said.append({"type": "image_url", "image_url": {"url": content}})
        message = {"role": "user", "content": said}
        return json.dumps({**self.fields, "messages": [message]}).encode()


def _files(folder: Path) -> Iterator[tuple[Path, int]]:
    """Texts and images with their bytes, of a folder and those in it, but behind no link to one."""
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                yield from _files(Path(entry.path))
            elif Path(entry.name).suffix.lower() in (*TEXTS, *IMAGES) and entry.is_file():
                yield Path(entry.path), entry.stat().st_size


Source = JsonLines | Folder
