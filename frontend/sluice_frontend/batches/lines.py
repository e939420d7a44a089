"""*rim*: the input of a batch: a file of lines, each read when it is sent."""

from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

from .item import Item, Refusal, check, prefix_of, read_line, served_routes

Found = Item | tuple[int, Refusal]
"""An item, or the number of a line or file and why it is refused."""


class Bodies(Protocol):
    """Where the bodies of items are."""

    def body(self, item: Item) -> bytes:
        """The body of an item; raises OSError or UnicodeError if it cannot be read any more."""


class JsonLines:
    """A file of OpenAI's batch lines."""

    noun = "line"

    def __init__(self, path: Path) -> None:
        self._path = path

    def found(self) -> Iterator[Found]:
        """What each line is; an empty one is none. Raises OSError."""
        routes, offset = served_routes(), 0
        with self._path.open("rb") as file:
            for number, data in enumerate(file, 1):
                if data.strip():
                    try:
                        line = read_line(data)
                        prefix = prefix_of(check(line, routes))
                        yield Item(number, line.custom_id, line.url, prefix, len(data), offset)
                    except Refusal as e:
                        yield number, e
                offset += len(data)

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
