"""Results of the conformance suite: what is compared, and how it is shown."""

from pathlib import Path

from engines.launchers import KINDS
from engines.parity import answered, requests
from engines.table import BEGIN, END, Line, Results, merged, section


def results(**lines: Line) -> Results:
    return Results(version="1", date="2026-01-01", cpu="a CPU", left_out="", lines=lines)


def test_names_and_times_are_blotted_out_and_nothing_else() -> None:
    one = answered(200, "text/plain", b'{"id":"a1","created": 17, "text":"x","timings":{"ms":1.5}}')
    other = answered(200, "text/plain", b'{"id":"b2","created": 18, "text":"x","timings":{"ms":2}}')
    assert one == other
    assert one != answered(200, "text/plain", b'{"id":"a1","created": 17, "text":"y"}')
    assert one != answered(500, "text/plain", b'{"id":"a1","created": 17, "text":"x"}')


def test_every_engine_is_asked_50_different_requests_at_least() -> None:
    for kind in KINDS.values():
        asked = requests(kind.family)
        assert len(set(asked)) == len(asked) >= 50


def test_a_new_result_takes_the_place_of_the_old_one_only(tmp_path: Path) -> None:
    path = tmp_path / "engines.json"
    bad = Line("failed", "assert 1 == 2", {"in_force_p99_ms": 12.5})
    merged(path, "vllm", results(a_claim=bad))
    both = merged(path, "sluice", results(a_claim=Line("passed", "", {"until_told_s": 0.2})))
    assert list(both) == ["sluice", "vllm"]
    page = section(f"before\n{BEGIN}old\n{END}after\n", both)
    assert page.startswith(f"before\n{BEGIN}\n| ")
    assert page.endswith(f"{END}after\n")
    assert "| a claim | yes; until told 0.2 s | **no**; in force p99 12.5 ms |" in page
    assert "- vLLM, a claim: `assert 1 == 2`" in page
    assert section(page, both) == page
