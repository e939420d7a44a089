"""The load's command line and its arithmetic."""

import argparse
import asyncio
import json
import random
import time
from pathlib import Path

import pytest
from sluice.__main__ import main
from sluice.load import LoadLedger, burst, open_loop, phase, quantile_ms, refusal
from sluice.measure.client import Outcome
from sluice.measure.endpoint import base_url
from sluice.measure.targets import read_targets


def test_phase_names_its_kind_amount_and_seconds() -> None:
    assert phase("high:open:1.3:90") == ("high", "open", 1.3, 90.0)


@pytest.mark.parametrize(
    "text",
    [
        "high",
        "high:up:1:2",
        "high:open:x:2",
        "high:open:-1:2",
        "::::",
        "a:closed:0.5:1",
        "a:closed:1.9:1",
        "a:open:1:nan",
    ],
)
def test_phase_that_cannot_be_read_is_refused_with_its_text(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="NAME:closed"):
        phase(text)


HALF = "half:open:0.5:1"
FULL = "capacity:closed:8:1"


@pytest.mark.parametrize(
    ("texts", "capacity", "why"),
    [
        (["full:closed:8:1", HALF], None, "name one so, or give --capacity"),
        (["full:closed:8:1", FULL, HALF], None, ""),
        (["full:closed:8:1", HALF], 3.0, ""),
        (["full:closed:8:1"], None, ""),
        ([HALF], None, ""),
        ([HALF, FULL], None, "phase half takes a share of the capacity, and no closed"),
        (
            ["wave:burst:1:1", FULL, HALF],
            None,
            "phase wave takes a share of the capacity",
        ),
        ([FULL, HALF], 3.0, "a closed phase named `capacity` measures what --capacity gives"),
        (["full:closed:8:1"], 3.0, "--capacity says nothing without an open phase or a burst"),
    ],
)
def test_shares_of_another_capacity_than_they_seem_to_be_of_are_refused(
    texts: list[str], capacity: float | None, why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    told = refusal([phase(text) for text in texts], capacity)
    assert why in told
    assert bool(told) == bool(why)
    if why:
        where = ["--url", "http://127.0.0.1:1", "--model", "m"]
        given = [] if capacity is None else ["--capacity", str(capacity)]
        assert main(["load", *where, "--phases", *texts, *given]) == 2
        assert capsys.readouterr() == ("", f"sluice load: {told}\n"), "nothing is sent"


@pytest.mark.parametrize("text", ["localhost:8000", "ftp://a", "http://", "http://[", "http://a:b"])
@pytest.mark.parametrize("command", ["load", "bench"])
def test_an_address_that_is_no_url_is_refused(
    command: str, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        main([command, "--url", text])
    assert stop.value.code == 2
    assert f"--url: {text!r} is not a URL like" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["http://h?x=1", "http://h/v1?", "http://h/#a", "http://h#"])
def test_a_url_behind_which_no_route_can_be_put_is_refused(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="has a query or a fragment"):
        base_url(text)


@pytest.mark.parametrize(
    ("text", "url"),
    [
        ("http://h:8000/v1", "http://h:8000"),
        ("https://h/api/v1/", "https://h/api"),
        ("http://v1", "http://v1"),
        ("http://h/v1x/", "http://h/v1x"),
        ("http://[::1]:80/", "http://[::1]:80"),
    ],
)
def test_the_base_that_openai_s_clients_take_is_the_same_server(text: str, url: str) -> None:
    assert base_url(text) == url


@pytest.mark.parametrize("command", ["load", "bench"])
def test_a_file_without_a_bearer_is_told_in_one_sentence(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty").touch()
    more = ["--model", "m", "--phases", "a:closed:1:1"] if command == "load" else []
    for name, why in (("empty", "is empty"), ("none", "cannot be read: No such file")):
        key = ["--api-key-file", str(tmp_path / name)]
        assert main([command, "--url", "http://127.0.0.1:1", *key, *more]) == 2
        assert f"sluice {command}: {tmp_path / name} {why}" in capsys.readouterr().err


def test_quantile_is_a_value_that_occurred() -> None:
    assert quantile_ms([0.001 * i for i in range(1, 101)], 0.99) == 99.0
    assert quantile_ms([], 0.99) is None


def test_summary_counts_each_outcome_once_and_rates_only_good_ones() -> None:
    ledger = LoadLedger("high", sent=3)
    ledger.outcomes = [
        Outcome("ok", "p", 0.1, 1.0, 10, (0.1,) * 9, 0),
        Outcome("ok", "q", 0.2, 1.0, 10, (0.1,) * 9, 1),
        Outcome("failed", "", 0.0, 1.0, 0, (), 2, "HTTP 503"),
    ]
    summary = ledger.summary(2.0)
    assert summary["by_pod"] == {"p": 1, "q": 1}
    assert summary["p50_ttft_ms"] == 200.0
    assert summary["p99_ttft_ms"] is None, "a request without an answer has waited for ever"
    assert summary["results"] == {"ok": 2, "failed": 1}
    assert (summary["requests_per_s"], summary["tokens_per_s"]) == (1.0, 10.0)
    assert (summary["retries"], summary["details"]) == (3, {"HTTP 503": 1})


def test_summary_counts_good_requests_only_where_targets_are_given() -> None:
    ledger = LoadLedger("high", read_targets("ttft=150ms"))
    ledger.outcomes = [Outcome("ok", "p", t, 1.0, 2, (0.1,), 0) for t in (0.1, 0.2)]
    assert ledger.summary(2.0)["good"] == 1
    assert "good" not in LoadLedger("high").summary(2.0)


async def test_open_loop_tells_when_each_request_was_due() -> None:
    dues: list[float] = []

    def send(to: LoadLedger, due_s: float) -> asyncio.Task[None]:
        dues.append(due_s)
        time.sleep(0.02)  # a client that is kept from sending the next one in time
        return asyncio.create_task(asyncio.sleep(0))

    start = time.monotonic()
    await open_loop(send, LoadLedger("open"), 500.0, 0.1, random.Random(1))
    assert len(dues) > 20
    assert dues == sorted(dues)
    assert dues[-1] - dues[0] < 0.1 < 0.02 * len(dues) < time.monotonic() - start


async def test_burst_sends_all_at_once_and_ends_with_the_last_answer() -> None:
    ledger, sent = LoadLedger("wave"), []
    gate = asyncio.Event()

    def send(to: LoadLedger) -> asyncio.Task[None]:

        async def one() -> None:
            sent.append(to.name)
            if len(sent) == 5:
                gate.set()
            await gate.wait()

        return asyncio.create_task(one())

    await asyncio.wait_for(burst(send, ledger, 5, 0.001), 10)
    assert sent == ["wave"] * 5


def test_lengths_are_a_range_whichever_comes_first_and_nothing_sent_is_no_success(
    capsys: pytest.CaptureFixture[str],
) -> None:
    where = ["--url", "http://127.0.0.1:1", "--model", "m", "--max-tokens", "96", "32"]
    assert main(["load", *where, "--phases", "one:burst:1:0.01"]) == 1
    told, why = map(json.loads, capsys.readouterr().out.splitlines()[-2:])
    assert told["results"] == {"failed": 1}
    assert "Connect call failed" in next(iter(told["details"]))
    assert why["error"].startswith("phase one: no request was answered: ClientConnectorError")
    assert main(["load", *where, "--phases", "none:open:0.001:0.01"]) == 1
    assert "no request was sent" in capsys.readouterr().out.splitlines()[-1]


def test_a_server_that_is_dead_is_told_also_where_the_capacity_is_given(
    capsys: pytest.CaptureFixture[str],
) -> None:
    where = ["--url", "http://127.0.0.1:1", "--model", "m", "--capacity", "3"]
    assert main(["load", *where, "--phases", "one:burst:1:0.01"]) == 1
    assert "phase one: no request was answered" in capsys.readouterr().out.splitlines()[-1]
