"""Alerts whose fault takes minutes to make: each fires by it, and resolves once it is mended."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from e2e.batches import VOLUME, Files, apply, completed, delete, lines, start, wait
from e2e.kit import Cluster
from prometheus import Prometheus
from sluice.kube import NAMESPACE

NAME, LOAD, BATCH, OTHER = "alerts", "alerts-load", "alerts-batch", "alerts-other"
SELF = {"namespace": NAMESPACE, "name": NAME}
CHECKPOINT = "random-60m"
CONFIG = Path(__file__).parents[2] / "examples/models" / CHECKPOINT / "config.json"
pytestmark = [pytest.mark.timeout(600)]


@pytest.fixture
def service(cluster: Cluster) -> Iterator[Cluster]:
    """The name is free, before and after."""
    cluster.delete(NAME)
    yield cluster
    cluster.delete(NAME)


def test_a_target_that_no_cap_holds_is_infeasible_until_it_is_edited(
    service: Cluster, watch: Prometheus
) -> None:
    service.apply(NAME, "demo", slo={"interTokenLatency": "1ms"}, scaling={"maxReplicas": 1})
    service.wait_condition(NAME, "Ready", "True")
    service.start_load(LOAD, NAME, "steady:closed:4:150")
    try:
        watch.fires("SluiceTargetInfeasible", 150, **SELF)
        service.patch(NAME, {"slo": {"interTokenLatency": "10s"}})
        watch.resolves("SluiceTargetInfeasible", 120, **SELF)
    finally:
        service.kube.kubectl("delete", "pod", LOAD)


def test_a_pod_with_another_checkpoint_than_was_planned_is_told(
    service: Cluster, watch: Prometheus
) -> None:
    larger = json.loads(CONFIG.read_text()) | {"num_hidden_layers": 36}
    apply(service, "v1", "ConfigMap", OTHER, data={"config.json": json.dumps(larger)})
    path = f"/models/{CHECKPOINT}/config.json"
    mount = {"name": "other", "mountPath": path, "subPath": "config.json"}
    overlay = {
        "volumes": [{"name": "other", "configMap": {"name": OTHER}}],
        "containers": [{"name": "worker", "volumeMounts": [mount]}],
    }
    engine = {"args": ["--load-format=dummy"]}
    service.apply(NAME, CHECKPOINT, engine=engine, podTemplate={"spec": overlay})
    watch.fires("SluiceMemoryPlanOff", 200, **SELF)
    service.patch(NAME, {"podTemplate": None})
    watch.resolves("SluiceMemoryPlanOff", 200, **SELF)


def test_a_batch_behind_a_stopped_engine_does_not_move(service: Cluster, watch: Prometheus) -> None:
    service.apply(NAME, "demo")
    service.wait_condition(NAME, "Ready", "True")
    files = Files(service)
    files.make()
    files.write("in.jsonl", lines(3000, NAME, 160))
    claim = {"claimName": VOLUME}
    given, to = {**claim, "path": "in.jsonl"}, {**claim, "path": "out"}
    start(service, BATCH, input=given, output=to, serviceRef={"name": NAME})
    try:
        wait(service, BATCH, "some results", 180, lambda status: completed(status) >= 50)
        watch.resolves("SluiceBatchNotMoving", 30, name=BATCH)
        service.signal_engine(NAME, "SIGSTOP")
        try:
            watch.fires("SluiceBatchNotMoving", 60, name=BATCH)
        finally:
            service.signal_engine(NAME, "SIGCONT")
        watch.resolves("SluiceBatchNotMoving", 120, name=BATCH)
    finally:
        delete(service, BATCH)
        files.remove()
