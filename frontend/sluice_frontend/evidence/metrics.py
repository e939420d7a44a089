"""Prometheus metrics as a table: vLLM's names, types and labels, and our own `sluice_*`.

Dashboards, KEDA scalers and endpoint pickers made for vLLM read these unchanged (V1 names). Labels
are the model's served name and the engine's index, never anything that a client sends.
"""

from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate
from typing import Any, Literal, NamedTuple

from msgspec.structs import asdict
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
    InfoMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector
from sluice_core.contract import TARGETS, TICK_SECONDS, MemoryReport, Sketch, Slo, StepModel, Tick
from sluice_core.port import EngineLoad, EngineStep, FinishReason, FirstParts, SpeculationTotals
from sluice_core.sketch import quantile_ms

from .totals import Totals

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
UNREADABLE = ("about", "metrics", "socket", "usage")
"""Where an engine's numbers come from: what it says of itself, its metrics, its steps, answers."""
BATCH_STEPS = 512
"""Number of steps behind the effective batch and the padding waste."""
METHODS = ("GET", "POST", "PUT", "PATCH", "DELETE", "HEAD", "OPTIONS")
MINUTE_TICKS = round(60 / TICK_SECONDS)

# vLLM's edges in seconds (v1/metrics/loggers.py).
TTFT_EDGES = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5),
    *(10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
ITL_EDGES = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5),
    *(10.0, 20.0, 40.0, 80.0),
)
E2E_EDGES = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0),
    *(120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)


def with_target(edges: tuple[float, ...], target_ms: float | None) -> tuple[float, ...]:
    """`edges` with one on the target, so that the share over it can be read exactly."""
    return edges if target_ms is None else tuple(sorted({*edges, target_ms / 1e3}))


def one_two_five(largest: int) -> tuple[float, ...]:
    """1, 2, 5, 10, ... up to `largest`, as vLLM's edges of token counts."""
    edges = (m * 10**exponent for exponent in range(len(str(largest))) for m in (1, 2, 5))
    return tuple(edge for edge in edges if edge <= largest)


class Histogram:
    """Counts per bucket; `edges` are upper, inclusive."""

    def __init__(self, edges: Iterable[float]) -> None:
        self.edges = tuple(edges)
        self.counts = [0] * (len(self.edges) + 1)
        self.total = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.edges, value)] += 1
        self.total += value

    def buckets(self) -> list[tuple[str, float]]:
        """Cumulative counts by edge, as in the exposition format."""
        names = [*(str(float(edge)) for edge in self.edges), "+Inf"]
        return list(zip(names, accumulate(self.counts), strict=True))


