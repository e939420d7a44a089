"""docs/promises.md is one page, and each of its promises names tests that are there."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[3]
LINES = (ROOT / "docs/promises.md").read_text().splitlines()
HEADER = ("| promise | test |", "|---|---|")
TEST = r"`([\w/]+\.py)::(test_\w+)`"
ROW = rf"\| .+ \| {TEST}(, {TEST})* \|"
MOST_LINES = 95


def test_each_promise_names_tests_that_are_there() -> None:
    rows = [line for line in LINES if line.startswith("|") and line not in HEADER]
    assert rows
    for row in rows:
        assert re.fullmatch(ROW, row), row
        for path, name in re.findall(TEST, row):
            code = (ROOT / "tests" / path).read_text()
            assert re.search(rf"^(async )?def {name}\(", code, re.MULTILINE), f"{path}::{name}"


def test_it_is_one_page() -> None:
    assert len(LINES) <= MOST_LINES
