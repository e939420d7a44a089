"""*rim*: the file of results: whole lines, one writer, and what a killed writer left of them."""

import fcntl
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Self

import msgspec

from .item import Refusal, Result

OPENING = b'{"id":"batch_req_'
"""How each line begins; only a torn line that begins so is cut off."""


class WriteError(Exception):
    """The file cannot be written any more; all whole lines are still in it."""


class Locked(Refusal):
    """Another run writes the file."""


class Results:
    """OUT, locked while it is entered; entering raises `Refusal` if it is no file, or locked."""

    _decoder = msgspec.json.Decoder(Result)  # threads that prepare one type at once crash msgspec

    def __init__(self, path: Path) -> None:
        self.path, self._end = path, 0

    def __enter__(self) -> Self:
        flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NONBLOCK
        try:
            self._file = os.open(self.path, flags, 0o666)
        except OSError as e:
            raise Refusal(f"{self.path} cannot be opened: {e.strerror}") from e
        try:
            if not stat.S_ISREG(os.fstat(self._file).st_mode):
                raise Refusal(f"{self.path} is not a regular file")
            try:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as e:
                raise Locked(f"{self.path} is being written by another run") from e
        except Refusal:
            os.close(self._file)
            raise
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._file)

    def read(self) -> Iterator[Result]:
        """The results that are there; cuts off what a killed writer left of a last line."""
        with open(self._file, "rb", closefd=False) as file:
            for number, line in enumerate(file, 1):
                if not line.endswith(b"\n"):
                    if line[: len(OPENING)] != OPENING[: len(line)]:
                        raise Refusal(f"{self.path} ends with a line that is no result of a batch")
                    os.ftruncate(self._file, self._end)
                    return
                try:
                    yield self._decoder.decode(line)
                except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as e:
                    raise Refusal(f"line {number} of {self.path} is no result of a batch") from e
                self._end += len(line)

    def append(self, result: Result) -> None:
        """Append one whole line by one write; raises `WriteError`."""
        line = msgspec.json.encode(result) + b"\n"
        try:
            left = line
            while left:  # a second write only says why the first one was short
                left = left[os.write(self._file, left) :]
        except OSError as e:
            os.ftruncate(self._file, self._end)
            raise WriteError(f"{self.path} cannot be written: {e.strerror}") from e
        self._end += len(line)

    def sync(self) -> None:
        """Have the disk keep all lines; raises `WriteError`."""
        try:
            os.fsync(self._file)
        except OSError as e:
            raise WriteError(f"{self.path} cannot be written: {e.strerror}") from e
