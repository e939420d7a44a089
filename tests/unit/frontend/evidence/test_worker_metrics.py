"""Histograms and text: what a scraper reads is what happened."""

import math
from dataclasses import replace

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families
from sluice_core.contract import MemoryReport, Slo, StepModel
from sluice_core.port import EngineLoad, EngineStep, FirstParts, SpeculationTotals
from sluice_frontend.evidence.metrics import (
    ITL_EDGES,
    Histogram,
    MetricsView,
    Statistics,
    create_registry,
    one_two_five,
    with_target,
)
from sluice_frontend.evidence.recorder import Recorder
from sluice_frontend.evidence.totals import Totals

VIEW = MetricsView(
    is_ready=True,
    is_hung=False,
    load=EngineLoad(3, 2, 1, 10, 4, 40, 5, 6, 7, 8),
    open_requests=6,
    epoch=12,
    cap=4,
    ceiling=16,
    cache_config={"block_size": "16", "num_gpu_blocks": "40"},
    memory=MemoryReport({"weights": 10}, {"weights": 11}, 640, {"weights": 12}),
    step_model=StepModel(a=1.0, b=2.0, c=3.0, d=4.0, n=5, resid_q=1.2),
    last_minute=[],
    totals=Totals(),
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


def scrape(stats: Statistics, view: MetricsView) -> dict[tuple[object, ...], float]:
    text = generate_latest(create_registry("m", stats, lambda: view)).decode()
    return {
        (sample.name, *sorted(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_the_text_parses_and_shows_the_view() -> None:
    stats = Statistics(Slo(ttft_ms=300), 0.0)
    stats.set_window(512)
    stats.first_token(0.25, FirstParts(0.1, 0.05, 0.1, 3), 7)
    stats.end("stop")
    stats.reject("max_num_queued_reqs")
    seen = scrape(stats, VIEW)
    common = (("engine", "0"), ("model_name", "m"))
    assert seen["vllm:num_requests_waiting", *common] == 3
    assert seen["vllm:kv_cache_usage_perc", *common] == 0.25
    assert seen["vllm:prompt_tokens_total", *common] == 7
    assert seen["vllm:prompt_tokens_cached_total", *common] == 3
    assert seen["vllm:request_success_total", *common[:1], ("finished_reason", "stop"), common[1]]
    assert seen["vllm:time_to_first_token_seconds_bucket", common[0], ("le", "0.3"), common[1]] == 1
    assert seen["sluice_epoch", *common] == 12
    weights = ("sluice_memory_bytes", ("class", "weights"), common[0])
    kinds = [("kind", kind) for kind in ("planned", "measured", "corrected")]
    assert [seen[*weights, kind, common[1]] for kind in kinds] == [10, 11, 12]
    rejected = ("vllm:admission_rejections_total", common[1], ("reason", "max_num_queued_reqs"))
    assert seen[rejected] == 1


COMMON = {"model_name", "engine"}
GAUGES = {
    "num_requests_running": COMMON,
    "num_requests_waiting": COMMON,
    "num_requests_waiting_by_reason": {*COMMON, "reason"},
    "kv_cache_usage_perc": COMMON,
    "engine_sleep_state": {*COMMON, "sleep_state"},
    "cache_config_info": {*COMMON, "block_size", "num_gpu_blocks"},
}
COUNTERS = {
    "prefix_cache_queries": COMMON,
    "prefix_cache_hits": COMMON,
    "external_prefix_cache_queries": COMMON,
    "external_prefix_cache_hits": COMMON,
    "num_preemptions": COMMON,
    "prompt_tokens": COMMON,
    "prompt_tokens_by_source": {*COMMON, "source"},
    "prompt_tokens_cached": COMMON,
    "prompt_tokens_cached_by_source": {*COMMON, "source"},
    "generation_tokens": COMMON,
    "request_success": {*COMMON, "finished_reason"},
    "admission_rejections": {"model_name", "reason"},
    "spec_decode_num_drafts": COMMON,
    "spec_decode_num_draft_tokens": COMMON,
    "spec_decode_num_accepted_tokens": COMMON,
    "spec_decode_num_accepted_tokens_per_pos": {*COMMON, "position"},
}
TTFT = ".001 .005 .01 .02 .04 .06 .08 .1 .25 .5 .75 1 2.5 5 7.5 10 20 40 80 160 640 2560"
ITL = ".01 .025 .05 .075 .1 .15 .2 .3 .4 .5 .75 1 2.5 5 7.5 10 20 40 80"
LATENCY = ".3 .5 .8 1 1.5 2 2.5 5 10 15 20 30 40 50 60 120 240 480 960 1920 7680"
TOKENS = "1 2 5 10 20 50 100 200 500 1000 2000"
HISTOGRAMS = {
    "time_to_first_token_seconds": TTFT,
    "inter_token_latency_seconds": ITL,
    "request_time_per_output_token_seconds": ITL,
    "e2e_request_latency_seconds": LATENCY,
    "request_queue_time_seconds": LATENCY,
    "request_inference_time_seconds": LATENCY,
    "request_prefill_time_seconds": LATENCY,
    "request_decode_time_seconds": LATENCY,
    "request_prompt_tokens": TOKENS,
    "request_generation_tokens": TOKENS,
    "request_max_num_generation_tokens": TOKENS,
    "request_params_max_tokens": TOKENS,
    "request_prefill_kv_computed_tokens": TOKENS,
    "request_params_n": "1 2 5 10 20",
    "iteration_tokens_total": "1 8 16 32 64 128 256 512 1024 2048 4096 8192 16384",
    "request_num_preemptions": "1 2 3 4 5 10 20",
}
EDGES_ON_TARGETS = {"ttft": 0.333, "itl": 0.042, "e2e": 9.0}


@pytest.mark.parametrize("has_targets", [False, True])
def test_the_families_are_vllms_by_name_type_labels_and_buckets(has_targets: bool) -> None:
    """The names that dashboards, autoscalers and gateways read; families behind a flag of vLLM's
    (lora, mfu, sampled kv blocks, corrupted) are for what is not built.
    """
    stats = Statistics(Slo(333, 42, 9000) if has_targets else Slo(), 0.0)
    stats.set_window(2048)
    totals = SpeculationTotals(1, 1, [1])
    text = generate_latest(
        create_registry("m", stats, lambda: view_of(speculation=totals))
    ).decode()
    found = {
        family.name.removeprefix("vllm:"): family
        for family in text_string_to_metric_families(text)
        if family.name.startswith("vllm:") and not family.name.endswith("_created")
    }
    assert found.keys() == {*GAUGES, *COUNTERS, *HISTOGRAMS}
    for name, labels in [*GAUGES.items(), *COUNTERS.items()]:
        assert found[name].type == ("gauge" if name in GAUGES else "counter")
        assert {label for sample in found[name].samples for label in sample.labels} == labels
    for name, expected in HISTOGRAMS.items():
        assert found[name].type == "histogram"
        edges = [float(s.labels["le"]) for s in found[name].samples if "le" in s.labels]
        assert edges[-1] == math.inf
        own = {name: t for t, names in TARGETED.items() for name in names}
        target = EDGES_ON_TARGETS[own[name]] if has_targets and name in own else None
        assert set(edges[:-1]) == {*map(float, expected.split()), *([target] if target else [])}


TARGETED = {
    "ttft": ("time_to_first_token_seconds",),
    "itl": ("inter_token_latency_seconds", "request_time_per_output_token_seconds"),
    "e2e": ("e2e_request_latency_seconds",),
}


def test_quantiles_of_the_last_minute_are_shown_for_each_target() -> None:
    recorder = Recorder("boot", 0.0, 0.0)
    timer = recorder.arrive("r", 0.0, 0.0, 1)
    for i in range(100):
        recorder.next_token(timer, timer.last_s + (i + 1) / 1000, at_cap=False)
        recorder.advance(timer.last_s, timer.last_s, 0.0)
    seen = scrape(Statistics(Slo(), 0.0), replace(VIEW, last_minute=recorder.ticks.newest(30)))
    name = "sluice_last_minute_inter_token_latency_seconds"
    common = (("engine", "0"), ("model_name", "m"))
    assert seen[name, *common, ("quantile", "0.5")] == pytest.approx(0.045, rel=0.03)
    assert seen[name, *common, ("quantile", "0.99")] == pytest.approx(0.089, rel=0.03)
    of = ("of", "inter_token_latency_seconds")
    assert seen["sluice_last_minute_values", *common, of] == 89  # 5.05 s are two ticks of 2 s
    assert not any("last_minute_time_to_first" in str(key[0]) for key in seen)


def test_counters_of_targets_follow_the_closed_ticks_and_never_fall() -> None:
    recorder = Recorder("boot", 0.0, 0.0)
    recorder.ticks.start(1, 4, Slo(ttft_ms=500, itl_ms=20))
    timer = recorder.arrive("r", 0.0, 0.0, 1)
    recorder.first_token(timer, 1.0, FirstParts(0.9, 0.0, 0.1, 0))
    recorder.next_token(timer, 1.1, at_cap=False)
    view = replace(VIEW, totals=recorder.ticks.totals)

    def counts() -> list[float]:
        seen, names = scrape(Statistics(Slo(), 0.0), view), ("values", "misses")
        common = (("engine", "0"), ("model_name", "m"))
        targets = ("timeToFirstToken", "interTokenLatency", "endToEnd")
        keys = [
            (f"sluice_target_{n}_total", *common, ("target", t)) for n in names for t in targets
        ]
        cause = ("sluice_first_token_misses_total", ("cause", "cap"), *common)
        return [seen[key] for key in (*keys, cause)]

    assert counts() == [0] * 7, "the tick is open"
    recorder.advance(2.0, 2.0, 0.0)
    assert counts() == [1, 1, 0, 1, 1, 0, 1]
    recorder.ticks.configure(1, 4, Slo(ttft_ms=500, itl_ms=2000))
    recorder.next_token(timer, 2.5, at_cap=False)
    recorder.finish(timer, 2.5)
    for _ in range(1000):
        recorder.advance(recorder.ticks.end_s, recorder.ticks.end_s, 0.0)
    assert counts() == [1, 2, 1, 1, 1, 0, 1], "also of ticks that the ring has lost"


def view_of(**changes: object) -> MetricsView:
    return replace(VIEW, load=msgspec.structs.replace(VIEW.load, **changes))


def step_of(decodes: int, padding: int, drafts: int = 0, prefill: int = 0) -> EngineStep:
    return EngineStep(
        epoch=0,
        started_s=0.0,
        step_s=0.01,
        num_decodes=decodes,
        num_prefill_tokens=prefill,
        num_running=decodes,
        num_draft_tokens=drafts,
        num_padding=padding,
    )


def test_what_a_batch_does_for_nothing_is_shown() -> None:
    stats = Statistics(Slo(), 0.0)
    for step in (step_of(0, 0, prefill=40), step_of(4, 0), step_of(3, 1, drafts=5), step_of(1, 3)):
        stats.step(step)
    seen = scrape(stats, view_of(rounding_waste=0.03))
    common = (("engine", "0"), ("model_name", "m"))
    assert seen["sluice_effective_batch", *common] == 8 / 3
    assert seen["sluice_padding_waste", *common] == 4 / 12
    assert seen["sluice_kv_rounding_waste", *common] == 0.03
    for kind, count in (("decode", 8), ("prefill", 40), ("draft", 5), ("padding", 4)):
        labels = (("engine", "0"), ("kind", kind), ("model_name", "m"))
        assert seen["sluice_step_tokens_total", *labels] == count


def test_speculation_is_shown_as_vllm_does_and_only_if_it_is_on() -> None:
    stats = Statistics(Slo(), 0.0)
    assert not any("spec_decode" in str(key[0]) for key in scrape(stats, VIEW))
    totals = SpeculationTotals(3, 12, [3, 2, 1, 0])
    seen = scrape(stats, view_of(speculation=totals))
    common = (("engine", "0"), ("model_name", "m"))
    for name, value in (("drafts", 3), ("draft_tokens", 12), ("accepted_tokens", 6)):
        assert seen[f"vllm:spec_decode_num_{name}_total", *common] == value
    labels = (*common, ("position", "1"))
    assert seen["vllm:spec_decode_num_accepted_tokens_per_pos_total", *labels] == 2
