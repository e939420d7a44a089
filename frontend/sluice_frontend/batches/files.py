"""*rim*: files that clients keep here, in a directory that several processes may share.

`files/ID` is a file's content and `files/ID.json` what is told of it, which is written last. Names
that begin with a dot are of writers under way, or of killed ones.
"""

import os
import re
import secrets
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from msgspec import Struct
from sluice_core.errors import NotKept

from ..api.batches import FileDeleted, FileList, FileObject

T = TypeVar("T")
FILE, BATCH = "file-", "batch_"
DAY_S = 86_400
KEPT_S = 30 * DAY_S
"""Seconds that files of batches are kept unless asked otherwise, as OpenAI keeps them."""
BATCH_PURPOSES = ("batch", "batch_output")
_ID = re.compile(r"(?:file-|batch_)[0-9a-f]{32}")


class StoredFile(Struct, frozen=True):
    """A file as the disk has it. `owner`: the salt of the key that made it, "" without one."""

    object: FileObject
    owner: str


_STORED = msgspec.json.Decoder(StoredFile)


def new_id(prefix: str) -> str:
    """A name that nobody guesses. Names sort by the time at which they were made."""
    return f"{prefix}{time.time_ns():016x}{secrets.token_hex(8)}"


def now_s() -> int:
    """Whole Unix seconds."""
    return int(time.time())


def is_id(name: str, prefix: str) -> bool:
    """True if `name` may be of a file or a batch: then it may become a path."""
    return name.startswith(prefix) and _ID.fullmatch(name) is not None


def is_seen(owner: str, salt: str) -> bool:
    """True if whoever comes with `salt` may see what `owner` made."""
    return not salt or owner == salt


def write(path: Path, value: object) -> None:
    """Write `value` as JSON, whole or not at all."""
    beside = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        with beside.open("xb") as file:
            file.write(msgspec.json.encode(value))
            file.flush()
            os.fsync(file.fileno())
        beside.replace(path)
    except OSError:
        beside.unlink(missing_ok=True)
        raise


def read(path: Path, decoder: msgspec.json.Decoder[T]) -> T | None:
    """The value at `path`; None if there is none. Raises OSError.

    Two threads that prepare a decoder of one type at once crash msgspec: modules make them.
    """
    try:
        return decoder.decode(path.read_bytes())
    except FileNotFoundError:
        return None
    except (msgspec.DecodeError, UnicodeDecodeError) as e:
        raise OSError(f"{path} is not as it was written: {e}") from e


def page(
    names: Iterable[str],
    find: Callable[[str], T | None],
    *,
    after: str | None,
    limit: int,
    is_newest_first: bool = True,
) -> tuple[list[T], bool]:
    """The first `limit` that `find` finds behind the name `after`, and whether there are more."""
    found = list[T]()
    for name in sorted(names, reverse=is_newest_first):
        if after is not None and (name >= after if is_newest_first else name <= after):
            continue
        one = find(name)
        if one is None:
            continue
        if len(found) == limit:
            return found, True
        found.append(one)
    return found, False


class Files:
    """The files in a directory, which is made. Methods block, and raise OSError."""

    def __init__(self, root: Path) -> None:
        self._folder = root / "files"
        self._folder.mkdir(exist_ok=True)

    def beside(self) -> Path:
        """A path for what is being received."""
        return self._folder / f".{secrets.token_hex(16)}"

    def path(self, file_id: str) -> Path:
        """Where a file's content is."""
        return self._folder / file_id

    def publish(
        self, file_id: str, filename: str, purpose: str, owner: str, kept_s: int | None
    ) -> FileObject:
        """Show a file whose content is there. `kept_s`: seconds; None: as OpenAI, or for ever."""
        if kept_s is None and purpose in BATCH_PURPOSES:
            kept_s = KEPT_S
        made = FileObject(
            id=file_id,
            bytes=self.path(file_id).stat().st_size,
            created_at=(made_s := now_s()),
            expires_at=None if kept_s is None else made_s + kept_s,
            filename=filename,
            purpose=purpose,
        )
        write(self._about(file_id), StoredFile(made, owner))
        return made

    def find(self, file_id: str, salt: str) -> FileObject | None:
        """A file that `salt` may see and whose time is not over."""
        stored = read(self._about(file_id), _STORED) if is_id(file_id, FILE) else None
        if stored is None or not is_seen(stored.owner, salt) or _is_over(stored):
            return None
        return stored.object

    def get(self, file_id: str, salt: str, param: str | None = None) -> FileObject:
        """The same; raises NotKept, which names the field `param`."""
        found = self.find(file_id, salt)
        if found is None:
            raise NotKept(f"No such File object: {file_id[:64]}", param=param)
        return found

    def list(
        self, salt: str, after: str | None, limit: int, purpose: str | None, *, is_desc: bool
    ) -> FileList:
        """A page of the files that `salt` may see."""

        def find(file_id: str) -> FileObject | None:
            found = self.find(file_id, salt)
            return found if found and purpose in (None, found.purpose) else None

        found, has_more = page(
            self._names(), find, after=after, limit=limit, is_newest_first=is_desc
        )
        return FileList(found, has_more, *ends(found))

    def delete(self, file_id: str, salt: str) -> FileDeleted:
        """Delete a file; raises NotKept."""
        self.get(file_id, salt)
        self._unlink(file_id)
        return FileDeleted(file_id)

    def sweep(self) -> None:
        """Delete the files whose time is over, and what killed writers left a day ago."""
        for file_id in self._names():
            stored = read(self._about(file_id), _STORED)
            if stored is not None and _is_over(stored):
                self._unlink(file_id)
        for entry in os.scandir(self._folder):
            has_name = is_id(entry.name, FILE) and self._about(entry.name).exists()
            is_made = entry.name.startswith(".") or is_id(entry.name, FILE)
            with suppress(FileNotFoundError):
                is_old = entry.stat().st_mtime < time.time() - DAY_S
                if is_made and is_old and not has_name:
                    os.unlink(entry)

    def _unlink(self, file_id: str) -> None:
        self._about(file_id).unlink(missing_ok=True)
        self.path(file_id).unlink(missing_ok=True)

    def _about(self, file_id: str) -> Path:
        return self._folder / f"{file_id}.json"

    def _names(self) -> Iterable[str]:
        names = (name.removesuffix(".json") for name in os.listdir(self._folder))
        return {name for name in names if is_id(name, FILE)}


def _is_over(stored: StoredFile) -> bool:
    end_s = stored.object.expires_at
    return end_s is not None and end_s <= time.time()


def ends(found: "list[Any]") -> tuple[str | None, str | None]:
    """The ids of the first and the last one."""
    return (found[0].id, found[-1].id) if found else (None, None)
