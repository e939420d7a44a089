"""The index: the order in which items are sent, and memory that does not grow with them."""

import json
import subprocess
import sys
from pathlib import Path

from sluice_frontend.batches.index import Index
from sluice_frontend.batches.item import Item

MOST_GROWN_KIB = 24 << 10
"""The cache of the database and that of its sorter, and some."""
MEASURED = r"""
import re, sys
from pathlib import Path
from sluice.batch.command import _fill, _mark_done
from sluice_frontend.batches.index import Index
from sluice_frontend.batches.results import Results
from sluice_frontend.batches.lines import JsonLines
source = JsonLines(Path(sys.argv[1]))
index = Index()
_fill(index, source)
with Results(Path(sys.argv[2])) as results:
    _mark_done(index, results)
num = sum(len(source.body(item)) > 1 for item in index.pending())
print(num, re.search(r'VmHWM:\s+(\d+)', Path('/proc/self/status').read_text())[1])
"""


def filled(*items: Item) -> Index:
    index = Index()
    for item in items:
        assert index.add(item) is None
    return index


def order(index: Index) -> list[str]:
    return [item.custom_id for item in index.pending()]


def test_near_lengths_and_shared_prefixes_are_sent_together() -> None:
    index = filled(
        Item(1, "lone short", "/b", 7, 10),
        Item(2, "shared short", "/b", 9, 20),
        Item(3, "other route", "/a", 9, 99),
        Item(4, "lone long", "/b", 8, 30),
        Item(5, "shared long", "/b", 9, 90),
        Item(6, "none", "/b", 0, 25),
    )
    assert order(index) == [
        *("other route", "lone long", "none", "lone short", "shared long", "shared short")
    ]


def test_an_id_that_is_there_is_told_with_its_number_and_the_first_stays() -> None:
    index = filled(Item(3, "a", "/r", 0, 5))
    assert index.add(Item(8, "a", "/r", 0, 6)) == 3
    assert [item.number for item in index.pending()] == [3]


def test_an_item_ends_once() -> None:
    index = filled(*(Item(i, str(i), "/r", 0, 1) for i in (1, 2, 3)))
    assert index.mark("1", is_ok=True)
    assert index.mark("3", is_ok=False)
    assert not index.mark("1", is_ok=True)
    assert not index.mark("4", is_ok=True)
    assert index.counts() == (1, 1, 1)
    assert order(index) == ["2"]


def _peak_kib(folder: Path, num: int) -> int:
    """Peak memory of a process that checks `num` lines, finds half done and reads the others."""
    text = "word " * 60
    with (folder / "in").open("w") as file, (folder / "out").open("w") as done:
        for i in range(num):
            body = {"model": "tiny", "input": f"{i} {text}"}
            line = {"custom_id": f"id-{i}", "method": "POST", "url": "/embed", "body": body}
            file.write(json.dumps(line) + "\n")
            if i % 2:
                result = {"id": "batch_req_0", "custom_id": f"id-{i}", "response": None}
                done.write(json.dumps({**result, "error": {"code": "c", "message": text}}) + "\n")
    run = subprocess.run(
        [sys.executable, "-c", MEASURED, str(folder / "in"), str(folder / "out")],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    num_pending, peak_kib = map(int, run.stdout.split())
    assert num_pending == num // 2
    return peak_kib


def test_memory_does_not_grow_with_the_input(tmp_path: Path) -> None:
    small, large = _peak_kib(tmp_path, 2_000), _peak_kib(tmp_path, 200_000)
    assert (tmp_path / "in").stat().st_size > 3 * 1024 * MOST_GROWN_KIB
    print(f"peak of 2,000 lines: {small >> 10} MiB, of 200,000: {large >> 10} MiB")
    assert large - small < MOST_GROWN_KIB
