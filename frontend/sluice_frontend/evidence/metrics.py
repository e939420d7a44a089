"""Prometheus text over one snapshot: vLLM's names, types and labels, and our own `sluice_*`.

Dashboards, KEDA scalers and endpoint pickers made for vLLM read these unchanged (V1 names). Labels
are the model's served name and the engine's index, never anything that a client sends.
"""

import math
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from prometheus_client import (
    CollectorRegistry,
    GCCollector,
    PlatformCollector,
    ProcessCollector,
)
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector
from sluice_core.contract import TICK_SECONDS, MemoryReport, Sketch, Slo, StepModel, Tick
from sluice_core.sketch import quantile_ms
from sluice_core.wire import FinishReason, FirstToken, Snapshot, SpeculationTotals, StepReport

Values = dict[tuple[str, ...], float]
"""Values of one family by the labels that it has beyond the common ones."""
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
BATCH_STEPS = 512
"""Steps that the effective batch and the padding waste are taken over."""
METHODS = ("GET", "POST", "PUT", "PATCH", "DELETE", "HEAD", "OPTIONS")
QUEUE_LIMITS = ("max_num_queued_reqs", "max_num_queued_tokens")
FINISHED_REASONS = ("stop", "length", "abort", "error", "repetition")
NOT_HERE = ("host", "p2p", "disk", "external_unspecified")
"""Where vLLM may keep KV beside the device (its #56318)."""
ROW_KINDS = ("decode", "prefill", "draft", "padding")

SKETCHES: Mapping[str, Callable[[Tick], Sketch]] = {
    "time_to_first_token_seconds": lambda tick: tick.ttft.sketch,
    "inter_token_latency_seconds": lambda tick: tick.itl.sketch,
    "e2e_request_latency_seconds": lambda tick: tick.e2e.sketch,
}
"""What targets are set for, in the evidence: shown also as quantiles of the last minute."""
MINUTE_TICKS = round(60 / TICK_SECONDS)
QUANTILES = ("0.5", "0.9", "0.95", "0.99", "0.999")

