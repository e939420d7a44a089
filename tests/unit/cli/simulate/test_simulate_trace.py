"""Traces: our own lines and the public formats, and a sentence for what is none of them."""

import json
from pathlib import Path

import pytest
from sluice.simulate.trace import Request, TraceError, read_trace

AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:17:03.9799600,4808,10
2023-11-16 18:17:04.0319600,3180,8
"""
BURSTGPT = """Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type
5,ChatGPT,472,18,490,Conversation log
45,ChatGPT,1087,0,1087,Conversation log
118,GPT-4,417,276,693,Conversation log
"""
MOONCAKE = """{"timestamp": 0, "input_length": 700, "output_length": 5, "hash_ids": [0, 1]}
{"timestamp": 3052, "input_length": 800, "output_length": 7, "hash_ids": [0, 2]}
"""


def written(tmp_path: Path, name: str, text: str) -> Path:
    path = tmp_path / name
    path.write_text(text)
    return path


def test_azure_csv_starts_at_zero_and_keeps_its_fractions(tmp_path: Path) -> None:
    first, second = read_trace(written(tmp_path, "azure.csv", AZURE))
    assert (first.t_s, first.prompt_tokens, first.max_tokens) == (0, 4808, 10)
    assert second.t_s == pytest.approx(0.052, abs=1e-6)


@pytest.mark.parametrize("end", ["", ".25", ".25+00:00", "+00:00", ".2500000Z"])
def test_azure_dates_of_both_years_are_read(tmp_path: Path, end: str) -> None:
    rows = f"2024-05-10 00:00:00{end},10,5\n2024-05-10 00:00:01.5,20,6\n"
    path = written(tmp_path, "week.csv", "TIMESTAMP,ContextTokens,GeneratedTokens\n" + rows)
    assert read_trace(path)[1].t_s == pytest.approx(1.25 if "25" in end else 1.5)


def test_burstgpt_csv_leaves_failures_out(tmp_path: Path) -> None:
    requests = read_trace(written(tmp_path, "burst.csv", BURSTGPT))
    assert requests == [Request(0, 472, 18), Request(113, 417, 276)]


def test_mooncake_shares_the_leading_hashes(tmp_path: Path) -> None:
    _, second = read_trace(written(tmp_path, "mooncake.jsonl", MOONCAKE))
    assert second == Request(3.052, 800, 7, (0, 2), 512)
    assert second.prefix_tokens == 800


def test_mooncakes_failures_are_left_out_and_its_middle_starts_at_zero(tmp_path: Path) -> None:
    later = MOONCAKE.replace('"timestamp": 0', '"timestamp": 2052').replace(": 5,", ": 0,")
    assert [r.t_s for r in read_trace(written(tmp_path, "failed.jsonl", later))] == [0.0]
    whole = read_trace(written(tmp_path, "later.jsonl", later.replace(": 0,", ": 5,")))
    assert [r.t_s for r in whole] == pytest.approx([0.0, 1.0])


def test_rows_out_of_order_are_put_in_order(tmp_path: Path) -> None:
    head, first, second = AZURE.splitlines()
    swapped = read_trace(written(tmp_path, "azure.csv", "\n".join((head, second, first))))
    assert swapped == read_trace(written(tmp_path, "azure2.csv", AZURE))


def test_unix_times_of_ours_start_at_zero(tmp_path: Path) -> None:
    lines = [{"t_s": 1.7e9 + at, "prompt_tokens": 9, "max_tokens": 9} for at in (3, 1)]
    text = "\n".join(json.dumps(line) for line in lines)
    assert [r.t_s for r in read_trace(written(tmp_path, "ours.jsonl", text))] == [0.0, 2.0]


def test_our_lines_share_the_whole_prompt_unless_told_less(tmp_path: Path) -> None:
    line = {"t_s": 1.5, "prompt_tokens": 100, "max_tokens": 10, "prefix_id": "a"}
    less = line | {"prefix_tokens": 30}
    none = line | {"prefix_id": None}
    text = "\n".join(json.dumps(part) for part in (line, less, none))
    found = read_trace(written(tmp_path, "ours.jsonl", text))
    assert [request.prefix_tokens for request in found] == [100, 30, 0]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"t_s": 0, "prompt_tokens": 1, "max_tokens": 1}\n{"t_s": 1}', "line 2: 'prompt_tokens'"),
        ('{"t_s": -1, "prompt_tokens": 1, "max_tokens": 1}', "line 1: t_s"),
        ('{"t_s": 0, "prompt_tokens": 1.5, "max_tokens": 1}', "prompt_tokens 1.5"),
        ("nonsense", "line 1: it is no JSON object"),
        ("[]", "line 1: it is no JSON object"),
        ("", "no request"),
    ],
)
def test_a_bad_trace_is_refused_with_its_line(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(TraceError, match="bad.jsonl") as refusal:
        read_trace(written(tmp_path, "bad.jsonl", text))
    assert said in str(refusal.value)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.csv", 'Timestamp,Request tokens,Response tokens\n1,"' + "x" * 200_000),
        ("a.jsonl", '{"t_s": ' + "9" * 400 + ', "prompt_tokens": 1, "max_tokens": 1}'),
        ("a.jsonl", "[" * 100_000),
    ],
)
def test_what_no_reader_can_take_is_refused_in_a_sentence(
    name: str, text: str, tmp_path: Path
) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(TraceError, match=name):
        read_trace(tmp_path / name)


def test_a_trace_of_more_than_a_year_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "long.jsonl"
    lines = [{"t_s": t_s, "prompt_tokens": 1, "max_tokens": 1} for t_s in (0, 1e300)]
    path.write_text("\n".join(map(json.dumps, lines)))
    with pytest.raises(TraceError, match="a year"):
        read_trace(path)
