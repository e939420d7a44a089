"""Targets of a command line, and the requests that hold them."""

import argparse

import pytest
from sluice.measure.client import Outcome
from sluice.measure.targets import is_good, is_smooth, read_targets

TARGETS = read_targets("ttft=1s,itl=100ms")


def answered(ttft_s: float = 0.5, *gaps_s: float, result: str = "ok") -> Outcome:
    return Outcome(result, "p", ttft_s, ttft_s + sum(gaps_s), 1 + len(gaps_s), gaps_s, 0)


def test_targets_are_milliseconds_and_each_may_be_left_out() -> None:
    found = read_targets("itl=0.1s,e2e=2m,percentile=99.9")
    assert (found.ttft_ms, found.itl_ms, found.e2e_ms) == (None, 100.0, 120_000.0)
    assert found.allowed_share == pytest.approx(0.001)


@pytest.mark.parametrize("text", ["", "ttft", "ttft=1", "ttft=0s", "tpot=1s", "percentile=99"])
def test_text_that_names_no_target_is_refused(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="like ttft=1s"):
        read_targets(text)


@pytest.mark.parametrize("name", ["itl", "percentile"])
def test_a_name_that_is_given_twice_is_refused(name: str) -> None:
    values = {"itl": ("0.05s", "5s"), "percentile": ("99", "95")}[name]
    text = ",".join(f"{name}={value}" for value in values)
    with pytest.raises(argparse.ArgumentTypeError, match=f"^{name} is given twice$"):
        read_targets(f"ttft=1s,{text}")


def test_one_stall_leaves_a_request_good_but_not_smooth() -> None:
    stalled = answered(0.5, *[0.01] * 50, 0.9)
    assert is_good(stalled, TARGETS)
    assert not is_smooth(stalled, TARGETS)
    assert is_smooth(answered(0.5, *[0.01] * 120, 0.9), TARGETS), "1 % of its gaps may be over"


def test_tokens_of_one_step_share_its_gap_and_add_none() -> None:
    drafted = Outcome("ok", "p", 0.5, 0.5 + 0.3 * 3, 13, (0.3,) * 3, 0)
    assert is_good(drafted, TARGETS), "75 ms for each token"
    assert not is_smooth(drafted, TARGETS)


@pytest.mark.parametrize(
    "outcome", [answered(1.1, 0.01), answered(0.5, 0.2, 0.1), answered(0.5, result="cut")]
)
def test_a_late_slow_or_cut_request_is_not_good(outcome: Outcome) -> None:
    assert not is_good(outcome, TARGETS)
