"""InferenceBatches on real pods: one through two kills and a drain, one with its own engine."""

from collections.abc import Iterator

import pytest
from e2e.batches import (
    SERVICE,
    VOLUME,
    Files,
    apply,
    completed,
    delete,
    drain,
    kill,
    lines,
    start,
    wait,
)
from e2e.kit import SYSTEM, Cluster
from sluice.kube import NAMESPACE

pytestmark = [pytest.mark.timeout(900)]
NUM = 1000


@pytest.fixture(scope="module")
def files(cluster: Cluster) -> Iterator[Files]:
    files = Files(cluster)
    files.make()
    yield files
    files.remove()


@pytest.fixture(scope="module")
def service(cluster: Cluster) -> Iterator[Cluster]:
    cluster.apply(SERVICE, "demo")
    cluster.wait_condition(SERVICE, "Ready", "True", 300)
    yield cluster
    cluster.delete(SERVICE)


def test_a_thousand_prompts_beside_a_service_outlive_two_kills_and_a_drain(
    service: Cluster, files: Files
) -> None:
    files.write("in.jsonl", lines(NUM, SERVICE, 160))
    claim = {"claimName": VOLUME}
    given, to = {**claim, "path": "in.jsonl"}, {**claim, "path": "out"}
    start(service, "e2e-batch", input=given, output=to, serviceRef={"name": SERVICE})
    try:
        wait(service, "e2e-batch", "some results", 180, lambda s: completed(s) >= 50)
        kill(service, NAMESPACE, "app.kubernetes.io/instance=e2e-batch.batch")
        before = wait(service, "e2e-batch", "more of them", 180, lambda s: completed(s) >= 200)
        assert before["state"] == "in_progress"
        drain(service, "app.kubernetes.io/instance=e2e-batch.batch")
        before = wait(service, "e2e-batch", "more again", 180, lambda s: completed(s) >= 400)
        assert before["state"] == "in_progress"
        kill(service, SYSTEM, "app.kubernetes.io/name=sluice-operator")
        after = wait(service, "e2e-batch", "the end", 400, lambda s: s.get("state") == "completed")
        assert after["counts"] == {"total": NUM, "completed": NUM, "failed": 0}
        told = {c["type"]: (c["status"], c["reason"]) for c in after["conditions"]}
        assert told["Succeeded"] == ("True", "AllSucceeded")
        found = files.read("out/out.0.jsonl")
        assert sorted(int(one["custom_id"]) for one in found) == [*range(NUM)]
        assert {one["response"]["status_code"] for one in found} == {200}
        shown = service.kube.kubectl("get", "infbatch", "e2e-batch", "-n", NAMESPACE)
        assert "completed" in shown
    finally:
        delete(service, "e2e-batch")
    assert len(files.read("out/out.0.jsonl")) == NUM  # the output stays


def test_an_engine_of_its_own_ends_with_each_shard(cluster: Cluster, files: Files) -> None:
    apply(cluster, "v1", "ConfigMap", "e2e-lines", data={"in.jsonl": lines(20, "e2e-own", 8)})
    start(
        cluster,
        "e2e-own",
        input={"configMap": {"name": "e2e-lines", "key": "in.jsonl"}},
        output={"claimName": VOLUME, "path": "own"},
        model={"uri": "file:///models/demo"},
        engine={"name": "Sluice"},
        hardware={"accelerator": "cpu", "cpu": "500m", "memory": "2Gi"},
        shards=2,
        parallelism=2,
    )
    try:
        end = wait(cluster, "e2e-own", "the end", 400, lambda s: s.get("state") == "completed")
        assert end["counts"] == {"total": 20, "completed": 20, "failed": 0}
        assert end["shards"]["done"] == 2
        found = [one for shard in range(2) for one in files.read(f"own/out.{shard}.jsonl")]
        assert sorted(int(one["custom_id"]) for one in found) == [*range(20)]
    finally:
        delete(cluster, "e2e-own")
        cluster.kube.kubectl("delete", "configmap", "e2e-lines", "-n", NAMESPACE)
