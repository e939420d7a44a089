"""An engine that hangs within its first minute, another maker's and ours, on a real kubelet."""

import time
from collections.abc import Iterator

import pytest
from e2e.kit import ENGINE, Cluster

OTHER, OURS = "e2e-hung-other", "e2e-hung-ours"
RESTARTED_S = 128
"""Most seconds from the hang to the engine's next start."""
PROGRAM = (
    "import signal as g,subprocess as s,sys;"
    "p=s.Popen([sys.executable,'-m','http.server','8100','--bind','127.0.0.1','-d','/tmp']);"
    "g.signal(15,lambda *_:p.terminate());sys.exit(p.wait())"
)
"""A server behind a process that waits for it: the first of a container takes no SIGSTOP."""
pytestmark = [pytest.mark.timeout(360)]


@pytest.fixture
def serving(cluster: Cluster) -> Iterator[Cluster]:
    """Two Ready services, whose drains may take 200 s."""
    custom = {
        "name": "Custom",
        "image": cluster.operator_image,
        "command": ["python3", "-c", PROGRAM],
        "port": 8100,
        "healthPath": "/",
    }
    for name, engine in ((OTHER, custom), (OURS, {"name": "Sluice"})):
        cluster.delete(name)
        cluster.apply(
            name, "demo", engine=engine, scaling={"maxReplicas": 1}, drain={"timeout": "200s"}
        )
    for name in (OTHER, OURS):
        cluster.wait_condition(name, "Ready", "True")
    yield cluster
    for name in (OTHER, OURS):
        cluster.delete(name)


def test_a_hung_engine_is_named_and_restarted_and_its_gate_is_not(serving: Cluster) -> None:
    serving.signal_engine(OTHER, "SIGSTOP", container="engine", word="http.server")
    serving.signal_engine(OURS, "SIGSTOP", container="worker", word=ENGINE)
    stopped_s = time.monotonic()
    for name in (OTHER, OURS):
        ready = serving.wait_condition(name, "Ready", "False", 60)
        assert ready["reason"] == "Hung", ready
        assert "the engine process is hung: no sign of life since 2" in ready["message"]
    for name, container in ((OTHER, "engine"), (OURS, "worker")):
        while _restarts(serving, name)[container] == 0:
            assert time.monotonic() - stopped_s < RESTARTED_S, serving.status(name)
            time.sleep(1)
        serving.wait_condition(name, "Ready", "True", 60)
    assert _restarts(serving, OTHER) == {"gate-image": 0, "engine": 1, "gate": 0}
    assert _restarts(serving, OURS) == {"worker": 1}


def _restarts(cluster: Cluster, name: str) -> dict[str, int]:
    [pod] = cluster.kube.pods(name)
    status = pod["status"]
    told = [*status.get("initContainerStatuses", []), *status.get("containerStatuses", [])]
    return {one["name"]: one["restartCount"] for one in told}
