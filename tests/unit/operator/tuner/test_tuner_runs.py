"""What a run of ticks adds up to is worked out once, and is what the ticks say one by one."""

from hypothesis import given
from hypothesis import strategies as st
from sluice_operator.tuner import constants as k
from sluice_operator.tuner.runs import Spans
from sluice_worker.contract import Tick
from unit.operator.tuner.made import tick

LOOKED_AT: list[int] = []


def arrivals(parts: list[tuple[Tick, ...]], reading: str, factor: int = 1) -> list[int]:
    LOOKED_AT.extend(t.seq for part in parts for t in part)
    return [factor * sum(getattr(t, reading) for t in part) for part in parts]


@given(st.integers(0, 200), st.integers(0, 40), st.integers(1, 3))
def test_runs_say_what_the_ticks_say_wherever_they_begin(first: int, num: int, pods: int) -> None:
    parts = [
        tuple(tick(seq, arrivals=seq * (pod + 1)) for pod in range(pods))
        for seq in range(first, first + 3 * num)
    ]
    for factor in (1, 2):
        told = Spans(parts).each(arrivals, "arrivals", factor)
        assert told == arrivals(parts, "arrivals", factor)


def test_only_ticks_at_the_ends_are_looked_at_again() -> None:
    ticks = [(tick(seq, boot_id="looked at once"),) for seq in range(20 * k.RUN_TICKS)]
    Spans(ticks).each(arrivals, "arrivals")
    LOOKED_AT.clear()
    Spans(ticks[5:]).each(arrivals, "arrivals")
    assert list(range(5, k.RUN_TICKS)) == LOOKED_AT


def test_a_tick_that_differs_is_not_taken_for_the_one_before() -> None:
    for num in (1, 2):
        ticks = [(tick(seq, boot_id="alike", arrivals=num),) for seq in range(k.RUN_TICKS)]
        assert Spans(ticks).each(arrivals, "arrivals") == [num] * k.RUN_TICKS
