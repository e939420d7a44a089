"""A real operator and a real worker: what is decided reaches the engine, live and after restarts.

There is no kubelet here: the test makes the Pod object and starts the worker with the arguments,
the token and the runtime directory that the Deployment, the Secret and the ConfigMap ask for.
"""

from __future__ import annotations

import base64
import contextlib
import os
import secrets
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
from integration.apiserver import TIED, ApiServer
from integration.operator_runs import (
    Namespace,
    OperatorProcess,
    administrator,
    create_demo,
    create_namespace,
    running_operator,
    settle,
)
from sluice_cluster.shell import tail, wait_until

ROOT = Path(__file__).parents[2]
PORTS = (8000, 8001)
"""Where the operator looks for a pod's API and its admin port, whatever the address."""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo model where file:///models/demo points."""
    folder = tmp_path_factory.mktemp("models")
    (folder / "demo").mkdir()
    for path in (ROOT / "examples/model").iterdir():
        if path.suffix in {".json", ".safetensors"}:
            (folder / "demo" / path.name).write_bytes(path.read_bytes())
    return folder


@pytest.fixture
def space(apiserver: ApiServer) -> Iterator[Namespace]:
    with administrator(apiserver) as client:
        yield create_namespace(client, f"worker-{os.urandom(4).hex()}")


@dataclass(frozen=True, slots=True)
class Worker:
    """One `sluice-worker` in the place of a pod."""

    token: str
    log: Path
    ip: str

    def config(self) -> dict[str, Any]:
        """Its effective configuration; empty while it does not answer."""
        headers = {"Authorization": f"Bearer {self.token}"}
        url = f"http://{self.ip}:8001/v1/runtime_config"
        try:
            answer = httpx.get(url, headers=headers, trust_env=False)
        except httpx.TransportError:
            return {}
        config: dict[str, Any] = answer.json() if answer.is_success else {}
        return config


def free_address() -> str:
    """A loopback address of which nobody has the ports."""
    while True:
        address = ".".join(map(str, [127, *(secrets.randbelow(254) + 1 for _ in range(3))]))
        with contextlib.ExitStack() as stack, contextlib.suppress(OSError):
            for port in PORTS:
                stack.enter_context(socket.socket()).bind((address, port))
            return address


@contextlib.contextmanager
def running_worker(
    space: Namespace, models: Path, folder: Path, module: str = "sluice_worker"
) -> Iterator[Worker]:
    """Start what the Deployment asks for, and show it to the operator as a ready pod. `module`: of
    its first container."""
    container = space.get("deployments", "demo")["spec"]["template"]["spec"]["containers"][0]
    ip = free_address()
    token = base64.b64decode(space.get("secrets", "demo-admin")["data"]["token"]).decode()
    folder.mkdir()
    (folder / "token").write_text(token)
    (folder / "runtime").mkdir()
    for name, value in space.get("configmaps", "demo-runtime")["data"].items():
        (folder / "runtime" / name).write_text(value)
    replaced = {
        "/models/": f"{models}/",
        "/etc/sluice/admin": str(folder),
        "/etc/sluice/runtime": str(folder / "runtime"),
        "--host=": f"--host={ip} --was=",
    }
    arguments = [_replace(argument, replaced).partition(" ")[0] for argument in container["args"]]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    log = folder / "worker.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*TIED, sys.executable, "-m", module, *arguments],
            env=environment,
            stdout=output,
            stderr=output,
        )
    try:
        worker = Worker(token, log, ip)
        wait_until("the worker", lambda: bool(worker.config()), 90.0, why_not=lambda: tail(log))
        show_pod(space, ip)
        yield worker
    finally:
        process.terminate()
        try:
            process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _replace(argument: str, replaced: dict[str, str]) -> str:
    for old, new in replaced.items():
        argument = argument.replace(old, new)
    return argument


def show_pod(space: Namespace, ip: str) -> None:
    """A ready Pod object of the Deployment, as a ReplicaSet and a kubelet would leave it."""
    template = space.get("deployments", "demo")["spec"]["template"]
    name = f"demo-{os.urandom(4).hex()}"
    meta = {"name": name, "labels": template["metadata"]["labels"]}
    spec = {"containers": [{"name": "worker", "image": "none"}]}
    space.create("pods", {"apiVersion": "v1", "kind": "Pod", "metadata": meta, "spec": spec})
    ready = {"type": "Ready", "status": "True"}
    addresses = {"podIP": ip, "podIPs": [{"ip": ip}]}
    space.patch("pods", name, {"status": {**addresses, "conditions": [ready]}}, "status")


def _status(space: Namespace) -> dict[str, Any]:
    status: dict[str, Any] = space.get("inferenceservices", "demo")["status"]
    return status


def test_decisions_reach_the_engine_live_and_survive_both_restarts(
    apiserver: ApiServer, space: Namespace, models: Path, tmp_path: Path
) -> None:
    create_demo(space, hardware__memory="3Gi")
    with running_operator(apiserver, models, tmp_path / "1.log", space.name) as operator:
        settle(operator, space)
        with running_worker(space, models, tmp_path / "worker1") as worker:
            _the_predicted_cap_is_adopted(operator, space, worker)
            _edited_targets_arrive(operator, space, worker)
            _an_edited_order_arrives(operator, space, worker)
            _an_edited_share_of_a_hold_arrives(operator, space, worker)
            _a_lowered_maximum_arrives(operator, space, worker)
            operator.kill()
            _calm_under_a_new_operator(apiserver, space, models, tmp_path / "2.log", worker)
        for pod in space.all("pods"):
            space.client.delete(
                space.path("pods", pod["metadata"]["name"]), params={"gracePeriodSeconds": 0}
            )
        with running_worker(space, models, tmp_path / "worker2") as second:
            alone = second.config()  # before any operator is there
            assert alone["cap"] == 3
            assert alone["slo"] == {"ttft_ms": 900.0, "itl_ms": 50.0, "e2e_ms": None}
            assert alone["hold_share"] == 0.25
            with running_operator(apiserver, models, tmp_path / "3.log", space.name) as third:
                third.await_passes(4)
                assert second.config()["slo"] == alone["slo"]
                _traffic_is_told_in_turn(third, space, second)