HISTOGRAMS: Mapping[str, tuple[str, tuple[float, ...] | None, str]] = {
    "time_to_first_token_seconds": ("Last byte of the body read to first byte of a token sent.",
                                    TTFT_EDGES, "ttft_ms"),
    "inter_token_latency_seconds": ("Gap between two tokens of a request as sent.",
                                    ITL_EDGES, "itl_ms"),
    "request_time_per_output_token_seconds": ("Mean gap of a request.", ITL_EDGES, "itl_ms"),
    "e2e_request_latency_seconds": ("Last byte of the body read to last token sent.",
                                    E2E_EDGES, "e2e_ms"),
    "request_queue_time_seconds": ("Time waiting for the cap and for KV blocks.", E2E_EDGES, ""),
    "request_inference_time_seconds": ("Time from admission to the last token.", E2E_EDGES, ""),
    "request_prefill_time_seconds": ("Time from admission to the first token.", E2E_EDGES, ""),
    "request_decode_time_seconds": ("Time from the first token to the last.", E2E_EDGES, ""),
    "request_prompt_tokens": ("Prompt tokens of a request.", None, ""),
    "request_generation_tokens": ("Tokens generated for a request.", None, ""),
    "request_max_num_generation_tokens": ("Largest output of a request's sequences.", None, ""),
    "request_params_max_tokens": ("The max_tokens that requests ask for.", None, ""),
    "request_prefill_kv_computed_tokens": ("Prompt tokens computed, cached ones left out.",
                                           None, ""),
    "request_params_n": ("The n that requests ask for.", (1, 2, 5, 10, 20), ""),
    "request_num_preemptions": ("How often a request was preempted.", (1, 2, 3, 4, 5, 10, 20), ""),
    "iteration_tokens_total": ("Tokens of one engine step.",
                               (1, 8, *(2**i for i in range(4, 15))), ""),
}  # fmt: skip
"""Help, edges (None: token counts up to the window), and the target that becomes an edge."""


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
    finished: Counter[str] = field(default_factory=Counter)
    rejected: Counter[str] = field(default_factory=Counter)
    failed: Counter[str] = field(default_factory=Counter)
    background: Counter[str] = field(default_factory=Counter)
    cut: Counter[str] = field(default_factory=Counter)
    unreadable: Counter[str] = field(default_factory=Counter)
    answered: Counter[tuple[str, str, str]] = field(default_factory=Counter)
    rows: Counter[str] = field(default_factory=Counter)
    batches: deque[tuple[int, int]] = field(default_factory=lambda: deque(maxlen=BATCH_STEPS))
    histograms: dict[str, Histogram] = field(init=False)

    def __post_init__(self) -> None:
        self.set_window(1)

    def set_window(self, max_model_len: int) -> None:
        """Extend token histograms to the window, which is known once the engine serves."""
        tokens, targets = one_two_five(max_model_len), asdict(self.slo)
        self.histograms = {
            name: Histogram(with_target(edges or tokens, targets.get(target)))
            for name, (_, edges, target) in HISTOGRAMS.items()
        }

    def observe(self, name: str, value: float) -> None:
        """Count `value` in the histogram `name` (without its prefix)."""
        self.histograms[name].observe(value)

    def step(self, step: EngineStep) -> None:
        self.steps += 1
        self.step_s += step.step_s
        self.generation_tokens += step.num_tokens
        rows = {
            "decode": step.num_decodes,
            "prefill": step.num_prefill_tokens,
            "draft": step.num_draft_tokens,
            "padding": step.num_padding,
        }
        self.rows.update(rows)
        self.observe("iteration_tokens_total", sum(rows.values()))
        if step.num_decodes:
            self.batches.append((step.num_decodes, step.num_padding))

    def effective_batch(self) -> float:
        """Mean number of sequences that got a token in a recent decode step."""
        return sum(decodes for decodes, _ in self.batches) / max(len(self.batches), 1)

    def padding_waste(self) -> float:
        """Share of recently decoded rows that were a static batch's padding."""
        padding = sum(padding for _, padding in self.batches)
        return padding / max(sum(sum(batch) for batch in self.batches), 1)

    def first_token(self, ttft_s: float, parts: FirstParts, num_prompt_tokens: int) -> None:
        self.prompt_tokens += num_prompt_tokens
        self.prompt_tokens_cached += parts.cached_tokens
        self.observe("time_to_first_token_seconds", ttft_s)
        self.observe("request_queue_time_seconds", parts.wait_cap_s + parts.wait_kv_s)
        self.observe("request_prefill_time_seconds", parts.prefill_s)
        computed = num_prompt_tokens - parts.cached_tokens
        self.observe("request_prefill_kv_computed_tokens", computed)

    def end(self, reason: FinishReason) -> None:
        self.finished[reason] += 1

    def fail(self, kind: str) -> None:
        """Count a sequence that the engine failed, `kind` as in `contract.Failures`."""
        self.end("error")
        self.failed[kind] += 1

    def reject(self, reason: str) -> None:
        self.rejected[reason] += 1

    def answer(self, route: str, method: str, status: int) -> None:
        """Count an answered request. Clients choose methods, so only known ones are labels."""
        method = method if method in METHODS else "other"
        self.answered[route, method, f"{status // 100}xx"] += 1

    def connection_cut(self, reason: Literal["receive", "write"]) -> None:
        self.cut[reason] += 1


@dataclass(frozen=True, slots=True)
class MetricsView:
    """The state at the moment of a scrape. `last_minute`: its closed ticks."""

    is_ready: bool
    is_hung: bool
    load: EngineLoad
    open_requests: int
    epoch: int
    cap: int
    ceiling: int
    cache_config: dict[str, str]
    memory: MemoryReport
    step_model: StepModel | None
    last_minute: Sequence[Tick]
    totals: Totals


Values = Mapping[Any, Any]
"""Values by the family's own labels."""
Value = Callable[[MetricsView, Statistics], float | Values | None]
"""One number, or several by label; None hides the family."""


