"""The operator's ports answer on the pod's loopback, where `kubectl port-forward` arrives."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
from integration.apiserver import ApiServer
from integration.operator_runs import administrator
from sluice.processes import free_ports
from sluice_cluster.shell import tail, wait_until


@pytest.mark.parametrize(
    ("pod_ip", "others"), [("127.0.0.77", ["127.0.0.1", "127.0.0.77"]), ("::1", ["[::1]"])]
)
def test_metrics_and_liveness_are_on_all_addresses_of_the_pods_family(
    apiserver: ApiServer, tmp_path: Path, pod_ip: str, others: list[str]
) -> None:
    metrics, liveness = free_ports(2)
    command = [
        sys.executable, "-m", "sluice_operator", "--worker-image=registry.invalid/worker:1",
        f"--pod-ip={pod_ip}", f"--metrics-port={metrics}", f"--liveness-port={liveness}",
    ]  # fmt: skip
    environment = {**os.environ, "KUBECONFIG": str(apiserver.kubeconfig)}
    paths = (f"{metrics}/metrics", f"{liveness}/healthz")
    urls = [f"http://{host}:{path}" for host in others for path in paths]

    def answer() -> bool:
        try:
            return all(httpx.get(url, trust_env=False, timeout=5).is_success for url in urls)
        except httpx.TransportError:
            return False

    log = tmp_path / "operator.log"
    with administrator(apiserver), log.open("wb") as output:
        process = subprocess.Popen(command, env=environment, stdout=output, stderr=output)
        try:
            wait_until("its ports", answer, 30.0, why_not=lambda: tail(log))
        finally:
            process.terminate()
            process.wait(timeout=20)
