"""An overlay of the pods, taken by a rolling update beneath clients."""

import json
from typing import Any

import pytest
from e2e.kit import Cluster
from e2e.rolls import NAME, Rolls
from sluice.kube import NAMESPACE

pytestmark = [pytest.mark.timeout(420)]
_WAITS = """
import signal
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
signal.sigwait([signal.SIGTERM])
"""
_READS = "import os; print(os.environ['WORD'], open('/shared/word').read())"


def overlay_of(image: str) -> dict[str, Any]:
    """A label, a variable of a Secret, a volume that an init container fills, and a sidecar."""
    mounts = [{"name": "shared", "mountPath": "/shared"}]
    fills = "open('/shared/word', 'w').write('filled')"
    word = {"secretKeyRef": {"name": "e2e-word", "key": "word"}}
    return {
        "metadata": {"labels": {"team": "e2e"}},
        "spec": {
            "volumes": [{"name": "shared", "emptyDir": {}}],
            "initContainers": [
                {"name": "fill", "image": image, "command": ["python3", "-c", fills],
                 "volumeMounts": mounts},
            ],
            "containers": [
                {"name": "engine", "env": [{"name": "WORD", "valueFrom": word}],
                 "volumeMounts": mounts, "resources": {"requests": {"cpu": "200m"}}},
                {"name": "beside", "image": image, "command": ["python3", "-c", _WAITS]},
            ],
        },
    }  # fmt: skip


def test_an_overlay_comes_by_a_rolling_update_that_loses_no_request(cluster: Cluster) -> None:
    word = {"name": "e2e-word", "namespace": NAMESPACE}
    secret = {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": word,
        "stringData": {"word": "told"},
    }
    cluster.kube.kubectl("apply", "-f", "-", stdin=json.dumps(secret))
    rolls = Rolls(cluster)
    try:
        rolls.start()
        with rolls.loaded():
            rolls.roll({"podTemplate": overlay_of(cluster.operator_image)})
            rolls.roll({"podTemplate": None})
            rolls.roll({"podTemplate": overlay_of(cluster.operator_image)})
        report = rolls.report
        assert (report.num_lost, report.num_sent > 100) == (0, True), str(report)
        for pod in cluster.kube.pods(NAME):
            name = pod["metadata"]["name"]
            assert pod["metadata"]["labels"]["team"] == "e2e"
            worker = next(c for c in pod["spec"]["containers"] if c["name"] == "worker")
            assert worker["resources"]["requests"]["cpu"] == "200m"
            assert worker["resources"]["limits"]["cpu"] == "500m"
            running = {c["name"] for c in pod["status"]["containerStatuses"] if c["ready"]}
            assert running == {"worker", "beside"}
            read = ("exec", "-n", NAMESPACE, name, "-c", "worker", "--", "python3", "-c", _READS)
            assert cluster.kube.kubectl(*read).split() == ["told", "filled"]
    finally:
        cluster.delete(NAME)
        cluster.kube.kubectl("delete", "secret", "-n", NAMESPACE, "e2e-word", "--ignore-not-found")
