"""*rim*: the input of a batch: a file of lines, each read when it is sent."""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Protocol

from sluice_core.words import clean

from .index import Index
from .item import MAX_SHOWN, Item, Refusal, check, prefix_of, read_line, served_routes

Found = Item | tuple[int, Refusal]
"""An item, or the number of a line or file and why it is refused."""


class Bodies(Protocol):
    """Where the bodies of items are."""

    def body(self, item: Item) -> bytes:
        """The body of an item; raises OSError or UnicodeError if it cannot be read any more."""


class JsonLines:
    """A file of OpenAI's batch lines. `endpoint`: the one route of all lines, which then name one
    `model`, that of the first; None: each line has any route that is served."""

    noun = "line"

    def __init__(self, path: Path, endpoint: str | None = None) -> None:
        self._path = path
        self._is_alike = endpoint is not None
        self._routes = served_routes() if endpoint is None else frozenset((endpoint,))
        self.model: str | None = None

    def found(self) -> Iterator[Found]:
        """What each line is; an empty one is none. Raises OSError."""
        offset, is_first = 0, True
        with self._path.open("rb") as file:
            for number, data in enumerate(file, 1):
                if data.strip():
                    try:
                        line = read_line(data)
                        body = check(line, self._routes)
                        if self._is_alike:
                            self._check_model(body.model, is_first=is_first)
                            is_first = False
                        prefix = prefix_of(body)
                        yield Item(number, line.custom_id, line.url, prefix, len(data), offset)
                    except Refusal as e:
                        yield number, e
                offset += len(data)

    def _check_model(self, model: object, *, is_first: bool) -> None:
        model = model if isinstance(model, str) else None
        if is_first:
            self.model = model
        elif model != self.model:
            shown = [clean(str(each), MAX_SHOWN) for each in (model, self.model)]
            why = "its model {!r} is not that of the first line, {!r}".format(*shown)
            raise Refusal(why, "model_mismatch")

    def body(self, item: Item) -> bytes:
        """The body of an item's line, byte for byte; raises `Refusal` if the file has changed."""
        with self._path.open("rb") as file:
            file.seek(item.offset)
            data = file.read(item.size)
        try:
            line = read_line(data)
            if (line.custom_id, line.url) == (item.custom_id, item.route):
                return bytes(line.body)
        except Refusal:
            pass
        raise Refusal(f"{self._path} was changed while it was sent")


def fill(index: Index, found: Iterable[Found], noun: str) -> Iterator[tuple[int, Refusal]]:
    """Add all items, and tell which lines or files are none, or have an id that is there."""
    for each in found:
        if not isinstance(each, Item):
            yield each
        elif earlier := index.add(each):
            shown = clean(each.custom_id, MAX_SHOWN)
            why = f"its custom_id {shown!r} is that of {noun} {earlier}"
            yield each.number, Refusal(why, "duplicate_custom_id")
