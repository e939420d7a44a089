"""The load's command line and its arithmetic."""

import argparse
import asyncio
import json

import pytest
from sluice.__main__ import main
from sluice.client import Outcome
from sluice.load import Ledger, burst, phase, quantile_ms
from sluice.targets import read_targets


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
        "a:open:1:nan",
    ],
)
def test_phase_that_cannot_be_read_is_refused_with_its_text(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="NAME:closed"):
        phase(text)


def test_quantile_is_a_value_that_occurred() -> None:
    assert quantile_ms([0.001 * i for i in range(1, 101)], 0.99) == 99.0
    assert quantile_ms([], 0.99) is None


def test_summary_counts_each_outcome_once_and_rates_only_good_ones() -> None:
    ledger = Ledger("high", sent=3)
    ledger.outcomes = [
        Outcome("ok", "p", 0.1, 1.0, 10, (0.1,) * 9, 0),
        Outcome("ok", "q", 0.2, 1.0, 10, (0.1,) * 9, 1),
        Outcome("failed", "", 0.0, 1.0, 0, (), 2, "HTTP 503"),
    ]
    summary = ledger.summary(2.0)
    assert summary["results"] == {"ok": 2, "failed": 1}
    assert (summary["requests_per_s"], summary["tokens_per_s"]) == (1.0, 10.0)
    assert (summary["retries"], summary["details"]) == (3, {"HTTP 503": 1})


def test_summary_counts_good_requests_only_where_targets_are_given() -> None:
    ledger = Ledger("high", read_targets("ttft=150ms"))
    ledger.outcomes = [Outcome("ok", "p", t, 1.0, 2, (0.1,), 0) for t in (0.1, 0.2)]
    assert ledger.summary(2.0)["good"] == 1
    assert "good" not in Ledger("high").summary(2.0)


async def test_burst_sends_all_at_once_and_ends_with_the_last_answer() -> None:
    ledger, sent = Ledger("wave"), []
    gate = asyncio.Event()

    def send(to: Ledger) -> asyncio.Task[None]:
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
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["results"] == {"failed": 1}
    assert main(["load", *where, "--phases", "none:open:0.001:0.01"]) == 1
    assert "no request was sent" in capsys.readouterr().out.splitlines()[-1]
