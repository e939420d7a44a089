"""Makes ticks, pods and observations for tests that need no world."""

from collections.abc import Iterable
from typing import Any

import msgspec
from sluice_core.contract import (
    Causes,
    Evidence,
    FirstTokens,
    Lengths,
    MemoryReport,
    Requests,
    RuntimeConfig,
    SchedulingPolicy,
    Slo,
    StepModel,
    Tick,
    TokenGaps,
    Waiting,
)
from sluice_operator.tuner import CapLimits, Observation, PodView, Targets

TARGETS = Targets("99", ttft_ms=500, itl_ms=50, e2e_ms=None, window_s=600)
LIMITS = CapLimits(ceiling=64, min_num_seqs=1, min_replicas=1, max_replicas=4)


def tick(seq: int, **changes: Any) -> Tick:
    """A clean tick at second 2 * seq: 10 requests, 1,000 gaps at the cap of 8."""
    usual = Tick(
        seq=seq,
        t_s=2.0 * seq,
        epoch=1,
        boot_id="boot",
        settled=True,
        cap=8,
        arrivals=10,
        refused=0,
        finished=10,
        good=10,
        smooth=10,
        ttft=FirstTokens(n=10, sketch={250: 10}),
        itl=gaps(1000, 0),
        e2e=Requests(n=10, sketch={400: 10}),
        steps=125,
        decodes=1000,
        prefill_tokens=640,
        generated_tokens=1000,
        busy_s=2.0,
        throttled_s=0.0,
        running=8,
        max_running=8,
        waiting=Waiting(),
    )
    return msgspec.structs.replace(usual, **changes)


def gaps(n: int, over: int) -> TokenGaps:
    """`n` gaps at the cap, `over` of them over target."""
    return TokenGaps(n, over, 0, n, over, {150: n - over, 210: over})


def late(n: int, over: int, cause: str = "cap") -> FirstTokens:
    """`n` first tokens, `over` of them over target and booked to `cause`."""
    return FirstTokens(n, over, Causes(**{cause: over}), {250: n - over, 350: over})


def pod(name: str, ticks: Iterable[Tick], **changes: Any) -> PodView:
    """A ready pod with `ticks` that acknowledged epoch 1 at cap 8."""
    epoch = changes.pop("epoch", 1)
    model: StepModel | None = changes.pop("model", None)
    evidence = Evidence(
        boot_id="boot",
        started_s=0.0,
        ticks=list(ticks),
        lengths=Lengths(164.0, 10.0, 100),
        memory=MemoryReport({}, {}, 100_000),
        step_model=model,
    )
    policy: SchedulingPolicy = changes.pop("policy", "fcfs")
    config = RuntimeConfig(
        epoch, 8, 2048, Slo(500, 50), "Queue", 64, 8, Waiting(), "boot", scheduling_policy=policy,
        chunk_is=changes.pop("chunk_is", "live"),
    )  # fmt: skip
    usual: dict[str, Any] = {
        "name": name,
        "ready": True,
        "terminating": False,
        "evidence": evidence,
        "config": config,
        "started_s": 0.0,
    }
    return PodView(**(usual | changes))


def observation(*pods: PodView, **changes: Any) -> Observation:
    """Of `pods`, at the end of their newest tick, with cap 8 of epoch 1."""
    ends = [view.evidence.ticks[-1].t_s for view in pods if view.evidence and view.evidence.ticks]
    usual: dict[str, Any] = {
        "now": max(ends, default=0.0),
        "targets": TARGETS,
        "limits": LIMITS,
        "cap": 8,
        "epoch": 1,
        "replicas": max(1, len(pods)),
        "pods": pods,
    }
    return Observation(**(usual | changes))
