"""The chart's monitors, dashboards and alerts on real pods, with a real Prometheus; `helm test`.

`make alerts` makes the slow alerts fire.
"""

import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import prometheus
import pytest
from demo.kube import condition, wait_for
from e2e.kit import SYSTEM, Cluster
from e2e.muted import is_mutable, mute
from prometheus import Prometheus, every_query_has_series
from sluice.kube import NAMESPACE
from sluice.processes import free_ports

NAME, LARGE, BATCH = "e2e-watched", "e2e-watched-large", "e2e-watched-batch"
SELF = {"namespace": NAMESPACE, "name": NAME}
SLO = {"percentile": "90", "timeToFirstToken": "30s", "interTokenLatency": "30s", "window": "10m"}
pytestmark = [pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def served(cluster: Cluster) -> Iterator[Cluster]:
    """A service that is Ready, one whose model is too large, and a batch whose service is not
    there."""
    cluster.delete(NAME)
    cluster.apply(NAME, "demo", slo=SLO, scaling={"maxReplicas": 1})
    cluster.apply(LARGE, "too-large")
    claim = {"claimName": "none", "path": "a"}
    batch = {
        "apiVersion": "sluice.dev/v1alpha1", "kind": "InferenceBatch",
        "metadata": {"name": BATCH, "namespace": NAMESPACE},
        "spec": {"input": claim, "output": claim, "serviceRef": {"name": "nobody"}},
    }  # fmt: skip
    cluster.kube.kubectl("apply", "-f", "-", stdin=json.dumps(batch))
    cluster.wait_condition(NAME, "Ready", "True")
    yield cluster
    cluster.kube.kubectl("delete", "infbatch", BATCH)
    for name in (NAME, LARGE):
        cluster.delete(name)


@pytest.fixture(scope="module")
def watch(served: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    """The Prometheus, once it knows the service."""
    if why := prometheus.lacks():
        pytest.skip(why)
    if not is_mutable(served):
        pytest.skip("this cluster's pods are not on this machine, where Prometheus runs")
    [port] = free_ports(1)
    with prometheus.watching(served.kube, tmp_path_factory.mktemp("prometheus"), port) as one:
        known = f'sluice_cap{{name="{NAME}"}} and on (name) sluice_service_cap'
        wait_for("the first scrapes", 30, lambda: one.series(known) or None)
        yield one


def ask(served: Cluster, num: int, **headers: str) -> None:
    """`num` requests, all of which are answered."""
    body = {"model": NAME, "prompt": "def f(x):", "max_tokens": 4}

    def post(client: httpx.Client, url: str) -> int:
        asked = client.post(f"{url}/v1/completions", json=body, headers=headers)
        return asked.status_code

    clients = httpx.Client(timeout=60)
    with served.kube.service_url(NAME) as url, clients as client, ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda _: post(client, url), range(num)))
    assert set(answers) == {200}


def helm_test(cluster: Cluster) -> str:
    """The log of the pod of `helm test`."""
    return cluster.kube.run("helm", "test", "sluice", "-n", SYSTEM, "--logs", "--timeout", "90s")


def test_helm_test_asks_the_operator_where_nothing_is_served(cluster: Cluster) -> None:
    objects = cluster.kube.get("infs", "--all-namespaces")["items"]
    is_served = any(condition(one, "Ready").get("reason") == "Serving" for one in objects)
    said = helm_test(cluster)
    assert ("the operator answers, and no InferenceService is served" in said) is not is_served


def test_helm_test_asks_a_service(served: Cluster) -> None:
    assert re.search(r"the InferenceService \S+ in \S+ answers", helm_test(served))


def test_late_requests_burn_both_windows_and_every_panel_has_series(
    served: Cluster, watch: Prometheus
) -> None:
    targets = {"namespace": NAMESPACE, "name": NAME, "target": "timeToFirstToken"}
    late = 'sluice_service_target_seconds{target="timeToFirstToken"} < 1'
    served.patch(NAME, {"slo": {"timeToFirstToken": "1ms"}, "batching": {"maxNumSeqs": 2}})
    wait_for("the new target", 30, lambda: watch.series(late) or None)
    ask(served, 40)
    ask(served, 4, **{"x-slo-class": "background"})
    watch.fires("SluiceTargetBurningFast", 30, **targets)
    watch.fires("SluiceTargetBurningSlow", 30, **targets)
    every_query_has_series(watch, NAMESPACE, NAME, 40, lambda: ask(served, 1))
    served.patch(NAME, {"slo": {"timeToFirstToken": "30s"}, "batching": None})
    wait_for("the old target", 30, lambda: True if not watch.series(late) else None)
    ask(served, 300)
    watch.resolves("SluiceTargetBurningFast", 30, **targets)
    watch.resolves("SluiceTargetBurningSlow", 30, **targets)


def test_an_object_that_asks_too_much_is_told_until_it_is_gone(
    served: Cluster, watch: Prometheus
) -> None:
    watch.fires("SluiceObjectStalled", 20, name=LARGE, reason="InsufficientMemory")
    served.delete(LARGE)
    watch.resolves("SluiceObjectStalled", 20, name=LARGE)


def test_pods_that_do_not_reach_the_operator_are_no_evidence(
    served: Cluster, watch: Prometheus
) -> None:
    with mute(served, NAME):
        watch.fires("SluiceNoEvidence", 40, reason="MajoritySilent", **SELF)
    watch.resolves("SluiceNoEvidence", 30, **SELF)


def test_a_wedged_pod_and_an_absent_operator_are_told_until_they_are_back(
    served: Cluster, watch: Prometheus
) -> None:
    scale = ("scale", "-n", SYSTEM, "deployment/sluice")
    served.signal_engine(NAME, "SIGSTOP")
    served.kube.kubectl(*scale, "--replicas=0")
    try:
        watch.fires("SluicePodWedged", 40, **SELF)
        watch.fires("SluiceOperatorDown", 40)
    finally:
        served.signal_engine(NAME, "SIGCONT")
        served.kube.kubectl(*scale, "--replicas=1")
    watch.resolves("SluicePodWedged", 30, **SELF)
    watch.resolves("SluiceOperatorDown", 60)
