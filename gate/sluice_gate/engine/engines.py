"""Engines as data: where each tells its health, its load and its limits. Pure.

Names are those of each engine's own documentation; some were renamed, so there may be several.
A name that an engine does not show is unknown, which is never taken for idle.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from sluice_core.bounded import MAX_COUNT, Numbers

EngineName = Literal["vllm", "sglang", "llamacpp", "ollama", "tgi", "custom"]


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """`health`: a path that answers 200 while it serves. Metrics, by any of their names:

    `waiting`: sequences in its own queue; `kv_usage`: share of its KV cache in use, 0 to 1;
    `preemptions`: a counter; `tokens`: a counter that moves while it works. `counts_steps`: that
    one moves with each step, not at the end of an answer.
    `has_metrics`: it serves /metrics. `about`: a path that tells its capacity.
    """

    health: str
    has_metrics: bool = True
    waiting: tuple[str, ...] = ()
    kv_usage: tuple[str, ...] = ()
    preemptions: tuple[str, ...] = ()
    tokens: tuple[str, ...] = ()
    counts_steps: bool = False
    about: str | None = None


ENGINES: Mapping[EngineName, EngineFacts] = {
    "vllm": EngineFacts(
        "/health",
        waiting=("vllm:num_requests_waiting",),
        kv_usage=("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc"),  # before 0.9.2
        preemptions=("vllm:num_preemptions_total",),
        tokens=("vllm:generation_tokens_total", "vllm:prompt_tokens_total"),
        counts_steps=True,
    ),
    "sglang": EngineFacts(
        "/health",
        waiting=("sglang:num_queue_reqs", "sglang:num_grammar_queue_reqs"),
        kv_usage=("sglang:token_usage",),
        preemptions=("sglang:num_retracted_reqs",),
        tokens=("sglang:generation_tokens_total", "sglang:prompt_tokens_total"),
        about="/server_info",
    ),
    "llamacpp": EngineFacts(
        "/health",
        waiting=("llamacpp:requests_deferred",),
        tokens=("llamacpp:tokens_predicted_total", "llamacpp:prompt_tokens_total"),
        about="/props",
    ),
    "ollama": EngineFacts("/api/version", has_metrics=False),
    "tgi": EngineFacts(
        "/health",
        waiting=("tgi_queue_size",),
        tokens=("tgi_request_generated_tokens_sum",),
    ),
    "custom": EngineFacts("/v1/models"),
}

_SAMPLE = re.compile(r"^([A-Za-z_:][\w:]*)(?:\{[^}\n]*\})? (\S+)", re.MULTILINE)
"""Within one line: a bracket that nothing closes must not be looked for to the end of the page."""


@dataclass(frozen=True, slots=True)
class ServerLoad:
    """An engine's own metrics at one moment; None where it shows none."""

    waiting: float | None = None
    kv_usage: float | None = None
    preemptions: float | None = None
    tokens: float | None = None


def load_of(facts: EngineFacts, text: str, numbers: Numbers) -> ServerLoad:
    """The load in a scrape; samples of one name are summed."""
    wanted = {*facts.waiting, *facts.kv_usage, *facts.preemptions, *facts.tokens}
    values: dict[str, float] = {}
    for name, word in _SAMPLE.findall(text):
        value = numbers.number(word, MAX_COUNT) if name in wanted else None
        if value is not None:
            values[name] = values.get(name, 0.0) + value

    def total(names: tuple[str, ...]) -> float | None:
        found = [values[name] for name in names if name in values]
        return numbers.number(sum(found), MAX_COUNT) if found else None

    return ServerLoad(
        total(facts.waiting),
        total(facts.kv_usage),
        total(facts.preemptions),
        total(facts.tokens),
    )
