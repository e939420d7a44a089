"""Claims on how often a status is written: what is acted on at once, what is measured in turn."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import httpx
import pytest
from sluice_core.contract import FirstTokens, encode
from sluice_operator.children.runtime import DecidedRuntime
from sluice_operator.loop.dependencies import Dependencies
from sluice_operator.loop.reconcile import Reconciler
from sluice_operator.metrics import Metrics
from sluice_operator.plan.plan import plan
from sluice_operator.status.batch_schema import BATCH_STATUS
from sluice_operator.status.schema import STATUS as STATUS_SCHEMA
from sluice_operator.status.write_limiter import (
    MEASURED,
    MEASURED_OF_BATCH,
    PERIOD_S,
    WRITES_PER_S,
    WritePace,
    WriteTurns,
    acted_on,
)
from unit.operator.loop.test_reconciler import Children, Store
from unit.operator.objects import changed, valid_object
from unit.operator.observations import (
    NOW,
    SETTINGS,
    create_config,
    create_evidence,
    create_observed,
    create_pod,
    create_scrape,
    create_service,
    create_tick,
    pod_body,
)

BUSY = 100


@dataclass
class Clock:
    """Seconds since the start, moved by the test."""

    now_s: float = 0.0

    def __call__(self) -> float:
        return self.now_s


def measured(count: int, **acted: Any) -> dict[str, Any]:
    """A status of an object with traffic."""
    said = {"type": "SLOMet", "status": "True", "reason": "TargetsHold", "message": f"n={count}"}
    return {"load": {"tokens": count}, "conditions": [said], **acted}


def count_writes(num_objects: int, seconds: int) -> tuple[Counter[int], list[float], float]:
    """Writes by object, their times, and the oldest status that anybody could see after a while."""
    clock = Clock()
    turns = WriteTurns(clock)
    paces = [WritePace(turns) for _ in range(num_objects)]
    live: list[dict[str, Any]] = [measured(0)] * num_objects
    seen_s = [0.0] * num_objects
    writes: Counter[int] = Counter()
    times, oldest_s = [], 0.0
    for tick in range(1, seconds // 2):
        for index, pace in enumerate(paces):
            clock.now_s = 2 * tick + 2 * index / num_objects
            wanted = measured(tick)
            if tick * 2 > seconds / 2:
                oldest_s = max(oldest_s, clock.now_s - seen_s[index])
            if pace.wait_s(wanted, live[index]) > 0:
                continue
            live[index], seen_s[index] = wanted, clock.now_s
            pace.wrote()
            writes[index] += 1
            times.append(clock.now_s)
    return writes, times, oldest_s


def test_a_hundred_objects_with_traffic_share_five_writes_a_second_fairly() -> None:
    """Each look was a write: fifty a second."""
    writes, times, oldest_s = count_writes(BUSY, 120)
    assert len(times) <= 120 * WRITES_PER_S
    # Each looks every two seconds, and finds its turn up to two seconds old.
    assert max(Counter(at // 10 for at in times).values()) <= 12 * WRITES_PER_S
    assert len(writes) == BUSY
    assert max(writes.values()) - min(writes.values()) <= 1
    assert oldest_s <= BUSY / WRITES_PER_S + 4


def test_a_few_objects_are_seen_at_most_ten_seconds_late() -> None:
    writes, _, oldest_s = count_writes(3, 120)
    assert max(writes.values()) <= 120 / PERIOD_S + 1
    assert oldest_s <= PERIOD_S + 2


@pytest.mark.parametrize(
    "acted",
    [
        {"observedGeneration": 2},
        {"replicas": 2},
        {"readyReplicas": 2},
        {"batching": {"cap": 5}},
        {"batching": {"epoch": 5}},
        {"batching": {"reason": "Headroom"}},
        {"scaling": {"history": [{"from": 1, "to": 2}]}},
        {"slo": {"timeToFirstToken": {"verdict": "Breach"}}},
        {"pods": {"silent": ["demo-1"]}},
        {"conditions": [{"type": "SLOMet", "status": "False", "reason": "TargetMissed"}]},
        {"conditions": [{"type": "Ready", "status": "True", "reason": "S", "message": "other"}]},
    ],
)
def test_what_is_acted_on_waits_for_no_turn(acted: dict[str, Any]) -> None:
    clock = Clock()
    pace = WritePace(WriteTurns(clock, free_s=1000.0))
    pace.wrote()
    assert pace.wait_s(measured(2), measured(1)) > 0
    assert pace.wait_s({**measured(2), **acted}, measured(1)) == 0


def test_a_turn_that_was_not_used_is_not_kept() -> None:
    clock = Clock()
    turns = WriteTurns(clock)
    first, second = WritePace(turns), WritePace(turns)
    assert first.wait_s(measured(1), measured(0)) == 0
    clock.now_s = 1000.0
    waits = [pace.wait_s(measured(2), measured(0)) for pace in (second, first)]
    assert waits == pytest.approx([0.0, 1 / WRITES_PER_S])


def test_every_measured_field_is_in_the_schema() -> None:
    def check(measured: Mapping[str, Any], schema: Mapping[str, Any]) -> None:
        for name, below in measured.items():
            assert name in schema["properties"]
            if below:
                check(below, schema["properties"][name])

    check(MEASURED, STATUS_SCHEMA)
    check(MEASURED_OF_BATCH, BATCH_STATUS)


def test_a_pass_reads_nothing_of_its_own_status_but_what_was_written_at_once() -> None:
    """So nothing is lost with a measurement that a stopped operator has not written."""
    service = create_service()
    scrapes = {"uid-demo-1": create_scrape()}
    observed = create_observed(
        service, pods=(create_pod(),), scrapes=scrapes, runtime=DecidedRuntime(1, 4, 1)
    )
    before = plan(service, observed, SETTINGS, NOW).status
    full = replace(observed, previous=before)
    cut = replace(observed, previous=acted_on(before))
    assert plan(service, cut, SETTINGS, NOW + 2) == plan(service, full, SETTINGS, NOW + 2)


class Served(Store):
    """A store whose object has a pod with traffic, and whose writes bear versions."""

    def __init__(self) -> None:
        super().__init__()
        self.pods = [pod_body()]

    async def apply(self, manifest: Any, subresource: str = "") -> dict[str, Any]:
        live = await super().apply(manifest, subresource)
        if subresource:
            live["metadata"]["resourceVersion"] = str(10_000 + self.num_writes)
            live["spec"] = pace_object()["spec"]
            live["metadata"]["generation"] = 1
        return live


def pace_object() -> dict[str, Any]:
    body = changed(valid_object(), "spec.model", {"uri": "pvc://models/x"})
    body["metadata"] |= {"uid": "uid-1", "generation": 1, "resourceVersion": "1"}
    return body


async def test_a_reconciler_writes_the_traffic_of_a_minute_six_times(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Every tick brings new counts; before, each of the thirty looks was a write."""
    clock, store = Clock(), Served()
    monkeypatch.setattr("sluice_operator.loop.reconcile.time.time", lambda: NOW + clock.now_s)

    def answer(request: httpx.Request) -> httpx.Response:
        if "runtime_config" in request.url.path:
            return httpx.Response(200, stream=httpx.ByteStream(encode(create_config())))
        seqs = range(int(clock.now_s / 2))
        ticks = [create_tick(s, arrivals=4, finished=4, ttft=FirstTokens(n=4)) for s in seqs]
        return httpx.Response(200, stream=httpx.ByteStream(encode(create_evidence(ticks=ticks))))

    client = httpx.AsyncClient(transport=httpx.MockTransport(answer))
    context = Dependencies(
        SETTINGS, store, client, Metrics(), Children(store), turns=WriteTurns(clock)
    )
    reconciler = Reconciler(context, "default", "demo")
    reconciler.see(pace_object())
    for _ in range(3):
        await reconciler.reconcile()
    settled = len(store.statuses)
    arrivals = set()
    for _ in range(30):
        clock.now_s += 2
        assert await reconciler.reconcile() <= SETTINGS.tick_s
        arrivals.add(json.dumps(store.statuses[-1].get("load")))
    changes = len({json.dumps(acted_on(s)) for s in store.statuses[settled:]})
    assert len(store.statuses) - settled <= 60 / PERIOD_S + changes
    assert len(arrivals) >= 60 / PERIOD_S, "none is older than ten seconds"
