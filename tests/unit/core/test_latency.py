"""The law of step times: what it lets into a target."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sluice_core.latency import NO_LIMIT, StepLaw, Tail, chunk_limit, predicted_cap

LAW = StepLaw(a=2.0, b=0.3, c=0.001, d=0.1)


@given(
    itl=st.floats(1, 500),
    resid=st.floats(1, 5),
    ceiling=st.integers(1, 512),
    kv=st.floats(0, 4000),
)
def test_predicted_cap_is_the_largest_within_the_target(
    itl: float, resid: float, ceiling: int, kv: float
) -> None:
    cap = predicted_cap(LAW, resid, itl_ms=itl, kv_per_seq=kv, ceiling=ceiling)

    def quantile_ms(batch: int) -> float:
        """All decode, or all but one beside that one's chunk."""
        others = batch - 1
        beside_chunk = LAW.step_ms(others, kv * others, 32) if others else 0.0
        return resid * max(LAW.step_ms(batch, kv * batch, 0), beside_chunk)

    assert 1 <= cap <= ceiling
    assert cap == 1 or quantile_ms(cap) <= 0.85 * itl * (1 + 1e-9)
    assert cap == ceiling or quantile_ms(cap + 1) > 0.85 * itl * (1 - 1e-9)


@pytest.mark.parametrize(("a", "cap"), [(10.0, 64), (60.0, 1)])
def test_where_a_sequence_costs_nothing_the_cap_is_all_or_one(a: float, cap: int) -> None:
    law = StepLaw(a=a, b=0.0, c=0.0, d=0.1)
    assert predicted_cap(law, 1.0, itl_ms=50.0, kv_per_seq=99.0, ceiling=64) == cap


def test_steps_that_are_all_faster_than_the_model_promise_no_more_than_it() -> None:
    caps = [
        predicted_cap(LAW, resid, itl_ms=20.0, kv_per_seq=100.0, ceiling=512)
        for resid in (0.5, 1.0)
    ]
    assert caps[0] == caps[1] < 512
    limits = [chunk_limit(LAW, Tail([ms]), 30.0, 8, 1600) for ms in (-5.0, 0.0)]
    assert limits[0] == limits[1]


def test_chunk_limit_keeps_the_tail_of_the_step_within_the_target() -> None:
    limit = chunk_limit(LAW, Tail([10.0]), 30.0, 8, 1600)
    assert 10.0 + LAW.step_ms(8, 1600 + limit, limit) <= 30.0
    assert 10.0 + LAW.step_ms(8, 1602 + limit, limit + 2) > 30.0
    assert chunk_limit(LAW, Tail([6.9]), 13.0, 8, 1600) <= 0
    assert chunk_limit(LAW, Tail([10.0]), 13.0, 8, 1600) == chunk_limit(LAW, Tail(), 13.0, 8, 1600)
    slow = chunk_limit(LAW, Tail([10.0]), 30.0, 8, 1600, slowdown=1.5)
    assert 10.0 + 1.5 * LAW.step_ms(8, 1600 + slow, slow) <= 30.0
    assert 10.0 + 1.5 * LAW.step_ms(8, 1602 + slow, slow + 2) > 30.0
    free = StepLaw(a=2.0, b=0.3, c=0.0, d=0.0)
    assert chunk_limit(free, Tail(), 1.0, 8, 1600) == NO_LIMIT, (
        "a shorter chunk would change nothing"
    )
