"""The measuring side of the attacks: how an engine reads a request, and what the page shows."""

import json
from pathlib import Path

import pytest
from bench.attacks.__main__ import ATTACKS
from bench.attacks.contract import zstd
from bench.attacks.hostile import WORDS, controls
from bench.attacks.ollama import CHAT, UNLOADING, harm
from bench.attacks.page import BEGIN, END, Row, markdown, write
from bench.attacks.table import KINDS
from strangers.engine import Seen
from strangers.sequences import sequences

RELIABILITY = Path(__file__).parents[3] / "docs/reliability.md"


@pytest.mark.parametrize(
    ("target", "body", "runs"),
    [
        ("/v1/completions", {"prompt": ["a", "b"], "n": 3}, 6),
        ("/v1/completions?x=1", {"prompt": [1, 2, 3], "n": "3"}, 3),
        ("/v1/%63ompletions", {"prompt": [[1], [2]], "best_of": 2.0}, 4),
        ("/v1/completions#a", {"prompt": "a", "n": 6}, 0),  # no route of an engine
        ("http://h/v1/completions", {"prompt": "a", "n": 6}, 0),
        ("/v1/completions", {"prompt": "a", "n": "6e0"}, 1),
        ("/v1/chat/completions", {"messages": [], "prompt": ["a", "b"], "n": 2}, 2),
        ("/invocations", {"prompt": ["a", "b"], "n": 3}, 6),
        ("/completion", {"prompt": ["a", 1]}, 1),
        ("/generate", {"text": ["a", "b"], "sampling_params": {"n": 3}}, 6),
        ("/generate", {"inputs": "a", "parameters": {"best_of": 2}}, 2),
        ("/v1/embeddings", {"input": ["a", "b"]}, 0),
        ("/v1/completions", [], 0),
    ],
)
def test_an_engine_runs_prompts_times_answers(target: str, body: object, runs: int) -> None:
    for encoding in ("utf-8", "utf-8-sig", "utf-16"):
        sent = json.dumps(body).encode(encoding)
        assert sequences("POST", target.encode(), sent) == runs
    assert sequences("GET", target.encode(), json.dumps(body).encode()) == 0


def _asked(body: object, path: str = "/api/chat") -> Seen:
    sent = json.dumps(body).encode()
    return Seen("POST", path.encode(), [("x-stranger", "1")], sent, len(sent), 1)


def test_a_request_that_unloads_or_changes_the_model_of_all_is_harm() -> None:
    assert harm(_asked(CHAT)) is None
    assert harm(_asked(CHAT | {"keep_alive": -1, "model": "tiny:latest"})) is None
    for more in UNLOADING:
        assert harm(_asked(CHAT | dict(more))), more
    assert harm(_asked(CHAT | {"MODEL": "other"}))
    assert harm(_asked({"model": "tiny"}, "/api/push"))


def test_controls_of_a_terminal_are_seen_and_letters_are_not() -> None:
    assert controls("Größe\t中文 — ok\n") == []
    assert controls(WORDS) == ["U+0007", "U+001B", "U+009B", "U+2028", "U+202E"]


def test_a_raw_block_of_zstd_has_its_size_twice() -> None:
    assert zstd(b"abc") == b"\x28\xb5\x2f\xfd\x20\x03" + b"\x19\x00\x00" + b"abc"


def test_each_attack_has_a_name_of_its_own_and_a_kind() -> None:
    names = [attack.name for attack in ATTACKS]
    assert len(set(names)) == len(names)
    assert {attack.kind for attack in ATTACKS} == set(KINDS)


FIGURES = {"held_worst_ms": 1627.4, "cpu_s": 3.44}
BEFORE = Row("B", "large-bodies", "in|put", "less", "much", False, 1.0, FIGURES)
NOW = Row("B", "large-bodies", "in|put", "less", "less", True, 1.0, {"held_worst_ms": 3.6})


def test_the_page_shows_an_earlier_run_beside_this_one() -> None:
    page = markdown([NOW], [BEFORE])
    assert "A: 0 -> 0 of 0, B: 0 -> 1 of 1" in page
    assert "| attack | input | wanted | before | now |" in page
    assert "| `large-bodies` | in\\|put | less | **no**: much | less |" in page
    assert "| `large-bodies` | 1627 -> 4 |  |" in page
    assert "| `large-bodies` | in\\|put | less | less |" in markdown([NOW])


def test_tables_are_written_between_their_marks(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"head\n{BEGIN}\nold\n{END}\ntail\n")
    write(page, "new")
    write(page, "newer")
    assert page.read_text() == f"head\n{BEGIN}\n\nnewer\n\n{END}\ntail\n"
    page.write_text("no marks")
    with pytest.raises(ValueError, match="lacks"):
        write(page, "new")


def test_reliability_has_a_row_for_each_attack() -> None:
    text = RELIABILITY.read_text()
    assert [attack.name for attack in ATTACKS if f"\n| `{attack.name}` |" not in text] == []
