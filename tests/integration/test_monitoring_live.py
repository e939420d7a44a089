"""Dashboards and alerts with a real Prometheus, operator and worker: each query has series, and each
alert fires by its fault and resolves. `e2e/test_monitoring.py` does so on pods."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import httpx
import prometheus
import pytest
from integration import test_operator_worker as workers
from integration.apiserver import ApiServer, free_ports
from integration.operator_runs import (
    Namespace,
    OperatorProcess,
    create_demo,
    running_operator,
    settle,
    write_model,
)
from prometheus import Prometheus, every_query_has_series
from unit.operator.batches import valid_batch
from unit.operator.objects import changed, valid_object

models, space = workers.models, workers.space
ENGINE = "sluice_worker.engine.process"
SLO = {"percentile": "90", "timeToFirstToken": "30s", "interTokenLatency": "30s"}
WINDOWS = {"15m": "3s"}
pytestmark = [pytest.mark.timeout(300)]


@dataclass(frozen=True)
class Scene:
    """What is watched, and who watches."""

    space: Namespace
    operator: OperatorProcess
    worker: workers.Worker
    watch: Prometheus

    @property
    def labels(self) -> dict[str, str]:
        return {"namespace": self.space.name, "name": "demo"}

    def ask(self, num: int, **headers: str) -> None:
        """`num` requests, all of which are answered."""
        body = {"model": "demo", "prompt": "def f(x):", "max_tokens": 4}
        url = f"http://{self.worker.ip}:8000/v1/completions"
        with httpx.Client(timeout=60, trust_env=False) as client, ThreadPoolExecutor(8) as pool:
            answers = pool.map(lambda _: client.post(url, json=body, headers=headers), range(num))
            assert {answer.status_code for answer in answers} == {200}

    def signal(self, word: str, number: int) -> None:
        """Signal the worker's process with `word` in its command."""
        for pid in filter(str.isdigit, os.listdir("/proc")):
            try:
                command = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
                told = Path(f"/proc/{pid}/environ").read_text()
            except OSError:  # it has just ended
                continue
            if word in command and f"SCENE={self.space.name}" in told:
                os.kill(int(pid), number)


@pytest.fixture
def scene(
    apiserver: ApiServer,
    space: Namespace,
    models: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[Scene]:
    """One service with one pod, scraped from its start."""
    if why := prometheus.lacks():
        pytest.skip(why)
    write_model(models / "huge", layers=80, total_size=140 << 30)
    create_demo(space, slo=SLO, scaling={"maxReplicas": 1}, hardware__memory="3Gi")
    monkeypatch.setenv("SCENE", space.name)
    with running_operator(apiserver, models, tmp_path / "operator.log", space.name) as operator:
        settle(operator, space)
        with workers.running_worker(space, models, tmp_path / "worker") as worker:
            [port] = free_ports(1)
            pod = {"namespace": space.name, "name": "demo", "pod": "demo-1"}
            jobs = [
                {"job_name": "worker", "static_configs": [
                    {"targets": [f"{worker.ip}:8001"], "labels": pod}]},
                {"job_name": "operator", "honor_labels": True, "static_configs": [
                    {"targets": [f"127.0.0.1:{operator.metrics_port}"]}]},
            ]  # fmt: skip
            (tmp_path / "prometheus").mkdir()
            with prometheus.running(jobs, tmp_path / "prometheus", port, WINDOWS) as watch:
                yield Scene(space, operator, worker, watch)


def test_each_query_has_series_and_alerts_fire_by_their_faults_and_resolve(scene: Scene) -> None:
    def is_heard() -> bool:
        return bool(scene.space.condition("MetricsAvailable").get("status") == "True")

    scene.operator.wait("evidence", is_heard)
    _a_batch_waits_for_a_service_that_is_not_there(scene)
    _late_requests_burn_both_windows(scene)
    _an_object_asks_too_much(scene)
    _a_pod_does_not_answer_the_operator(scene)
    _an_engine_is_wedged_and_the_operator_is_gone(scene)


def _a_batch_waits_for_a_service_that_is_not_there(scene: Scene) -> None:
    body = changed(valid_batch("many"), "metadata.namespace", scene.space.name)
    body = changed(body, "spec.serviceRef", {"name": "nobody"})
    scene.space.create("inferencebatches", body)
    scene.watch.fires("SluiceBatchNotMoving", 30, name="many")


def _late_requests_burn_both_windows(scene: Scene) -> None:
    targets = {**scene.labels, "target": "timeToFirstToken"}
    edit = ("inferenceservices", "demo")
    scene.space.patch(*edit, {"spec": {"slo": {"timeToFirstToken": "1ms"}}})
    scene.operator.wait("the target", lambda: scene.worker.config()["slo"]["ttft_ms"] == 1.0)
    scene.ask(40)
    scene.ask(4, **{"x-slo-class": "background"})
    scene.watch.fires("SluiceTargetBurningFast", 30, **targets)
    scene.watch.fires("SluiceTargetBurningSlow", 30, **targets)
    every_query_has_series(scene.watch, scene.space.name, "demo", 30)
    scene.space.delete("inferencebatches", "many")
    scene.watch.resolves("SluiceBatchNotMoving", 30, name="many")
    scene.space.patch(*edit, {"spec": {"slo": {"timeToFirstToken": "30s"}}})
    scene.operator.wait("the target", lambda: scene.worker.config()["slo"]["ttft_ms"] == 30e3)
    scene.ask(100)
    scene.watch.resolves("SluiceTargetBurningFast", 30, **targets)
    scene.watch.resolves("SluiceTargetBurningSlow", 30, **targets)


def _an_object_asks_too_much(scene: Scene) -> None:
    body = changed(valid_object("large"), "metadata.namespace", scene.space.name)
    body = changed(body, "spec.model.uri", "file:///models/huge")
    scene.space.create("inferenceservices", body)
    scene.watch.fires("SluiceObjectStalled", 30, name="large", reason="InsufficientMemory")
    scene.space.delete("inferenceservices", "large")
    scene.watch.resolves("SluiceObjectStalled", 30, name="large")


def _a_pod_does_not_answer_the_operator(scene: Scene) -> None:
    """No kubelet is here, so the pod stays Ready."""
    scene.signal("sluice_worker", signal.SIGSTOP)
    scene.watch.fires("SluiceNoEvidence", 60, reason="MajoritySilent", **scene.labels)
    scene.signal("sluice_worker", signal.SIGCONT)
    scene.watch.resolves("SluiceNoEvidence", 60, **scene.labels)


def _an_engine_is_wedged_and_the_operator_is_gone(scene: Scene) -> None:
    scene.signal(ENGINE, signal.SIGSTOP)
    scene.operator.process.send_signal(signal.SIGSTOP)
    scene.watch.fires("SluicePodWedged", 60, **scene.labels)
    scene.watch.fires("SluiceOperatorDown", 60)
    scene.signal(ENGINE, signal.SIGCONT)
    scene.operator.process.send_signal(signal.SIGCONT)
    scene.watch.resolves("SluicePodWedged", 60, **scene.labels)
    scene.watch.resolves("SluiceOperatorDown", 60)
