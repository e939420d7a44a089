"""What the window's ticks add up to in the status."""

import pytest
from sluice_core.contract import Causes, FirstTokens, Lengths, StepModel
from sluice_operator.status.usage import step_times, work
from unit.operator.observations import create_evidence, create_tick


def test_only_the_window_counts_and_misses_keep_their_cause() -> None:
    first = FirstTokens(5, 4, Causes(kv=1, prefill=2))
    busy = {"steps": 10, "generated_tokens": 30, "prefill_tokens": 7, "busy_s": 0.5, "ttft": first}
    ticks = [create_tick(seq, finished=1, **busy) for seq in range(1, 11)]
    found = work([create_evidence(ticks=ticks), create_evidence(ticks=ticks[:2])], 8.0)
    assert (found["tokens"], found["promptTokens"], found["finished"]) == (180, 42, 6)
    assert (found["podSeconds"], found["busyPercent"]) == (10, "25")
    assert found["misses"] == {"cap": 0, "kv": 6, "prefill": 12, "outside": 0, "other": 6}


@pytest.mark.parametrize(("same_targets_s", "num"), [(0.0, 0), (1.9, 0), (8.0, 3), (1e9, 4)])
def test_misses_of_other_targets_do_not_count(same_targets_s: float, num: int) -> None:
    """Of four ticks in the window; the newest may be a tick old."""
    ticks = [create_tick(seq, steps=1, ttft=FirstTokens(5, 4)) for seq in range(1, 11)]
    found = work([create_evidence(ticks=ticks)], 8.0, same_targets_s)
    assert found["misses"]["other"] == 4 * num


def test_idle_pods_say_nothing_that_could_change() -> None:
    ticks = [create_tick(seq) for seq in range(1, 5)]
    assert work([create_evidence(ticks=ticks, lengths=Lengths(80, 9, 5))], 600.0) == {}
    assert step_times([create_evidence()]) == {}


def test_a_window_that_fills_is_told_in_whole_tens_of_seconds() -> None:
    ticks = [create_tick(seq, steps=3, busy_s=0.1) for seq in range(1, 200)]
    told = [work([create_evidence(ticks=ticks[:n])], 600.0) for n in range(100, 150)]
    assert sum(a != b for a, b in zip(told, told[1:], strict=False)) <= 10


def test_lengths_of_pods_are_pooled_with_the_spread_between_them() -> None:
    tick = create_tick(1, arrivals=1)
    pods = [create_evidence(ticks=[tick], lengths=Lengths(mean, 0, 10)) for mean in (50, 150)]
    assert work(pods, 600.0)["lengths"] == {"mean": "100", "sigma": "50"}


def test_step_times_are_weighted_by_their_records() -> None:
    models = [StepModel(2.0, 1.0, 0.0, 0.1, 300, 1.0), StepModel(6.0, 1.0, 0.0, 0.1, 100, 1.0)]
    found = step_times([create_evidence(step_model=model) for model in models])
    assert float(found["fixedMs"]) == pytest.approx(3.0)
    assert found["kvTokenMs"] == "0"
