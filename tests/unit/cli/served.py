"""A service under traffic, with the status that a real pass writes of made-up evidence."""

from __future__ import annotations

from typing import Any

from sluice_core.contract import Causes, FirstTokens, Lengths, MemoryReport, StepModel, TokenGaps
from sluice_operator.children.runtime import DecidedRuntime
from sluice_operator.plan.plan import plan
from sluice_operator.pods.scrape import Scrape
from sluice_operator.tuner import Past
from sluice_operator.tuner.types import CapChange, ReplicaChange
from unit.operator.objects import valid_object
from unit.operator.observations import (
    NOW,
    SETTINGS,
    create_config,
    create_evidence,
    create_observed,
    create_pod,
    create_service,
    create_tick,
)

NUM_TICKS = 60
MODEL = StepModel(a=4.0, b=0.5, c=0.001, d=0.05, n=2000, resid_q=1.3)
MEMORY = MemoryReport({"weights_bytes": 100}, {"kv_cache_bytes": 4096 * 2048}, 4096)


def service_under_traffic(
    sigma: float = 60.0, failed: dict[str, int] | None = None, **spec: Any
) -> dict[str, Any]:
    """As the API server holds it. In each tick 4 requests of 50 + 30 tokens; one of 40 is late.
    `failed`: beside them, in each tick."""
    service = create_service(**spec)
    ticks = [
        create_tick(
            seq, arrivals=4, finished=4, good=4, smooth=3, steps=100, decodes=115,
            prefill_tokens=200, generated_tokens=120, busy_s=1.0, running=2, max_running=4,
            ttft=FirstTokens(4, int(seq % 10 == 0), Causes(cap=int(seq % 10 == 0)), {200: 4}),
            itl=TokenGaps(116, 0, sketch={100: 116}), failed=failed or {},
        )
        for seq in range(1, NUM_TICKS + 1)
    ]  # fmt: skip
    now = NOW + 2 * NUM_TICKS + 1
    evidence = create_evidence(
        ticks=ticks, step_model=MODEL, lengths=Lengths(80, sigma, 200), memory=MEMORY
    )
    pod = create_pod()
    past = Past(
        last_change=CapChange(NOW, 2, 4, 1, "Headroom"),
        scale_history=(ReplicaChange(NOW - 60, 2, 1, "LowDemand", 2.0, settled_s=NOW - 50),),
    )
    observed = create_observed(
        service,
        pods=(pod,),
        scrapes={pod.uid: Scrape(evidence, create_config(), now)},
        runtime=DecidedRuntime(1, 4, 1, past),
    )
    body = valid_object()
    for path, value in spec.items():
        *parents, last = path.split("__")
        at = body["spec"]
        for parent in parents:
            at = at.setdefault(parent, {})
        at[last] = value
    body["metadata"] |= {"generation": 3, "uid": "uid-1"}
    return {**body, "status": plan(service, observed, SETTINGS, now).status}
