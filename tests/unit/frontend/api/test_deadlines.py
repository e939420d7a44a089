"""A deadline is refused when the forecast says so, and only then."""

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sluice_core.contract import StepModel
from sluice_core.errors import RequestError
from sluice_core.work import Deadlines
from sluice_frontend.api.generate import parse_completion, parse_generate
from sluice_frontend.serving.bounds import unreachable
from sluice_frontend.serving.forecast import Forecast

BUSY = Forecast(
    num_open=10,
    num_running=4,
    num_waiting=6,
    cap=4,
    service_s=2.0,
    step_model=StepModel(a=5.0, b=1.0, c=0.01, d=0.2, n=50, resid_q=1.2),
    kv_per_seq=100.0,
)


def refusal(
    asked: Deadlines,
    shed_ms: float | None = None,
    load: Forecast = BUSY,
    num_new: int = 1,
    *,
    age_ms: float = 0.0,
    prefill_ms: float = 0.0,
) -> tuple[str, float] | None:
    """Why newcomers are refused, by default by a pod that is busy and does not shed."""
    return unreachable(asked, shed_ms, load, num_new, age_ms=age_ms, prefill_ms=prefill_ms)


def test_the_wait_is_the_departures_that_it_takes() -> None:
    assert BUSY.wait_s(1) == 7 * 2.0 / 4
    assert BUSY.wait_s(3) == 9 * 2.0 / 4
    assert replace(BUSY, num_open=2, num_running=2, num_waiting=0).wait_s(2) == 0
    assert replace(BUSY, num_open=2, num_running=2, num_waiting=0).wait_s(3) == 0.5


def test_who_waits_for_memory_below_the_cap_counts_the_places_that_there_are() -> None:
    assert replace(BUSY, cap=16).wait_s(1) == 7 * 2.0 / 4


def test_those_above_a_lowered_cap_leave_side_by_side() -> None:
    assert replace(BUSY, num_open=64, num_running=64, num_waiting=0).wait_s(1) == 61 * 2.0 / 64


def test_nothing_known_refuses_nobody() -> None:
    unknown = replace(BUSY, service_s=None, step_model=None)
    assert unknown.wait_s(5) == 0
    assert refusal(Deadlines(1.0, 1.0), load=unknown, num_new=5) is None


@given(st.integers(0, 50), st.integers(1, 20), st.integers(0, 20), st.floats(0.01, 100))
def test_a_wait_grows_with_the_queue_and_is_none_below_the_cap(
    num_open: int, cap: int, num_new: int, service_s: float
) -> None:
    load = replace(
        BUSY, num_open=num_open, num_waiting=0, num_running=0, cap=cap, service_s=service_s
    )
    assert (load.wait_s(num_new) > 0) == (num_open + num_new > cap)
    assert load.wait_s(num_new + 1) >= load.wait_s(num_new)


def test_a_first_token_deadline_is_refused_with_the_predicted_wait() -> None:
    assert refusal(Deadlines(ttft_ms=3600), age_ms=10, prefill_ms=40) is None
    problem = refusal(Deadlines(ttft_ms=3500), age_ms=10, prefill_ms=40)
    assert problem is not None
    assert problem[1] == 3.5
    assert "3550 ms" in problem[0]
    assert "3500 ms" in problem[0]


def test_a_request_without_a_deadline_has_that_of_the_pod_where_it_sheds() -> None:
    assert refusal(Deadlines(), prefill_ms=1e9) is None
    assert refusal(Deadlines(), 3000.0, prefill_ms=50) is not None
    assert refusal(Deadlines(ttft_ms=9000), 3000.0, prefill_ms=50) is None


def test_a_token_deadline_counts_everyone_that_decodes() -> None:
    # 4 decodes: 5 + 4 * (1 + 0.01 * 100) = 13 ms; two 9 ms.
    assert refusal(Deadlines(tpot_ms=13.1)) is None
    assert refusal(Deadlines(tpot_ms=12.9)) is not None
    one_runs = replace(BUSY, num_open=1, num_running=1, num_waiting=0)
    assert refusal(Deadlines(tpot_ms=9.1), load=one_runs) is None
    assert refusal(Deadlines(tpot_ms=8.9), load=one_runs) is not None


def test_where_nothing_is_open_only_time_that_has_gone_refuses() -> None:
    """A forecast that is wrong is corrected by who comes in, so it may not keep everybody out."""
    idle = replace(BUSY, num_open=0, num_running=0, num_waiting=0)
    assert refusal(Deadlines(50.0, 1.0), load=idle, num_new=9, prefill_ms=1e4) is None
    assert refusal(Deadlines(), 50.0, load=idle, prefill_ms=1e4, age_ms=49) is None
    assert refusal(Deadlines(), 50.0, load=idle, age_ms=51) is not None
    one_runs = replace(idle, num_open=1, num_running=1)
    assert refusal(Deadlines(), 50.0, load=one_runs, prefill_ms=1e4) is not None


def test_fields_and_headers_mean_the_same() -> None:
    body = json.dumps({"prompt": "x", "slo_ttft_ms": 250, "slo_tpot_ms": 20.5}).encode()
    asked = Deadlines(250, 20.5)
    assert parse_completion(body).deadlines == asked
    assert parse_generate(body).deadlines == asked
    headers = {"x-slo-ttft-ms": "250", "x-slo-tpot-ms": "20.5"}
    assert Deadlines().with_headers(headers) == asked == asked.with_headers(headers)
    assert asked.with_headers({}) == asked


@pytest.mark.parametrize("text", ["", "soon", "-1", "0", "nan", "inf", "1e12"])
def test_a_header_that_is_no_time_is_refused_by_its_name(text: str) -> None:
    with pytest.raises(RequestError) as refused:
        Deadlines().with_headers({"x-slo-tpot-ms": text})
    assert refused.value.param == "x-slo-tpot-ms"


def test_a_header_that_contradicts_the_body_is_refused() -> None:
    with pytest.raises(RequestError):
        Deadlines(ttft_ms=100).with_headers({"x-slo-ttft-ms": "200"})


def test_a_field_that_is_no_time_is_refused_by_its_name() -> None:
    for value in (0, -5, "fast"):
        with pytest.raises(RequestError) as refused:
            parse_completion(json.dumps({"prompt": "x", "slo_ttft_ms": value}).encode())
        assert refused.value.param == "slo_ttft_ms"
