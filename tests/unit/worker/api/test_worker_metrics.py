"""Histograms and text: what a scraper reads is what happened."""

import math

from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families
from sluice_worker.contract import MemoryReport, Slo, StepModel
from sluice_worker.metrics import (
    ITL_EDGES,
    Exposition,
    Histogram,
    Statistics,
    View,
    one_two_five,
    with_target,
)
from sluice_worker.wire import FirstToken, Snapshot

VIEW = View(
    is_ready=True,
    snapshot=Snapshot(3, 2, 1, 10, 4, 40, 5, 6, 7, 8),
    open_requests=6,
    epoch=12,
    max_num_seqs=4,
    ceiling=16,
    cache_config={"block_size": "16", "num_gpu_blocks": "40"},
    memory=MemoryReport(planned={"weights": 10}, measured={"weights": 11}, kv_tokens=640),
    step_model=StepModel(a=1.0, b=2.0, c=3.0, d=4.0, n=5, resid_q=1.2),
)


@given(st.lists(st.floats(0, 200), max_size=50))
def test_every_value_is_in_the_buckets_at_and_over_it(values: list[float]) -> None:
    histogram = Histogram(ITL_EDGES)
    for value in values:
        histogram.observe(value)
    for edge, count in histogram.buckets():
        limit = math.inf if edge == "+Inf" else float(edge)
        assert count == sum(value <= limit for value in values)
    assert math.isclose(histogram.total, sum(values), abs_tol=1e-9)


def test_a_target_is_an_edge_so_that_its_share_is_exact() -> None:
    assert 0.042 in with_target(ITL_EDGES, 42)
    assert with_target(ITL_EDGES, None) == ITL_EDGES


def test_token_edges_reach_to_the_window() -> None:
    assert one_two_five(2048) == (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000)


def test_the_text_parses_and_shows_the_view() -> None:
    stats = Statistics(Slo(ttft_ms=300), 0.0)
    stats.set_window(512)
    stats.first_token(0.25, FirstToken(0.1, 0.05, 0.1, 3), 7)
    stats.end("stop")
    stats.reject("max_num_queued_reqs")
    text = Exposition("m", stats, lambda: VIEW).text().decode()
    seen = {
        (sample.name, *sorted(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
    common = (("engine", "0"), ("model_name", "m"))
    assert seen["vllm:num_requests_waiting", *common] == 3
    assert seen["vllm:kv_cache_usage_perc", *common] == 0.25
    assert seen["vllm:prompt_tokens_total", *common] == 7
    assert seen["vllm:prompt_tokens_cached_total", *common] == 3
    assert seen["vllm:request_success_total", *common[:1], ("finished_reason", "stop"), common[1]]
    assert seen["vllm:time_to_first_token_seconds_bucket", common[0], ("le", "0.3"), common[1]] == 1
    assert seen["sluice_epoch", *common] == 12
    rejected = ("vllm:admission_rejections_total", common[1], ("reason", "max_num_queued_reqs"))
    assert seen[rejected] == 1