def _the_predicted_cap_is_adopted(
    operator: OperatorProcess, space: Namespace, worker: Worker
) -> None:
    operator.wait("the pod to be served", lambda: space.condition("Ready")["status"] == "True")
    operator.wait("a cap", lambda: "cap" in _status(space)["batching"])
    operator.wait("the targets", lambda: worker.config()["slo"]["itl_ms"] == 50.0)
    cap = int(space.get("configmaps", "demo-runtime")["data"]["cap"])
    assert cap == worker.config()["cap"]
    assert worker.config()["epoch"] >= 1
    operator.wait("metrics", lambda: space.condition("MetricsAvailable")["status"] == "True")


def _edited_targets_arrive(operator: OperatorProcess, space: Namespace, worker: Worker) -> None:
    boot = worker.config()["boot_id"]
    space.patch("inferenceservices", "demo", {"spec": {"slo": {"timeToFirstToken": "900ms"}}})
    operator.wait("the edited target", lambda: worker.config()["slo"]["ttft_ms"] == 900.0)
    assert worker.config()["boot_id"] == boot


def _an_edited_order_arrives(operator: OperatorProcess, space: Namespace, worker: Worker) -> None:
    """As the targets do: no pod is new, and one that starts later finds it."""
    before, pods = worker.config(), space.get("deployments", "demo")["spec"]["template"]

    def has(policy: str) -> bool:  # a default is left out of the answer
        return bool(worker.config().get("scheduling_policy", "fcfs") == policy)

    assert has("deadline")
    for order, policy in (("FCFS", "fcfs"), ("Deadline", "deadline")):
        space.patch("inferenceservices", "demo", {"spec": {"batching": {"order": order}}})
        operator.wait(order, partial(has, policy))
        assert space.get("configmaps", "demo-runtime")["data"]["scheduling_policy"] == policy
    same = ("boot_id", "epoch", "cap")
    assert [worker.config()[name] for name in same] == [before[name] for name in same]
    assert space.get("deployments", "demo")["spec"]["template"] == pods


def _an_edited_share_of_a_hold_arrives(
    operator: OperatorProcess, space: Namespace, worker: Worker
) -> None:
    before = worker.config()
    assert before["hold_share"] == 1.0
    space.patch("inferenceservices", "demo", {"spec": {"slo": {"holdShare": "0.25"}}})
    operator.wait("the share", lambda: worker.config()["hold_share"] == 0.25)
    same = ("boot_id", "epoch", "cap", "slo")
    assert [worker.config()[name] for name in same] == [before[name] for name in same]


def _a_lowered_maximum_arrives(operator: OperatorProcess, space: Namespace, worker: Worker) -> None:
    before, pods = worker.config()["epoch"], space.get("deployments", "demo")["spec"]["template"]
    space.patch("inferenceservices", "demo", {"spec": {"batching": {"maxNumSeqs": 3}}})
    operator.wait("the lower cap", lambda: worker.config()["cap"] == 3)
    assert worker.config()["epoch"] == before + 1
    data = space.get("configmaps", "demo-runtime")["data"]
    assert (data["cap"], data["epoch"]) == ("3", str(before + 1))
    operator.wait("its event", lambda: bool(space.events("WithinLimits")))
    assert space.get("deployments", "demo")["spec"]["template"] == pods
    assert operator.metric("sluice_operator_decisions_total", reason="WithinLimits") == 1


def _traffic_is_told_in_turn(operator: OperatorProcess, space: Namespace, worker: Worker) -> None:
    """Each look brings other numbers, and not each of them a write of the status."""
    passes, writes = "sluice_operator_passes_total", "sluice_operator_api_requests_total"
    statuses = {"verb": "PATCH", "kind": "InferenceService"}
    before = operator.metric(passes), operator.metric(writes, **statuses)
    request = {"model": "demo", "prompt": "import ", "max_tokens": 8}
    with httpx.Client(base_url=f"http://{worker.ip}:8000", trust_env=False, timeout=30) as client:
        while operator.metric(passes) < before[0] + 12:
            client.post("/v1/completions", json=request).raise_for_status()
    assert operator.metric(writes, **statuses) - before[1] <= 8
    operator.wait("the numbers", lambda: _status(space)["load"].get("tokens", 0) > 8)


def _calm_under_a_new_operator(
    apiserver: ApiServer, space: Namespace, models: Path, log: Path, worker: Worker
) -> None:
    config = worker.config()
    with running_operator(apiserver, models, log, space.name) as second:
        second.await_passes(6)  # what was only measured waits for ten seconds
        assert worker.config()["epoch"] == config["epoch"]
        for reason in (
            "Unreachable",
            "Refused",
            "Malformed",
        ):  # a worker that is stopped for 2 s may be late
            assert second.metric("sluice_operator_scrape_failures_total", reason=reason) == 0

        def calm() -> bool:
            """Nothing is written in four passes, unless one of them was late itself."""
            late = second.metric("sluice_operator_scrape_failures_total", reason="Timeout")
            before = space.versions(), second.writes()
            second.await_passes(4)
            after = second.metric("sluice_operator_scrape_failures_total", reason="Timeout")
            assert (space.versions(), second.writes()) == before or after > late
            return after == late

        second.wait("four passes without a late answer", calm, 120.0)
