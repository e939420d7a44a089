"""An engine of another maker that hangs within its first minute, on a real kubelet."""

import time
from collections.abc import Iterator
from typing import Any

import pytest
from e2e.kit import Cluster
from sluice.kube import KubeError

NAME = "e2e-hung"
RESTARTED_S = 128
"""Most seconds from the hang to the engine's next start."""
ENGINE = (
    "import signal as g,subprocess as s,sys;"
    "p=s.Popen([sys.executable,'-m','http.server','8100','--bind','127.0.0.1','-d','/tmp']);"
    "g.signal(15,lambda *_:p.terminate());sys.exit(p.wait())"
)
"""A server behind a process that waits for it: the first of a container takes no SIGSTOP."""
pytestmark = [pytest.mark.timeout(300)]


@pytest.fixture
def serving(cluster: Cluster) -> Iterator[Cluster]:
    """A Ready service of a Custom engine, whose drain may take 200 s."""
    cluster.delete(NAME)
    cluster.apply(
        NAME,
        "demo",
        engine={
            "name": "Custom",
            "image": cluster.operator_image,
            "command": ["python3", "-c", ENGINE],
            "port": 8100,
            "healthPath": "/",
        },
        scaling={"maxReplicas": 1},
        drain={"timeout": "200s"},
    )
    cluster.wait_condition(NAME, "Ready", "True")
    yield cluster
    cluster.delete(NAME)


def test_a_hung_engine_is_named_and_restarted_and_its_gate_is_not(serving: Cluster) -> None:
    serving.signal_engine(NAME, "SIGSTOP", container="engine", word="http.server")
    stopped_s = time.monotonic()
    ready = serving.wait_condition(NAME, "Ready", "False", 60)
    assert ready["reason"] == "Hung", ready
    assert "the engine process is hung: no sign of life since 2" in ready["message"]
    while _containers(serving)["engine"]["restartCount"] == 0:
        assert time.monotonic() - stopped_s < RESTARTED_S, _containers(serving)
        time.sleep(1)
    assert _containers(serving)["engine"]["lastState"]["terminated"]["exitCode"] == 137
    serving.wait_condition(NAME, "Ready", "True", 60)
    seen = {name: one["restartCount"] for name, one in _containers(serving).items()}
    assert seen == {"gate-image": 0, "engine": 1, "gate": 0}


def _containers(cluster: Cluster) -> dict[str, Any]:
    pods = cluster.kube.pods(NAME)
    if len(pods) != 1:
        raise KubeError(f"{len(pods)} pods of {NAME}")
    status = pods[0]["status"]
    told = [*status.get("initContainerStatuses", []), *status.get("containerStatuses", [])]
    return {one["name"]: one for one in told}