class MetricFamily(NamedTuple):
    """One row of the table."""

    kind: type[GaugeMetricFamily | CounterMetricFamily | InfoMetricFamily]
    name: str
    help: str
    value: Value
    labels: tuple[str, ...] = ()
    common: tuple[str, ...] = ("model_name", "engine")


def _waiting(state: EngineLoad) -> int:
    return state.waiting + state.waiting_turn


def _sources(stats: Statistics) -> Values:
    cached = stats.prompt_tokens_cached
    computed = stats.prompt_tokens - cached
    return {"local_compute": computed, "local_cache_hit": cached, "external_kv_transfer": 0}


def _cached_at(stats: Statistics) -> Values:
    """vLLM may keep KV beside the device as well (its #56318)."""
    elsewhere = ("host", "p2p", "disk", "external_unspecified")
    return {"device": stats.prompt_tokens_cached} | dict.fromkeys(elsewhere, 0)


def _drafts(value: Callable[[SpeculationTotals], float | Values]) -> Value:
    return lambda v, _: None if v.load.speculation is None else value(v.load.speculation)


def _by_place(drafts: SpeculationTotals) -> Values:
    return {str(place): num for place, num in enumerate(drafts.accepted_by_position)}


def _counts(counted: Counter[str], *names: str) -> Values:
    """The counts of `names`, also where nothing was counted."""
    return {name: counted[name] for name in names}


def _rejections(stats: Statistics) -> Values:
    limits = ("max_num_queued_reqs", "max_num_queued_tokens")
    return _counts(stats.rejected, *dict.fromkeys((*limits, *stats.rejected)))


def _failures(stats: Statistics) -> Values:
    return _counts(stats.failed, *dict.fromkeys(("500", "cut", "died", *stats.failed)))


def _by_reason(state: EngineLoad) -> Values:
    return {"cap": state.waiting_cap, "kv": state.waiting_kv, "turn": state.waiting_turn}


def _memory(memory: MemoryReport) -> Values:
    return {
        (name, kind): size
        for kind in ("planned", "measured", "corrected")
        for name, size in getattr(memory, kind).items()
    }


def _coefficients(model: StepModel | None) -> Values | None:
    names = ("a", "b", "c", "d", "resid_q")
    return None if model is None else {name: getattr(model, name) for name in names}


SKETCHES: Mapping[str, Callable[[Tick], Sketch]] = {
    "time_to_first_token_seconds": lambda tick: tick.ttft.sketch,
    "inter_token_latency_seconds": lambda tick: tick.itl.sketch,
    "e2e_request_latency_seconds": lambda tick: tick.e2e.sketch,
}
"""Latencies that have targets; the quantiles of their last minute are shown as well."""


def _last_minute(name: str, view: MetricsView) -> Counter[int]:
    total = Counter[int]()
    for tick in view.last_minute:
        total.update(SKETCHES[name](tick))
    return total


def _quantiles(name: str, view: MetricsView, _: Statistics) -> Values:
    sketch = _last_minute(name, view)
    times_ms = {q: quantile_ms(sketch, float(q)) for q in ("0.5", "0.9", "0.95", "0.99", "0.999")}
    return {q: ms / 1e3 for q, ms in times_ms.items() if ms is not None}


