"""Engines as data, and their metrics."""

from collections import Counter

import pytest
from sluice_core.bounded import Numbers
from sluice_core.engines import ENGINES
from sluice_core.engines.engine import ForeignEngine
from sluice_gate.engine.load import ServerLoad, load_of
from unit.cost import least_cpu_s

VLLM = """# HELP vllm:num_requests_running Running.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m"} 3.0
vllm:num_requests_waiting{engine="0",model_name="m"} 1.0
vllm:num_requests_waiting{engine="1",model_name="m"} 2.0
vllm:num_requests_waiting_by_reason{engine="0",reason="capacity"} 9.0
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.25
vllm:generation_tokens_total{engine="0",model_name="m"} 1.5e+03
vllm:num_preemptions_total{engine="0",model_name="m"} NaN-broken
"""


def read(facts: ForeignEngine, text: str) -> ServerLoad:
    return load_of(facts, text, Numbers("metrics", Counter()))


def test_samples_of_one_name_are_summed() -> None:
    load = read(ENGINES["vllm"], VLLM)
    assert load == ServerLoad(waiting=3.0, kv_usage=0.25, tokens=1500.0)


def test_the_name_before_a_renaming_is_read() -> None:
    assert read(ENGINES["vllm"], "vllm:gpu_cache_usage_perc 0.5\n").kv_usage == 0.5


def test_what_an_engine_does_not_show_is_unknown() -> None:
    for facts in ENGINES.values():
        assert read(facts, "") == ServerLoad()
    assert read(ENGINES["llamacpp"], "llamacpp:requests_deferred 2\n").waiting == 2.0


@pytest.mark.parametrize("word", ["NaN", "+Inf", "-Inf", "-1", "1e300", "1e16", "x", "1" * 5000])
def test_a_number_that_is_none_is_left_out_and_counted(word: str) -> None:
    left_out = Counter[str]()
    text = f"vllm:num_requests_waiting {word}\nvllm:kv_cache_usage_perc 0.5\nother {word}\n"
    load = load_of(ENGINES["vllm"], text, Numbers("metrics", left_out))
    assert load == ServerLoad(kv_usage=0.5)
    assert left_out == {"metrics": 1}


def test_a_sum_beyond_the_bounds_is_left_out() -> None:
    assert read(ENGINES["tgi"], "tgi_queue_size 9e15\n" * 3).waiting is None


def test_a_page_of_brackets_that_nothing_closes_is_read_in_linear_time() -> None:
    def cpu_s(num: int) -> float:
        return least_cpu_s(lambda: read(ENGINES["vllm"], "a{\n" * num), num=3)

    assert cpu_s(160_000) < 60 * max(cpu_s(10_000), 1e-4)
