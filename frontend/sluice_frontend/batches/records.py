"""*rim*: batches on disk, each of which one process at a time may work on.

`batches/ID.json` is a batch. `live/ID` is there until it has ended, and whoever works on it holds a
lock on that. Beside it, `live/ID.cancel` asks for its end, and two more have its results so far.
"""

import builtins
import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import get_args

import msgspec
from msgspec import Struct
from sluice_core.errors import IsOver, NotKept

from ..api.batches import Batch, BatchList, Ending, Live
from .files import BATCH, ends, is_id, is_seen, now_s, page, read, write

LIVE = get_args(Live)


class Record(Struct):
    """A batch as the disk has it. `owner`: salt of the key that made it; `client`: whose share of
    the engine it takes; `kept_s`: seconds for its outputs; `ending`: the state that it ends in,
    once its results are whole."""

    batch: Batch
    owner: str
    client: str
    kept_s: int | None = None
    ending: Ending | None = None

    @property
    def is_live(self) -> bool:
        """True if there is something left to do."""
        return self.batch.status in LIVE

    @property
    def is_expired(self) -> bool:
        """True if the time is over in which lines may be sent."""
        return self.batch.expires_at <= now_s()


_RECORD = msgspec.json.Decoder(Record)


class Claim:
    """A batch that this process alone may work on."""

    def __init__(self, records: "Records", record: Record) -> None:
        self._records, self.record = records, record
        live = records.live_path(record.batch.id)
        self.output, self.errors = live.with_suffix(".output"), live.with_suffix(".errors")

    @property
    def is_cancelled(self) -> bool:
        """True if its end was asked for."""
        return self._records.cancelled_s(self.record.batch.id) is not None

    def save(self) -> None:
        """Write the record."""
        self._records.save(self.record)

    def end(self) -> None:
        """Write the record of a batch that has ended, and nobody looks at it any more."""
        batch_id = self.record.batch.id
        self.record.batch.cancelling_at = self._records.cancelled_s(batch_id)
        self.save()
        self._records.forget(batch_id)


class Records:
    """The batches in a directory, which is made. Methods block, and raise OSError."""

    def __init__(self, root: Path) -> None:
        self._batches, self._live = root / "batches", root / "live"
        for folder in (self._batches, self._live):
            folder.mkdir(exist_ok=True)

    def create(self, record: Record) -> None:
        """Add a batch."""
        self.live_path(record.batch.id).touch()
        self.save(record)

    def save(self, record: Record) -> None:
        """Write a batch."""
        write(self._path(record.batch.id), record)

    def find(self, batch_id: str) -> Record | None:
        """A batch as it was written last."""
        return read(self._path(batch_id), _RECORD) if is_id(batch_id, BATCH) else None

    def get(self, batch_id: str, salt: str) -> Batch:
        """A batch that `salt` may see, as clients see it; raises NotKept."""
        found = self._shown(batch_id, salt)
        if found is None:
            raise NotKept(f"No batch found with id {batch_id[:64]!r}")
        return found

    def list(self, salt: str, after: str | None, limit: int) -> BatchList:
        """A page of the batches that `salt` may see, the newest first."""
        names = (name.removesuffix(".json") for name in os.listdir(self._batches))
        names = (name for name in names if is_id(name, BATCH))
        found, has_more = page(
            names, lambda name: self._shown(name, salt), after=after, limit=limit
        )
        return BatchList(found, has_more, *ends(found))

    def cancel(self, batch_id: str, salt: str) -> Batch:
        """Ask for the end of a batch; raises NotKept, and IsOver if it has ended."""
        self.get(batch_id, salt)
        marker = self.live_path(batch_id).with_suffix(".cancel")
        marker.touch()
        batch = self.get(batch_id, salt)
        if batch.status not in LIVE:
            marker.unlink(missing_ok=True)
            if batch.status != "cancelled":
                raise IsOver(f"Cannot cancel a batch with status {batch.status!r}.")
        return batch

    def live(self) -> "builtins.list[Record]":
        """Batches that have not ended, the oldest first."""
        names = (name for name in sorted(os.listdir(self._live)) if is_id(name, BATCH))
        return [record for name in names if (record := self.find(name)) is not None]

    @contextmanager
    def claimed(self, batch_id: str) -> Iterator[Claim | None]:
        """Have a batch alone for the block; None if another has it, or it has ended."""
        try:
            file = os.open(self.live_path(batch_id), os.O_RDWR)
        except FileNotFoundError:
            yield None
            return
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            record = self.find(batch_id)
        except BlockingIOError:
            record = None
        try:
            if record is not None and not record.is_live:  # its process was killed at the end
                self.forget(batch_id)
                record = None
            yield None if record is None else Claim(self, record)
        finally:
            os.close(file)

    def cancelled_s(self, batch_id: str) -> int | None:
        """When the end of a live batch was asked for, in Unix seconds."""
        try:
            return int(self.live_path(batch_id).with_suffix(".cancel").stat().st_mtime)
        except FileNotFoundError:
            return None

    def forget(self, batch_id: str) -> None:
        """Take a batch off the live ones."""
        live = self.live_path(batch_id)
        for path in (
            *(live.with_suffix(f".{end}") for end in ("cancel", "output", "errors")),
            live,
        ):
            path.unlink(missing_ok=True)

    def live_path(self, batch_id: str) -> Path:
        """A file that is there while a batch has not ended."""
        return self._live / batch_id

    def _path(self, batch_id: str) -> Path:
        return self._batches / f"{batch_id}.json"

    def _shown(self, batch_id: str, salt: str) -> Batch | None:
        record = self.find(batch_id)
        if record is None or not is_seen(record.owner, salt):
            return None
        batch = record.batch
        if record.is_live and record.ending in (None, "cancelled"):
            batch.cancelling_at = self.cancelled_s(batch_id) or batch.cancelling_at
            if batch.cancelling_at is not None:
                batch.status = "cancelling"
        return batch