gauge, counter = (
    partial(MetricFamily, GaugeMetricFamily),
    partial(MetricFamily, CounterMetricFamily),
)
VLLM: Sequence[MetricFamily] = (
    gauge("vllm:num_requests_running", "Sequences in the batch.", lambda v, _: v.load.running),
    gauge("vllm:num_requests_waiting", "Sequences that wait.", lambda v, _: _waiting(v.load)),
    gauge("vllm:num_requests_waiting_by_reason", "Sequences that wait, by reason.",
          lambda v, _: {"capacity": _waiting(v.load), "deferred": 0}, ("reason",)),
    gauge("vllm:kv_cache_usage_perc", "Share of KV blocks in use.",
          lambda v, _: v.load.kv_usage),
    gauge("vllm:engine_sleep_state", "1 for the state that the engine is in.",
          lambda *_: {"awake": 1, "weights_offloaded": 0, "discard_all": 0}, ("sleep_state",)),
    MetricFamily(InfoMetricFamily, "vllm:cache_config", "The KV cache's configuration.",
           lambda v, _: {(): v.cache_config}),
    counter("vllm:prefix_cache_queries", "Prompt tokens looked up.",
            lambda v, _: v.load.prefix_queries),
    counter("vllm:prefix_cache_hits", "Prompt tokens found.", lambda v, _: v.load.prefix_hits),
    counter("vllm:num_preemptions", "Preemptions.", lambda v, _: v.load.num_preemptions),
    counter("vllm:prompt_tokens", "Prompt tokens of requests begun.", lambda _, s: s.prompt_tokens),
    counter("vllm:prompt_tokens_cached", "Of these, found in the cache.",
            lambda _, s: s.prompt_tokens_cached),
    counter("vllm:generation_tokens", "Tokens generated.", lambda _, s: s.generation_tokens),
    counter("vllm:prompt_tokens_by_source", "Prompt tokens by where their KV came from.",
            lambda _, s: _sources(s), ("source",)),
    counter("vllm:prompt_tokens_cached_by_source", "Cached prompt tokens by where they were kept.",
            lambda _, s: _cached_at(s), ("source",)),
    *(counter(f"vllm:external_prefix_cache_{name}",
              f"Prefix cache {name} to other processes, of which there are none.", lambda *_: 0)
      for name in ("queries", "hits")),
    counter("vllm:spec_decode_num_drafts", "Drafts verified.", _drafts(lambda d: d.num_drafts)),
    counter("vllm:spec_decode_num_draft_tokens", "Tokens of these drafts.",
            _drafts(lambda d: d.draft_tokens)),
    counter("vllm:spec_decode_num_accepted_tokens", "Of these, accepted.",
            _drafts(lambda d: sum(d.accepted_by_position))),
    counter("vllm:spec_decode_num_accepted_tokens_per_pos",
            "Accepted tokens by place in the draft.", _drafts(_by_place), ("position",)),
    counter("vllm:request_success", "Ended sequences.",
            lambda _, s: _counts(s.finished, "stop", "length", "abort", "error", "repetition"),
            ("finished_reason",)),
    counter("vllm:admission_rejections", "Requests refused on arrival.",
            lambda _, s: _rejections(s), ("reason",), ("model_name",)),
    counter("http_requests", "HTTP requests answered.",
            lambda _, s: s.answered, ("handler", "method", "status"), ()),
)  # fmt: skip
OWN: Sequence[MetricFamily] = (
    gauge("sluice_ready", "1 if the worker serves.", lambda v, _: v.is_ready),
    gauge("sluice_engine_hung", "1 if the engine makes no progress.", lambda v, _: v.is_hung),
    gauge("sluice_open_requests", "Sequences that have not ended.", lambda v, _: v.open_requests),
    gauge("sluice_cap", "The cap in force.", lambda v, _: v.cap),
    gauge("sluice_cap_ceiling", "The largest cap possible.", lambda v, _: v.ceiling),
    gauge("sluice_epoch", "The operator's number of the configuration in force.",
          lambda v, _: v.epoch),
    gauge("sluice_kv_usage", "Share of KV blocks in use, in any engine that tells it.",
          lambda v, _: v.load.kv_usage),
    gauge("sluice_kv_cached_blocks", "Free blocks that hold a reusable prefix.",
          lambda v, _: v.load.cached_blocks),
    gauge("sluice_kv_rounding_waste", "Share of used KV slots beyond tokens.",
          lambda v, _: v.load.rounding_waste),
    gauge("sluice_effective_batch", "Tokens of a decode step, lately.",
          lambda _, s: s.effective_batch()),
    gauge("sluice_padding_waste", "Share of decoded rows thrown away.",
          lambda _, s: s.padding_waste()),
    gauge("sluice_num_requests_waiting", "Sequences that wait, by what for.",
          lambda v, _: _by_reason(v.load), ("reason",)),
    gauge("sluice_num_requests_background", "Background sequences, by what they do.",
          lambda v, _: {"running": v.load.background_running,
                        "waiting": v.load.background_waiting}, ("state",)),
    gauge("sluice_memory_bytes", "Memory by class.",
          lambda v, _: _memory(v.memory), ("class", "kind")),
    *(gauge(f"sluice_last_minute_{name}",
            f"Quantiles of the last minute, within 1 %. {HISTOGRAMS[name][0]}",
            partial(_quantiles, name), ("quantile",))
      for name in SKETCHES),
    gauge("sluice_last_minute_values", "Values behind these.",
          lambda v, _: {name: _last_minute(name, v).total() for name in SKETCHES}, ("of",)),
    gauge("sluice_step_model", "step_ms = a + b decodes + c kv_tokens + d prefill_tokens.",
          lambda v, _: _coefficients(v.step_model), ("coefficient",)),
    counter("sluice_target_values", "Requests or gaps that were judged, by target.",
            lambda v, _: _counts(v.totals.values, *TARGETS), ("target",)),
    counter("sluice_target_misses", "Of these, over the target in force.",
            lambda v, _: _counts(v.totals.misses, *TARGETS), ("target",)),
    counter("sluice_first_token_misses", "Late first tokens, by the largest part of their time.",
            lambda v, _: _counts(v.totals.causes, "cap", "kv", "prefill", "outside"), ("cause",)),
    counter("sluice_generated_tokens", "Tokens of requests that a target judges.",
            lambda v, _: v.totals.generated_tokens),
    counter("sluice_busy_seconds", "Time in which the engine ran such requests.",
            lambda v, _: v.totals.busy_s),
    counter("sluice_steps", "Engine steps.", lambda _, s: s.steps),
    counter("sluice_step_seconds", "Time in engine steps.", lambda _, s: s.step_s),
    counter("sluice_preempted_tokens", "Tokens computed again.",
            lambda v, _: v.load.preempted_tokens),
    counter("sluice_step_tokens", "Tokens of all steps, by kind.",
            lambda _, s: _counts(s.rows, "decode", "prefill", "draft", "padding"), ("kind",)),
    counter("sluice_requests_failed", "Sequences that the engine failed, by how.",
            lambda _, s: _failures(s), ("kind",)),
    counter("sluice_background_requests", "Background sequences that ended, by how.",
            lambda _, s: _counts(s.background, "finished", "left", "failed"), ("outcome",)),
    counter("sluice_connections_cut", "Connections cut at a deadline.",
            lambda _, s: _counts(s.cut, "receive", "write"), ("deadline",)),
    counter("sluice_unreadable", "Numbers of an engine that were left out, by where they were.",
            lambda _, s: _counts(s.unreadable, *UNREADABLE), ("source",)),
)  # fmt: skip


