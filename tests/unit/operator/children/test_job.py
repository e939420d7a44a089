"""Claims on the Job of a batch: who may fail, who serves whom, and what is mounted where."""

from __future__ import annotations

from typing import Any

import pytest
from sluice_operator.children import job
from unit.operator.batches import OWN_ENGINE, create_batch
from unit.operator.observations import SETTINGS

KUEUE = {"kueue.x-k8s.io/queue-name": "q", "kueue.x-k8s.io/priority-class": "low"}
VLLM = {**OWN_ENGINE, "engine": {"name": "VLLM", "image": "r/vllm:1"}}


def made(keys: str = "", ceiling: int | None = 8, **changes: Any) -> dict[str, Any]:
    return job.job(create_batch(**changes), SETTINGS, "10.96.0.7", keys, ceiling)


def pod(**changes: Any) -> dict[str, Any]:
    found: dict[str, Any] = made(**changes)["spec"]["template"]["spec"]
    return found


def mounts(container: dict[str, Any]) -> dict[str, tuple[str, bool]]:
    return {
        mount["mountPath"]: (mount["name"], mount.get("readOnly", False))
        for mount in container["volumeMounts"]
    }


def test_shards_are_the_indexes_of_a_job_that_never_has_two_writers_for_one() -> None:
    spec = made(shards=4, parallelism=2, completionWindow="90m", ttlAfterFinished="1h")["spec"]
    assert (spec["completionMode"], spec["completions"], spec["parallelism"]) == ("Indexed", 4, 2)
    assert spec["podReplacementPolicy"] == "Failed"
    assert (spec["activeDeadlineSeconds"], spec["ttlSecondsAfterFinished"]) == (5400, 3600)
    assert spec["template"]["spec"]["restartPolicy"] == "Never"
    assert "ttlSecondsAfterFinished" not in made()["spec"]


def test_only_bad_input_fails_a_shard_at_once_and_a_lost_node_never_does() -> None:
    rules = made()["spec"]["podFailurePolicy"]["rules"]
    by_code = {
        code: rule["action"]
        for rule in rules
        for code in rule.get("onExitCodes", {}).get("values", ())
    }
    assert by_code == {2: "FailIndex", 5: "Ignore", 130: "Ignore"}
    assert rules[0]["onPodConditions"] == [{"type": "DisruptionTarget", "status": "True"}]
    assert rules[0]["action"] == "Ignore"


def test_beside_a_service_one_container_sends_background_work_to_it() -> None:
    spec = pod(shards=3)
    assert "initContainers" not in spec
    [client] = spec["containers"]
    assert client["command"] == ["sluice", "batch"]
    assert client["args"] == [
        "/mnt/input/in.jsonl",
        "--out=/mnt/output/out/out.$(JOB_COMPLETION_INDEX).jsonl",
        "--url=http://10.96.0.7",
        "--shard=$(JOB_COMPLETION_INDEX)/3",
        "--report-port=8002",
        "--background",
        "--max-retries=5",
    ]
    assert client["image"] == SETTINGS.gate_image
    [keyed] = pod(keys="api-keys")["containers"]
    assert keyed["args"][-1] == "--api-key-file=/etc/sluice/keys/keys"
    assert mounts(keyed)["/etc/sluice/keys"] == ("keys", True)


@pytest.mark.parametrize("changes", [OWN_ENGINE, VLLM], ids=["Sluice", "VLLM"])
def test_an_engine_of_its_own_is_a_sidecar_that_is_ready_before_the_first_request(
    changes: dict[str, Any],
) -> None:
    spec = pod(**changes)
    [client] = spec["containers"]
    assert "--url=http://127.0.0.1:8000" in client["args"]
    assert "--background" not in client["args"]
    *_, front = spec["initContainers"]
    assert front["restartPolicy"] == "Always"
    assert front["startupProbe"]["httpGet"] == {"path": "/readyz", "port": "http"}
    assert "readinessProbe" not in front
    assert any(argument == "--max-num-seqs=8" for argument in front["args"])
    told = [a for one in spec["initContainers"] for a in one.get("args", ())]
    assert "--served-model-name=docs" in told
    # Nobody tunes it, so it has no admin port that others reach, and no files of the operator.
    assert not [a for a in told if a.startswith(("--admin-token-file", "--runtime-config-dir"))]
    volumes = {volume["name"] for volume in spec["volumes"]}
    assert not volumes & {"admin", "runtime"}
    used = [m["name"] for c in (client, *spec["initContainers"]) for m in c["volumeMounts"]]
    assert volumes == set(used)
    probed = [c.get("livenessProbe", {}).get("httpGet", {}) for c in spec["initContainers"]]
    assert {probe.get("port") for probe in probed if probe} <= {"http", 8000}


def test_one_claim_is_one_volume_and_its_input_is_read_only() -> None:
    [client] = pod()["containers"]
    assert mounts(client)["/mnt/output"] == ("output", False)
    assert mounts(client)["/mnt/input"] == ("output", True)
    two = pod(input={"claimName": "in", "path": "a/in.jsonl"})
    claims = {v["name"]: v.get("persistentVolumeClaim") for v in two["volumes"]}
    assert claims["input"] == {"claimName": "in", "readOnly": True}
    small = pod(input={"configMap": {"name": "lines", "key": "a.jsonl"}})
    assert small["containers"][0]["args"][0] == "/mnt/input/a.jsonl"
    assert {"name": "input", "configMap": {"name": "lines"}} in small["volumes"]


def test_labels_of_kueue_reach_the_job_which_nobody_else_suspends_then() -> None:
    plain, queued = made(suspend=True), made(labels=KUEUE, suspend=True)
    assert plain["spec"]["suspend"] is True
    assert "suspend" not in queued["spec"]
    assert KUEUE.items() <= queued["metadata"]["labels"].items()
    assert not KUEUE.keys() & queued["spec"]["template"]["metadata"]["labels"].keys()


def test_its_pods_are_of_no_service_of_the_same_name() -> None:
    labels = made()["spec"]["template"]["metadata"]["labels"]
    assert labels["app.kubernetes.io/instance"] == "docs.batch"
    assert labels["app.kubernetes.io/name"] != "sluice-worker"


def test_the_pod_is_as_restricted_as_those_of_a_service() -> None:
    for spec in (pod(), pod(**OWN_ENGINE)):
        assert spec["securityContext"]["runAsNonRoot"] is True
        assert spec["automountServiceAccountToken"] is False
        [client] = spec["containers"]
        assert client["securityContext"]["readOnlyRootFilesystem"] is True
        assert client["securityContext"]["capabilities"] == {"drop": ["ALL"]}
