"""docs/promises.md and SECURITY.md name tests that are there; promises.md is one page."""

import re
from pathlib import Path

import pytest
from bench.attacks.__main__ import ATTACKS

ROOT = Path(__file__).parents[3]
PROMISES, SECURITY = (ROOT / name for name in ("docs/promises.md", "SECURITY.md"))
HEADER = ("| promise | test |", "|---|---|")
TEST = r"`([\w/]+\.py)::(test_\w+)`"
ATTACK = r"`attack ([a-z-]+)`"
PROMISE = rf"\| .+ \| {TEST}(, {TEST})* \|"
LINE = rf"- .+\. ({TEST}|{ATTACK})(, ({TEST}|{ATTACK}))*"
NEEDS_NO_TEST = ("- Any process of a node that reaches the pods is a neighbour, as below.",)
"""It only names another section."""
MOST_LINES = 120


def _rows() -> list[str]:
    lines = PROMISES.read_text().splitlines()
    return [line for line in lines if line.startswith("|") and line not in HEADER]


def _lines() -> list[str]:
    lines = SECURITY.read_text().splitlines()
    return [line for line in lines if line.startswith("- ") and line not in NEEDS_NO_TEST]


def test_each_promise_and_each_line_of_the_threat_model_names_a_test() -> None:
    assert _rows()
    assert _lines()
    for row in _rows():
        assert re.fullmatch(PROMISE, row), row
    for line in _lines():
        assert re.fullmatch(LINE, line), line


@pytest.mark.parametrize("page", [PROMISES, SECURITY], ids=lambda page: page.name)
def test_each_test_that_a_page_names_is_there(page: Path) -> None:
    named = re.findall(TEST, page.read_text())
    assert named
    for path, name in named:
        code = (ROOT / "tests" / path).read_text()
        assert re.search(rf"^(async )?def {name}\(", code, re.MULTILINE), f"{path}::{name}"


def test_the_threat_model_names_attacks_that_are_there() -> None:
    named = re.findall(ATTACK, SECURITY.read_text())
    assert named
    assert set(named) <= {attack.name for attack in ATTACKS}


def test_each_attack_of_a_client_or_an_engine_is_in_the_threat_model() -> None:
    text = SECURITY.read_text()
    hostile = [attack.name for attack in ATTACKS if attack.kind in "ABC"]
    assert [name for name in hostile if f"`attack {name}`" not in text] == [
        "malformed-targets",  # an answer of 400 instead of 500
        "ollama-model-gone",  # nobody's attack: what a probe says then
    ]


def test_promises_are_one_page() -> None:
    assert len(PROMISES.read_text().splitlines()) <= MOST_LINES
