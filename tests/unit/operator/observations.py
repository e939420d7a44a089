"""What a pass observes, made up for tests: objects, pods, evidence, and a checkpoint that fits."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from sluice_core.contract import (
    Evidence,
    FirstTokens,
    Lengths,
    MemoryReport,
    Requests,
    RuntimeConfig,
    Slo,
    Tick,
    TokenGaps,
    Waiting,
)
from sluice_core.model.sizing import ModelShape
from sluice_operator.children.manifests import INSTANCE_LABEL
from sluice_operator.cluster.observed import Pod, pod_of
from sluice_operator.model.checkpoint import ModelFacts
from sluice_operator.model.fit import Fit, judge
from sluice_operator.plan.observed import Observed
from sluice_operator.pods.scrape import Scrape
from sluice_operator.settings import Settings
from sluice_operator.spec.service import InferenceService, Spec, parse
from unit.operator.objects import changed, valid_object

NOW = 1_760_000_000.0
SETTINGS = Settings(worker_image="registry/worker:1")
SHAPE = ModelShape("LlamaForCausalLM", 4, 256, 8, 4, 32, 704, 2048, 1024, True, None, "float32")
CHECKPOINT = ModelFacts(SHAPE, "float32", 16 << 20, 4 << 20)


def create_service(**changes: Any) -> InferenceService:
    """The valid object with fields changed, given as dotted paths with _ for the dot."""
    body = valid_object()
    body["metadata"] |= {"uid": "uid-1", "generation": 3}
    for path, value in changes.items():
        body = changed(body, "spec." + path.replace("__", "."), value)
    return parse(body)


def create_fit(spec: Spec) -> Fit:
    """The small checkpoint in the memory of `spec`."""
    return judge(spec, CHECKPOINT)


def pod_body(name: str = "demo-1", **status: Any) -> dict[str, Any]:
    """A live pod that serves, unless `status` says otherwise."""
    return {
        "metadata": {"name": name, "uid": f"uid-{name}", "labels": {INSTANCE_LABEL: "demo"}},
        "status": {
            "podIP": "10.0.0.7",
            "startTime": "2025-10-09T08:00:00Z",
            "conditions": [{"type": "Ready", "status": "True"}],
            **status,
        },
    }


def create_pod(name: str = "demo-1", **status: Any) -> Pod:
    """The pod as a pass sees it."""
    return pod_of(pod_body(name, **status), NOW)


def create_config(**changes: Any) -> RuntimeConfig:
    """What a pod at epoch 1, cap 4 and the valid object's targets answers."""
    values = {
        "epoch": 1, "cap": 4, "max_num_batched_tokens": 2048,
        "slo": Slo(500.0, 50.0), "overload": "Queue", "ceiling": 64, "running": 0,
        "waiting": Waiting(), "boot_id": "boot-1", "scheduling_policy": "deadline",
        "hold_share": 1.0, **changes,
    }  # fmt: skip
    return RuntimeConfig(**values)


def create_evidence(**changes: Any) -> Evidence:
    """Evidence of a pod that has seen no request."""
    memory = MemoryReport({"weights_bytes": 100}, {"weights_bytes": 110}, 4096)
    values = {
        "boot_id": "boot-1", "started_s": NOW - 600, "ticks": [],
        "lengths": Lengths(0, 0, 0), "memory": memory, **changes,
    }  # fmt: skip
    return Evidence(**values)


def create_tick(seq: int, **changes: Any) -> Tick:
    """A closed tick of 2 s in which nothing happened, at epoch 1 and cap 4, ending after NOW."""
    values = {
        "seq": seq, "t_s": NOW + 2 * seq, "epoch": 1, "boot_id": "boot-1", "settled": True,
        "cap": 4, "arrivals": 0, "refused": 0, "finished": 0, "good": 0, "smooth": 0,
        "ttft": FirstTokens(), "itl": TokenGaps(), "e2e": Requests(), "steps": 0, "decodes": 0,
        "prefill_tokens": 0, "generated_tokens": 0, "busy_s": 0.0, "throttled_s": 0.0,
        "running": 0, "max_running": 0, "waiting": Waiting(), **changes,
    }  # fmt: skip
    return Tick(**values)


def create_scrape(**changes: Any) -> Scrape:
    """What is held of a pod that answers."""
    return Scrape(create_evidence(), create_config(**changes), NOW)


def create_observed(service: InferenceService, **changes: Any) -> Observed:
    """Nothing there yet, unless `changes` says otherwise."""
    observed = Observed(
        live={},
        pods=(),
        scrapes={},
        fit=create_fit(service.spec),
        token="secret-canary",
        previous={},
        runtime=None,
        accepted={},
        deleted=(),
        unsaved_s=math.inf,
    )
    return replace(observed, **changes)
