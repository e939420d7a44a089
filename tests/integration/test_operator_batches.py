"""A real operator and real runs of `sluice batch`: Job, counts and ends of an InferenceBatch.

There is no kubelet and no controller here: the test makes the pods and starts what the Job asks
for, and ends the Job as its controller would.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from integration.apiserver import TIED, ApiServer
from integration.operator_runs import (
    Namespace,
    OperatorProcess,
    create_demo,
    running_operator,
)
from integration.test_operator_worker import free_address
from sluice_operator.spec.batch import BATCH_PLURAL
from sluice_operator.spec.service import PLURAL
from unit.cli.batch.tiny_api import Asked, Reply, TinyApi, results, tiny_api, write_input
from unit.operator.batches import OWN_ENGINE, valid_batch

Object = dict[str, Any]
NUM = 60
ENDED = "2026-01-01T00:01:00Z"


@pytest.fixture
def api() -> Iterator[TinyApi]:
    with tiny_api() as api:
        yield api


def create(space: Namespace, **changes: Any) -> Object:
    body = valid_batch(**changes)
    body["metadata"]["namespace"] = space.name
    return space.create(BATCH_PLURAL, body)


def status(space: Namespace) -> Object:
    found: Object = space.get(BATCH_PLURAL, "docs").get("status", {})
    return found


def says(space: Namespace, kind: str) -> tuple[str, str]:
    found = space.condition(kind, "docs", BATCH_PLURAL)
    return found.get("status", ""), found.get("reason", "")


def start_job(operator: OperatorProcess, space: Namespace) -> Object:
    operator.wait("the Job", lambda: space.find("jobs", "docs") is not None)
    return space.get("jobs", "docs")


@dataclass
class Shard:
    """One pod of a Job, and `sluice batch` in its place."""

    space: Namespace
    name: str
    process: subprocess.Popen[bytes]
    word: Path

    def end(self, phase: str) -> None:
        """Show that it has ended, as a kubelet does."""
        code = self.process.wait(30)
        message = self.word.read_text() if self.word.exists() else ""
        terminated = {"exitCode": code if code >= 0 else 128 - code, "message": message}
        times = {"startedAt": ENDED, "finishedAt": ENDED}
        entry = {
            "name": "batch", "image": "none", "imageID": "", "ready": False, "restartCount": 0,
            "state": {"terminated": {**terminated, **times}},
        }  # fmt: skip
        ended = {"phase": phase, "containerStatuses": [entry]}
        self.space.patch("pods", self.name, {"status": ended}, "status")


@contextlib.contextmanager
def running_shard(space: Namespace, folder: Path, url: str, shard: int = 0) -> Iterator[Shard]:
    """Start what the Job asks for of a shard, and show its pod."""
    job = space.get("jobs", "docs")
    [container] = job["spec"]["template"]["spec"]["containers"]
    name, ip = f"docs-{shard}-{os.urandom(4).hex()}", free_address()
    replaced = {
        "$(JOB_COMPLETION_INDEX)": str(shard),
        "/mnt/input": str(folder),
        "/mnt/output": str(folder),
        f"http://{space.get('services', 'demo')['spec']['clusterIP']}": url,
    }
    arguments = container["args"]
    for old, new in replaced.items():
        arguments = [argument.replace(old, new) for argument in arguments]
    word = folder / f"{name}.word"
    environment = {**os.environ, "SLUICE_TERMINATION_LOG": str(word)}
    command = [*TIED, sys.executable, "-m", *container["command"], *arguments, "--concurrency=4"]
    process = subprocess.Popen(command, env=environment)
    labels = job["spec"]["template"]["metadata"]["labels"]
    index = {"batch.kubernetes.io/job-completion-index": str(shard)}
    meta = {"name": name, "labels": {**labels, **index}}
    spec = {"containers": [{"name": "batch", "image": "none"}], "restartPolicy": "Never"}
    space.create("pods", {"apiVersion": "v1", "kind": "Pod", "metadata": meta, "spec": spec})
    shown = {
        "phase": "Running",
        "podIP": ip,
        "podIPs": [{"ip": ip}],
        "conditions": [{"type": "Ready", "status": "True"}],
    }
    space.patch("pods", name, {"status": shown}, "status")
    try:
        yield Shard(space, name, process, word)
    finally:
        process.kill()
        process.wait()


def end_job(space: Namespace, kind: str, reason: str, **counts: Any) -> None:
    """As the Job's controller does: a first condition announces the end."""
    first = "SuccessCriteriaMet" if kind == "Complete" else "FailureTarget"
    conditions = [
        {"type": one, "status": "True", "reason": reason, "message": "told", "lastProbeTime": ENDED,
         "lastTransitionTime": ENDED}
        for one in (first, kind)
    ]  # fmt: skip
    done = {"completionTime": ENDED} if kind == "Complete" else {}
    body = {"startTime": "2026-01-01T00:00:00Z", "conditions": conditions, **done, **counts}
    space.patch("jobs", "docs", {"status": body}, "status")


def delete_job(space: Namespace) -> None:
    """At once: nobody here would take off a finalizer."""
    at_once = {"propagationPolicy": "Background"}
    assert space.client.delete(space.path("jobs", "docs"), params=at_once).is_success


