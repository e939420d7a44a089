"""*rim*: all items of an input in a temporary database, so that memory does not grow with them.

SQLite keeps it in a file that has no name. It is gone when the process is, whatever ends that.
"""

import sqlite3
from collections.abc import Iterator

from .item import Item

CACHE_KIB = 8 << 10
PENDING, OK, FAILED = range(3)
_TABLE = """
CREATE TABLE item (
    number INTEGER PRIMARY KEY, custom_id TEXT UNIQUE NOT NULL, route TEXT NOT NULL,
    prefix INTEGER NOT NULL, size INTEGER NOT NULL, offset INTEGER NOT NULL,
    state INTEGER NOT NULL DEFAULT 0)
"""
_FORGET_LONE_PREFIXES = """
UPDATE item SET prefix = 0 WHERE prefix IN (
    SELECT prefix FROM item GROUP BY prefix HAVING count(*) = 1)
"""
_IN_ORDER = """
SELECT number, custom_id, route, prefix, size, offset FROM item WHERE state = 0
ORDER BY route, prefix, size DESC, number
"""


class Index:
    """Items by number and by id, each pending, done or failed. One thread at a time may use it."""

    def __init__(self) -> None:
        self._db = sqlite3.connect("", isolation_level=None, check_same_thread=False)
        for setting in (f"cache_size = -{CACHE_KIB}", "synchronous = OFF", "journal_mode = OFF"):
            self._db.execute(f"PRAGMA {setting}")
        self._db.execute(_TABLE)
        self._db.execute("BEGIN")

    def close(self) -> None:
        """Delete it."""
        self._db.close()

    def add(self, item: Item) -> int | None:
        """Add an item; the number of the earlier one if its id is there already."""
        words = "INSERT OR IGNORE INTO item VALUES (?, ?, ?, ?, ?, ?, 0)"
        if self._db.execute(words, item).rowcount:
            return None
        words = "SELECT number FROM item WHERE custom_id = ?"
        number: int = self._db.execute(words, (item.custom_id,)).fetchone()[0]
        return number

    def keep(self, shard: int, of: int) -> None:
        """Forget all items but those whose number modulo `of` is `shard`."""
        self._db.execute("DELETE FROM item WHERE number % ? != ?", (of, shard))

    def mark(self, custom_id: str, *, is_ok: bool) -> bool:
        """Note the end of an item; False if there is no pending one of that id."""
        state = OK if is_ok else FAILED
        words = "UPDATE item SET state = ? WHERE custom_id = ? AND state = 0"
        return self._db.execute(words, (state, custom_id)).rowcount == 1

    def counts(self) -> tuple[int, int, int]:
        """How many are pending, ok and failed."""
        found = dict(self._db.execute("SELECT state, count(*) FROM item GROUP BY state"))
        return found.get(PENDING, 0), found.get(OK, 0), found.get(FAILED, 0)

    def pending(self) -> Iterator[Item]:
        """Pending items in the order in which they are sent; do not `mark` meanwhile.

        Those of one route and one start of a prompt stand together, as a prefix is then computed
        once. In them the longest is first: near lengths fill a step, and short ones fill the end.
        """
        self._db.execute(_FORGET_LONE_PREFIXES)
        return map(Item._make, self._db.execute(_IN_ORDER))
