"""Engines as data, and their metrics."""

from sluice_gate.engines import ENGINES, EngineLoad, load_of

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


def test_samples_of_one_name_are_summed() -> None:
    load = load_of(ENGINES["vllm"], VLLM)
    assert load == EngineLoad(waiting=3.0, kv_usage=0.25, tokens=1500.0)


def test_the_name_before_a_renaming_is_read() -> None:
    assert load_of(ENGINES["vllm"], "vllm:gpu_cache_usage_perc 0.5\n").kv_usage == 0.5


def test_what_an_engine_does_not_show_is_unknown() -> None:
    for facts in ENGINES.values():
        assert load_of(facts, "") == EngineLoad()
    assert load_of(ENGINES["llamacpp"], "llamacpp:requests_deferred 2\n").waiting == 2.0