# vLLM's edges in seconds (v1/metrics/loggers.py).
TTFT_EDGES = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5),
    *(10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
ITL_EDGES = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5),
    *(10.0, 20.0, 40.0, 80.0),
)
LATENCY_EDGES = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0),
    *(120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
ITERATION_EDGES = (1, 8, *(2**i for i in range(4, 15)))
N_EDGES = (1, 2, 5, 10, 20)
PREEMPTION_EDGES = (1, 2, 3, 4, 5, 10, 20)


def with_target(edges: tuple[float, ...], target_ms: float | None) -> tuple[float, ...]:
    """`edges` with one on the target, so that the share over it can be read off exactly."""
    return edges if target_ms is None else tuple(sorted({*edges, target_ms / 1e3}))


def one_two_five(largest: int) -> tuple[float, ...]:
    """1, 2, 5, 10, ... up to `largest`, as vLLM's edges of token counts."""
    edges: list[float] = []
    for exponent in range(int(math.log10(max(largest, 1))) + 1):
        edges += [m * 10**exponent for m in (1, 2, 5) if m * 10**exponent <= largest]
    return tuple(edges)


class Histogram:
    """Counts per bucket; `edges` are upper, inclusive."""

    def __init__(self, edges: Iterable[float]) -> None:
        self.edges = tuple(edges)
        self.counts = [0] * (len(self.edges) + 1)
        self.total = 0.0

    def observe(self, value: float) -> None:
        """Count one value."""
        self.counts[bisect_left(self.edges, value)] += 1
        self.total += value

    def buckets(self) -> list[tuple[str, float]]:
        """Cumulative counts by edge, as the exposition format wants them."""
        buckets, running = [], 0
        for edge, count in zip((*self.edges, math.inf), self.counts, strict=True):
            running += count
            buckets.append(("+Inf" if math.isinf(edge) else str(float(edge)), float(running)))
        return buckets


def _histograms(slo: Slo, max_model_len: int) -> dict[str, Histogram]:
    tokens = one_two_five(max_model_len)
    return {
        "time_to_first_token_seconds": Histogram(with_target(TTFT_EDGES, slo.ttft_ms)),
        "inter_token_latency_seconds": Histogram(with_target(ITL_EDGES, slo.itl_ms)),
        "request_time_per_output_token_seconds": Histogram(with_target(ITL_EDGES, slo.itl_ms)),
        "e2e_request_latency_seconds": Histogram(with_target(LATENCY_EDGES, slo.e2e_ms)),
        "request_queue_time_seconds": Histogram(LATENCY_EDGES),
        "request_inference_time_seconds": Histogram(LATENCY_EDGES),
        "request_prefill_time_seconds": Histogram(LATENCY_EDGES),
        "request_decode_time_seconds": Histogram(LATENCY_EDGES),
        "request_prompt_tokens": Histogram(tokens),
        "request_generation_tokens": Histogram(tokens),
        "request_max_num_generation_tokens": Histogram(tokens),
        "request_params_max_tokens": Histogram(tokens),
        "request_prefill_kv_computed_tokens": Histogram(tokens),
        "request_params_n": Histogram(N_EDGES),
        "request_num_preemptions": Histogram(PREEMPTION_EDGES),
        "iteration_tokens_total": Histogram(ITERATION_EDGES),
    }


HELP = {
    "time_to_first_token_seconds": "Last byte of the body read to first byte of a token sent.",
    "inter_token_latency_seconds": "Gap between two tokens of a request as sent.",
    "request_time_per_output_token_seconds": "Mean gap of a request.",
    "e2e_request_latency_seconds": "Last byte of the body read to last token sent.",
    "request_queue_time_seconds": "Time waiting for the cap and for KV blocks.",
    "request_inference_time_seconds": "Time from admission to the last token.",
    "request_prefill_time_seconds": "Time from admission to the first token.",
    "request_decode_time_seconds": "Time from the first token to the last.",
    "request_prompt_tokens": "Prompt tokens of a request.",
    "request_generation_tokens": "Tokens generated for a request.",
    "request_max_num_generation_tokens": "Largest output of a request's sequences.",
    "request_params_max_tokens": "The max_tokens that requests ask for.",
    "request_prefill_kv_computed_tokens": "Prompt tokens computed, cached ones left out.",
    "request_params_n": "The n that requests ask for.",
    "request_num_preemptions": "How often a request was preempted.",
    "iteration_tokens_total": "Tokens of one engine step.",
}


@dataclass(slots=True)
class Statistics:
    """Totals since the start, fed by the server as things happen."""

    slo: Slo
    created_s: float
    prompt_tokens: int = 0
    prompt_tokens_cached: int = 0
    generation_tokens: int = 0
    steps: int = 0
    step_s: float = 0.0
    finished: dict[str, int] = field(default_factory=dict)
    rejected: dict[str, int] = field(default_factory=dict)
    cut: dict[str, int] = field(default_factory=dict)
    answered: dict[tuple[str, str, str], int] = field(default_factory=dict)
    rows: dict[str, int] = field(default_factory=dict)
    batches: deque[tuple[int, int]] = field(default_factory=lambda: deque(maxlen=BATCH_STEPS))
    histograms: dict[str, Histogram] = field(init=False)

    def __post_init__(self) -> None:
        self.histograms = _histograms(self.slo, 1)

    def set_window(self, max_model_len: int) -> None:
        """Token histograms reach to the window, which is known once the engine serves."""
        self.histograms = _histograms(self.slo, max_model_len)

    def observe(self, name: str, value: float) -> None:
        """Count `value` in the histogram `name` (without its prefix)."""
        self.histograms[name].observe(value)

    def step(self, report: StepReport) -> None:
        """One engine step."""
        self.steps += 1
        self.step_s += report.step_s
        self.generation_tokens += len(report.tokens)
        kinds = (
            ("decode", report.num_decodes),
            ("prefill", report.num_prefill_tokens),
            ("draft", report.num_draft_tokens),
            ("padding", report.num_padding),
        )
        for kind, count in kinds:
            self.rows[kind] = self.rows.get(kind, 0) + count
        self.observe("iteration_tokens_total", sum(count for _, count in kinds))
        if report.num_decodes:
            self.batches.append((report.num_decodes, report.num_padding))

    def effective_batch(self) -> float:
        """Sequences that a decode step of late brought a token to, in the mean."""
        return sum(decodes for decodes, _ in self.batches) / max(len(self.batches), 1)

    def padding_waste(self) -> float:
        """Share of the decoded rows of late that were a static batch's padding."""
        padding = sum(padding for _, padding in self.batches)
        return padding / max(sum(sum(batch) for batch in self.batches), 1)

    def first_token(self, ttft_s: float, parts: FirstToken, num_prompt_tokens: int) -> None:
        """A request's first token was sent."""
        self.prompt_tokens += num_prompt_tokens
        self.prompt_tokens_cached += parts.cached_tokens
        self.observe("time_to_first_token_seconds", ttft_s)
        self.observe("request_queue_time_seconds", parts.wait_cap_s + parts.wait_kv_s)
        self.observe("request_prefill_time_seconds", parts.prefill_s)
        computed = num_prompt_tokens - parts.cached_tokens
        self.observe("request_prefill_kv_computed_tokens", computed)

    def end(self, reason: FinishReason) -> None:
        """A sequence ended, for whatever reason."""
        self.finished[reason] = self.finished.get(reason, 0) + 1

    def reject(self, reason: str) -> None:
        """A request was refused on arrival."""
        self.rejected[reason] = self.rejected.get(reason, 0) + 1

    def answer(self, route: str, method: str, status: int) -> None:
        """An HTTP request was answered. Clients choose methods, so few of them have a name."""
        key = (route, method if method in METHODS else "other", f"{status // 100}xx")
        self.answered[key] = self.answered.get(key, 0) + 1

    def connection_cut(self, reason: Literal["receive", "write"]) -> None:
        """A connection missed the deadline named."""
        self.cut[reason] = self.cut.get(reason, 0) + 1


@dataclass(frozen=True, slots=True)
class View:
    """What is true at the moment of a scrape. `last_minute`: its closed ticks."""

    is_ready: bool
    snapshot: Snapshot
    open_requests: int
    epoch: int
    max_num_seqs: int
    ceiling: int
    cache_config: dict[str, str]
    memory: MemoryReport
    step_model: StepModel | None
    last_minute: Sequence[Tick]


class WorkerCollector(Collector):
    """Yields every family from the statistics and one view."""

    def __init__(self, model_name: str, stats: Statistics, view: Callable[[], View]) -> None:
        self.labels = {"model_name": model_name, "engine": "0"}
        self.stats = stats
        self.view = view

    def describe(self) -> Iterable[Metric]:
        """Nothing is known before the first scrape; keeps the registry from scraping."""
        return ()

    def collect(self) -> Iterator[Metric]:
        """One pass over everything, in the order of the module."""
        view = self.view()
        yield from self._engine_gauges(view)
        yield from self._counters(view.snapshot)
        for name, histogram in self.stats.histograms.items():
            family = HistogramMetricFamily(f"vllm:{name}", HELP[name], labels=list(self.labels))
            family.add_metric(list(self.labels.values()), histogram.buckets(), histogram.total)
            yield family
        yield from self._own(view)

    def _gauge(self, name: str, text: str, values: Values, *labels: str) -> Metric:
        family = GaugeMetricFamily(name, text, labels=[*self.labels, *labels])
        for extra, value in values.items():
            family.add_metric([*self.labels.values(), *extra], value)
        return family

    def _counter(self, name: str, text: str, values: Values, *labels: str) -> Metric:
        family = CounterMetricFamily(name, text, labels=[*self.labels, *labels])
        for extra, value in values.items():
            family.add_metric([*self.labels.values(), *extra], value, created=self.stats.created_s)
        return family

    def _engine_gauges(self, view: View) -> Iterator[Metric]:
        state = view.snapshot
        yield self._gauge(
            "vllm:num_requests_running", "Sequences in the batch.", {(): state.running}
        )
        waiting = state.waiting + state.waiting_turn
        yield self._gauge("vllm:num_requests_waiting", "Sequences that wait.", {(): waiting})
        yield self._gauge(
            "vllm:num_requests_waiting_by_reason",
            "Sequences that wait, by reason.",
            {("capacity",): waiting, ("deferred",): 0},
            "reason",
        )
        yield self._gauge(
            "vllm:kv_cache_usage_perc", "Share of KV blocks in use.", {(): state.kv_usage}
        )
        yield self._gauge(
            "vllm:engine_sleep_state",
            "1 for the state that the engine is in.",
            {("awake",): 1, ("weights_offloaded",): 0, ("discard_all",): 0},
            "sleep_state",
        )
        config = view.cache_config
        yield self._gauge(
            "vllm:cache_config_info",
            "The KV cache's configuration.",
            {tuple(config.values()): 1},
            *config,
        )

    def _counters(self, state: Snapshot) -> Iterator[Metric]:
        stats = self.stats
        plain = (
            ("prefix_cache_queries", "Prompt tokens looked up.", state.prefix_queries),
            ("prefix_cache_hits", "Prompt tokens found.", state.prefix_hits),
            ("num_preemptions", "Preemptions.", state.num_preemptions),
            ("prompt_tokens", "Prompt tokens of requests begun.", stats.prompt_tokens),
            ("prompt_tokens_cached", "Of these, found in the cache.", stats.prompt_tokens_cached),
            ("generation_tokens", "Tokens generated.", stats.generation_tokens),
        )
        for name, text, value in plain:
            yield self._counter(f"vllm:{name}", text, {(): value})
        yield from self._prompt_sources()
        if state.speculation is not None:
            yield from self._speculation(state.speculation)
        ends: Values = {(reason,): stats.finished.get(reason, 0) for reason in FINISHED_REASONS}
        yield self._counter("vllm:request_success", "Ended sequences.", ends, "finished_reason")
        rejections = CounterMetricFamily(
            "vllm:admission_rejections",
            "Requests refused on arrival.",
            labels=["model_name", "reason"],
        )
        for reason in dict.fromkeys((*QUEUE_LIMITS, *stats.rejected)):
            labels = [self.labels["model_name"], reason]
            rejections.add_metric(labels, stats.rejected.get(reason, 0), created=stats.created_s)
        yield rejections
        http = CounterMetricFamily(
            "http_requests", "HTTP requests answered.", labels=["handler", "method", "status"]
        )
        for key, count in stats.answered.items():
            http.add_metric(key, count, created=stats.created_s)
        yield http

    def _prompt_sources(self) -> Iterator[Metric]:
        """Where prompt tokens came from; nothing comes from outside of this worker."""
        cached = self.stats.prompt_tokens_cached
        yield self._counter(
            "vllm:prompt_tokens_by_source",
            "Prompt tokens by where their KV came from.",
            {
                ("local_compute",): self.stats.prompt_tokens - cached,
                ("local_cache_hit",): cached,
                ("external_kv_transfer",): 0,
            },
            "source",
        )
        yield self._counter(
            "vllm:prompt_tokens_cached_by_source",
            "Cached prompt tokens by where they were kept.",
            {("device",): cached, **{(place,): 0 for place in NOT_HERE}},
            "source",
        )
        for name in ("queries", "hits"):
            text = f"Prefix cache {name} to other processes, of which there are none."
            yield self._counter(f"vllm:external_prefix_cache_{name}", text, {(): 0})

    def _speculation(self, totals: SpeculationTotals) -> Iterator[Metric]:
        by_position = totals.accepted_by_position
        plain = (
            ("num_drafts", "Drafts verified.", totals.num_drafts),
            ("num_draft_tokens", "Tokens of these drafts.", totals.draft_tokens),
            ("num_accepted_tokens", "Of these, accepted.", sum(by_position)),
        )
        for name, text, value in plain:
            yield self._counter(f"vllm:spec_decode_{name}", text, {(): value})
        yield self._counter(
            "vllm:spec_decode_num_accepted_tokens_per_pos",
            "Accepted tokens by place in the draft.",
            {(str(position),): count for position, count in enumerate(by_position)},
            "position",
        )

    def _own(self, view: View) -> Iterator[Metric]:
        state, stats = view.snapshot, self.stats
        plain = (
            ("ready", "1 if the worker serves.", int(view.is_ready)),
            ("open_requests", "Sequences that have not ended.", view.open_requests),
            ("max_num_seqs", "The cap in force.", view.max_num_seqs),
            ("max_num_seqs_ceiling", "The largest cap possible.", view.ceiling),
            ("epoch", "The operator's number of the configuration in force.", view.epoch),
            ("kv_cached_blocks", "Free blocks that hold a reusable prefix.", state.cached_blocks),
            ("kv_rounding_waste", "Share of used KV slots beyond tokens.", state.rounding_waste),
            ("effective_batch", "Tokens of a decode step, lately.", stats.effective_batch()),
            ("padding_waste", "Share of decoded rows thrown away.", stats.padding_waste()),
        )
        for name, text, value in plain:
            yield self._gauge(f"sluice_{name}", text, {(): value})
        yield self._gauge(
            "sluice_num_requests_waiting",
            "Sequences that wait, by what for.",
            {
                ("cap",): state.waiting_cap,
                ("kv",): state.waiting_kv,
                ("turn",): state.waiting_turn,
            },
            "reason",
        )
        yield self._gauge(
            "sluice_memory_bytes", "Memory by class.", _memory(view.memory), "class", "kind"
        )
        yield from self._last_minute(view.last_minute)
        if view.step_model is not None:
            yield self._gauge(
                "sluice_step_model",
                "step_ms = a + b decodes + c kv_tokens + d prefill_tokens.",
                _coefficients(view.step_model),
                "coefficient",
            )
        yield self._counter("sluice_steps", "Engine steps.", {(): stats.steps})
        yield self._counter("sluice_step_seconds", "Time in engine steps.", {(): stats.step_s})
        yield self._counter(
            "sluice_preempted_tokens", "Tokens computed again.", {(): state.preempted_tokens}
        )
        yield self._counter(
            "sluice_step_tokens",
            "Tokens of all steps, by kind.",
            {(kind,): stats.rows.get(kind, 0) for kind in ROW_KINDS},
            "kind",
        )
        yield self._counter(
            "sluice_connections_cut",
            "Connections cut at a deadline.",
            {(reason,): stats.cut.get(reason, 0) for reason in ("receive", "write")},
            "deadline",
        )

    def _last_minute(self, ticks: Sequence[Tick]) -> Iterator[Metric]:
        counts: Values = {}
        for name, sketch_of in SKETCHES.items():
            sketch = Counter[int]()
            for tick in ticks:
                sketch.update(sketch_of(tick))
            times_ms = {q: quantile_ms(sketch, float(q)) for q in QUANTILES}
            values: Values = {(q,): ms / 1e3 for q, ms in times_ms.items() if ms is not None}
            text = f"Quantiles of the last minute, within 1 %. {HELP[name]}"
            yield self._gauge(f"sluice_last_minute_{name}", text, values, "quantile")
            counts[name,] = sketch.total()
        yield self._gauge("sluice_last_minute_values", "Values behind these.", counts, "of")


def _memory(memory: MemoryReport) -> Values:
    kinds = {
        "planned": memory.planned,
        "measured": memory.measured,
        "corrected": memory.corrected,
    }
    return {
        (name, kind): float(size) for kind, sizes in kinds.items() for name, size in sizes.items()
    }


def _coefficients(model: StepModel) -> Values:
    values = {"a": model.a, "b": model.b, "c": model.c, "d": model.d, "resid_q": model.resid_q}
    return {(name,): value for name, value in values.items()}


def create_registry(
    model_name: str, stats: Statistics, view: Callable[[], View]
) -> CollectorRegistry:
    """All families of one worker."""
    registry = CollectorRegistry()
    for kind in (ProcessCollector, PlatformCollector, GCCollector):
        kind(registry=registry)
    registry.register(WorkerCollector(model_name, stats, view))
    return registry