def test_a_batch_keeps_its_counts_when_pod_and_operator_are_killed(
    apiserver: ApiServer, space: Namespace, models: Path, tmp_path: Path, api: TinyApi
) -> None:
    write_input(tmp_path / "in.jsonl", NUM)

    def says_some(asked: Asked) -> Reply:
        if len(api.asked) == NUM // 3:
            api.gate.clear()  # the others stay under way
        return Reply(400, b"{}") if asked.body["input"] == "7" else Reply()

    api.says = says_some
    create_demo(space)
    create(space)
    with running_operator(apiserver, models, tmp_path / "1.log", space.name) as operator:
        start_job(operator, space)
        operator.wait("a status", lambda: says(space, "Accepted") == ("True", "Accepted"))
        assert status(space)["state"] == "validating"
        with running_shard(space, tmp_path, api.url) as shard:
            operator.wait("counts", lambda: status(space)["counts"]["completed"] > 0)
            assert status(space)["state"] == "in_progress"
            shard.process.kill()
            shard.end("Failed")
        before = status(space)["counts"]
        assert before["total"] == NUM
        operator.await_passes(2)
        operator.kill()
    api.release()
    with running_operator(apiserver, models, tmp_path / "2.log", space.name) as second:
        second.await_passes(2)
        after = status(space)["counts"]
        assert (after["total"], after["completed"] >= before["completed"]) == (NUM, True)
        with running_shard(space, tmp_path, api.url) as again:
            again.end("Succeeded")
        end_job(space, "Complete", "Completed", succeeded=1, failed=1)
        second.wait("the end", lambda: status(space)["state"] == "completed")
        assert status(space)["counts"] == {"total": NUM, "completed": NUM - 1, "failed": 1}
        assert says(space, "Succeeded") == ("True", "SomeFailed")
        ids = [each["custom_id"] for each in results(tmp_path / "out/out.0.jsonl")]
        assert sorted(map(int, ids)) == [*range(NUM)]
        assert {asked.headers["x-slo-class"] for asked in api.asked} == {"background"}
        # Its Job goes, as after ttlAfterFinished: nothing comes back.
        delete_job(space)
        second.await_passes(3)
        assert space.find("jobs", "docs") is None
        assert status(space)["state"] == "completed"


def test_a_bad_input_is_told_in_the_words_of_the_command(
    operator: OperatorProcess, space: Namespace, tmp_path: Path
) -> None:
    (tmp_path / "in.jsonl").write_text("{\n")
    create_demo(space)
    create(space)
    start_job(operator, space)
    with running_shard(space, tmp_path, "http://127.0.0.1:9") as shard:
        shard.end("Failed")
    end_job(space, "Failed", "FailedIndexes", failed=1, failedIndexes="0")
    operator.wait("the end", lambda: status(space).get("state") == "failed")
    told = space.condition("Succeeded", "docs", BATCH_PLURAL)
    assert (told["status"], told["reason"]) == ("False", "BadInput")
    assert told["message"].startswith("nothing was sent: line 1: it is not JSON")
    operator.wait("its event", lambda: len(space.events("BadInput")) == 1)
    [event] = [e for e in space.all("events") if e["reason"] == "BadInput"]
    assert event["involvedObject"]["kind"] == "InferenceBatch"


def test_a_batch_waits_for_its_service_and_takes_nobodys_job(
    operator: OperatorProcess, space: Namespace
) -> None:
    theirs = {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": "docs"},
        "spec": {
            "suspend": True,
            "template": {
                "spec": {"containers": [{"name": "a", "image": "b"}], "restartPolicy": "Never"}
            },
        },
    }
    space.create("jobs", theirs)
    create(space)
    operator.wait("a refusal", lambda: says(space, "Accepted") == ("False", "NameTaken"))
    delete_job(space)
    operator.wait("a refusal", lambda: says(space, "Accepted") == ("False", "NoService"), 60.0)
    assert space.find("jobs", "docs") is None
    create_demo(space)
    job = start_job(operator, space)
    [owner] = job["metadata"]["ownerReferences"]
    assert (owner["kind"], owner["name"]) == ("InferenceBatch", "docs")


def test_what_may_change_reaches_the_job(operator: OperatorProcess, space: Namespace) -> None:
    create(space, shards=4, **OWN_ENGINE)
    job = start_job(operator, space)
    assert job["spec"]["parallelism"] == 1
    assert job["spec"]["suspend"] is False
    operator.wait("the fit", lambda: says(space, "ModelFits") == ("True", "Fits"))
    space.patch(BATCH_PLURAL, "docs", {"spec": {"parallelism": 3, "suspend": True}})

    def steered() -> bool:
        spec = space.get("jobs", "docs")["spec"]
        return (spec["parallelism"], spec["suspend"]) == (3, True)

    operator.wait("the edit", steered)
    operator.wait("its reason", lambda: says(space, "Succeeded") == ("Unknown", "Suspended"))
    assert space.get("jobs", "docs")["spec"]["template"] == job["spec"]["template"]


def test_a_batch_and_a_service_of_one_name_do_not_meet(
    operator: OperatorProcess, space: Namespace
) -> None:
    create_demo(space)
    body = valid_batch("demo")
    body["metadata"]["namespace"] = space.name
    space.create(BATCH_PLURAL, body)
    operator.wait("the children", space.has_children)
    operator.wait("the Job", lambda: space.find("jobs", "demo") is not None)
    job, service = space.get("jobs", "demo"), space.get("services", "demo")
    labels = job["spec"]["template"]["metadata"]["labels"]
    assert not service["spec"]["selector"].items() <= labels.items()
    space.delete(BATCH_PLURAL, "demo")
    operator.await_passes(3)
    assert space.has_children()
    assert space.find(PLURAL, "demo") is not None


def test_a_model_that_does_not_fit_gets_no_job(operator: OperatorProcess, space: Namespace) -> None:
    create(space, **{**OWN_ENGINE, "model": {"uri": "file:///models/huge"}})
    operator.wait("a refusal", lambda: says(space, "ModelFits")[0] == "False")
    assert says(space, "Accepted") == ("False", "InsufficientMemory")
    assert space.find("jobs", "docs") is None