class WorkerCollector(Collector):
    """Yields every family from the statistics and one view."""

    def __init__(self, model_name: str, stats: Statistics, view: Callable[[], MetricsView]) -> None:
        self.labels = {"model_name": model_name, "engine": "0"}
        self.stats = stats
        self.view = view

    def describe(self) -> Iterable[Metric]:
        """Nothing is known before the first scrape; keeps the registry from scraping."""
        return ()

    def collect(self) -> Iterator[Metric]:
        """One pass over everything, in the order of the module."""
        view = self.view()
        for family in VLLM:
            yield from self._shown(family, view)
        for name, histogram in self.stats.histograms.items():
            metric = HistogramMetricFamily(
                f"vllm:{name}", HISTOGRAMS[name][0], labels=list(self.labels)
            )
            metric.add_metric(list(self.labels.values()), histogram.buckets(), histogram.total)
            yield metric
        for family in OWN:
            yield from self._shown(family, view)

    def _shown(self, family: MetricFamily, view: MetricsView) -> Iterator[Metric]:
        values = family.value(view, self.stats)
        if values is None:
            return
        metric: Any = family.kind(family.name, family.help, labels=[*family.common, *family.labels])
        created = [self.stats.created_s] if isinstance(metric, CounterMetricFamily) else []
        common = [self.labels[name] for name in family.common]
        for own, value in (values if isinstance(values, Mapping) else {(): values}).items():
            labels = [*common, own] if isinstance(own, str) else [*common, *own]
            metric.add_metric(labels, value, *created)
        yield metric


class OwnCollector(WorkerCollector):
    """Only the families `sluice_*`: the others are the engine's, behind a gate."""

    def collect(self) -> Iterator[Metric]:
        """One pass over them."""
        view = self.view()
        for family in OWN:
            yield from self._shown(family, view)


def create_registry(
    model_name: str, stats: Statistics, view: Callable[[], MetricsView]
) -> CollectorRegistry:
    registry = CollectorRegistry()
    for kind in (ProcessCollector, PlatformCollector, GCCollector):
        kind(registry=registry)
    registry.register(WorkerCollector(model_name, stats, view))
    return registry
