"""Claims on one pass over a batch: when there is a Job, what follows the object, what is told."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from sluice_core.contract import BatchReport
from sluice_operator.children import job
from sluice_operator.model.checkpoint import Unread
from sluice_operator.model.fit import judge
from sluice_operator.plan.batch import BatchObserved, BatchPlan, plan
from sluice_operator.spec.batch import InferenceBatch
from unit.operator.batches import OWN_ENGINE, create_batch, end
from unit.operator.observations import CHECKPOINT, NOW, SETTINGS

SERVICE: dict[str, Any] = {"spec": {}}
COMPLETE = {"type": "Complete", "status": "True"}
ADDRESS = "10.96.0.7"
KUEUE = {"kueue.x-k8s.io/queue-name": "q"}


def failed(reason: str) -> dict[str, str]:
    return {"type": "Failed", "status": "True", "reason": reason, "message": "as the Job says"}


def live_job(batch: InferenceBatch, *conditions: Any, **status: Any) -> dict[str, Any]:
    made = job.job(batch, SETTINGS, ADDRESS, "", 8)
    made["metadata"]["uid"] = "uid-job"
    return {**made, "status": {"conditions": list(conditions), **status}}


def look(batch: InferenceBatch, *conditions: Any, previous: Any = None, **seen: Any) -> BatchPlan:
    observed = BatchObserved(live_job(batch, *conditions), previous or {}, **seen)
    return plan(batch, observed, SETTINGS, NOW)


def condition(planned: BatchPlan, kind: str) -> tuple[str, str, str]:
    conditions: Any = planned.status["conditions"]
    [one] = [c for c in conditions if c["type"] == kind]
    return one["status"], one["reason"], one["message"]


def test_a_job_is_made_once_the_service_is_there() -> None:
    batch = create_batch()
    early = plan(batch, BatchObserved(None, {}), SETTINGS, NOW)
    assert early.make is None
    said = "spec.serviceRef: there is no InferenceService demo"
    assert condition(early, "Accepted") == ("False", "NoService", said)
    later = plan(batch, BatchObserved(None, {}, service=SERVICE, address=ADDRESS), SETTINGS, NOW)
    assert later.make == job.job(batch, SETTINGS, ADDRESS, "")
    assert condition(later, "Accepted")[0] == "True"
    assert later.status["state"] == "validating"


def test_the_keys_of_the_service_are_taken_along() -> None:
    service = {"spec": {"apiKeySecretRef": {"name": "keys-of-demo"}}}
    planned = plan(
        create_batch(), BatchObserved(None, {}, service=service, address=ADDRESS), SETTINGS, NOW
    )
    assert planned.make is not None
    assert "keys-of-demo" in str(planned.make["spec"]["template"])


def test_no_pod_is_made_for_a_model_that_does_not_fit_or_is_not_read_yet() -> None:
    batch = create_batch(**OWN_ENGINE)
    engine = batch.engine
    assert engine is not None
    fit = judge(engine.spec, CHECKPOINT)
    planned = plan(batch, BatchObserved(None, {}, fit), SETTINGS, NOW)
    assert planned.make is not None
    assert f"--max-num-seqs={fit.memory.ceiling if fit.memory else 0}" in str(planned.make)
    assert condition(planned, "ModelFits")[:2] == ("True", "Fits")
    small = {**OWN_ENGINE["hardware"], "memory": "64Mi"}
    tight = create_batch(**{**OWN_ENGINE, "hardware": small}).engine
    assert tight is not None
    for unfit in (judge(tight.spec, CHECKPOINT), judge(engine.spec, Unread("soon", True))):
        refused = plan(batch, BatchObserved(None, {}, unfit), SETTINGS, NOW)
        assert refused.make is None
        assert condition(refused, "Accepted") == ("False", unfit.reason, unfit.message)


def test_a_job_of_others_stays_and_one_of_a_former_object_is_waited_for() -> None:
    batch = create_batch()
    theirs = {"metadata": {"name": "docs", "uid": "x"}, "spec": {"suspend": True}}
    planned = plan(
        batch, BatchObserved(theirs, {}, service=SERVICE, address=ADDRESS), SETTINGS, NOW
    )
    assert (planned.make, planned.steer) == (None, None)
    assert condition(planned, "Accepted")[1] == "NameTaken"
    assert [notice.reason for notice in planned.noticed] == ["NameTaken"]
    former = live_job(replace(batch, uid="uid-0"))
    planned = plan(
        batch, BatchObserved(former, {}, service=SERVICE, address=ADDRESS), SETTINGS, NOW
    )
    assert (planned.make, planned.steer) == (None, None)
    assert condition(planned, "Accepted")[1] == "AwaitingDeletion"


def test_parallelism_and_suspend_follow_the_object_and_nothing_else_does() -> None:
    batch = create_batch(shards=4)
    live = live_job(batch)
    edited = create_batch(shards=4, parallelism=3, suspend=True)
    renewed = replace(SETTINGS, gate_image="registry/operator:2")
    planned = plan(edited, BatchObserved(live, {}), renewed, NOW)
    assert planned.make is None
    assert planned.steer == {"spec": {"parallelism": 3, "suspend": True}}
    assert plan(batch, BatchObserved(live, {}), renewed, NOW).steer is None


def test_a_job_in_a_queue_is_suspended_by_kueue_alone() -> None:
    batch = create_batch(labels=KUEUE)
    live = live_job(batch)
    live["spec"]["suspend"] = True  # as Kueue's webhook does
    planned = plan(batch, BatchObserved(live, {}), SETTINGS, NOW)
    assert planned.steer is None
    assert condition(planned, "Succeeded")[1] == "Queued"
    late = create_batch(labels=KUEUE, suspend=True)
    planned = plan(late, BatchObserved(live_job(batch), {}), SETTINGS, NOW)
    assert planned.steer is None
    assert "too late" in condition(planned, "Accepted")[2]
    early = plan(late, BatchObserved(None, {}, service=SERVICE, address=ADDRESS), SETTINGS, NOW)
    assert early.make is None
    assert condition(early, "Accepted")[:2] == ("False", "Suspended")


def test_states_are_openais_and_counts_are_of_all_shards() -> None:
    batch = create_batch(shards=2, parallelism=2)
    assert look(batch).status["state"] == "validating"
    live = {0: BatchReport(100, 30, 20, 0, 4.0), 1: BatchReport(100, 40, 8, 2, 3.0)}
    planned = look(batch, live=live)
    assert planned.status["state"] == "in_progress"
    assert planned.status["counts"] == {"total": 100, "completed": 28, "failed": 2}
    assert (planned.status["rate"], planned.status["timeLeft"]) == ("7", 10)
    assert condition(planned, "Succeeded")[:2] == ("Unknown", "Running")
    done = {0: BatchReport(100, 0, 50, 0, 4.0), 1: BatchReport(100, 0, 48, 2, 3.0)}
    assert look(batch, live=done).status["state"] == "finalizing"


def test_a_pod_that_comes_or_an_operator_that_starts_takes_nothing_back() -> None:
    batch = create_batch(shards=2)
    before = look(batch, live={0: BatchReport(100, 10, 40, 0, 4.0)}).status
    for live in ({}, {0: BatchReport(100, 50, 0, 0, 0.0)}, {1: BatchReport(100, 45, 5, 0, 1.0)}):
        after = look(batch, previous=before, live=live).status
        more = 5 if 1 in live else 0
        assert after["counts"] == {"total": 100, "completed": 40 + more, "failed": 0}
        assert after["state"] == "in_progress"


@pytest.mark.parametrize(
    ("completed", "num_failed", "status", "reason"),
    [
        (100, 0, "True", "AllSucceeded"),
        (99, 1, "True", "SomeFailed"),
        (0, 100, "False", "AllFailed"),
    ],
)
def test_all_failed_is_completed_and_no_success(
    completed: int, num_failed: int, status: str, reason: str
) -> None:
    batch = create_batch()
    ends = [end(0, 0, total=100, completed=completed, failed=num_failed)]
    planned = look(batch, COMPLETE, ends=ends)
    assert planned.status["state"] == "completed"
    assert condition(planned, "Succeeded")[:2] == (status, reason)
    assert planned.status["counts"] == {"total": 100, "completed": completed, "failed": num_failed}
    assert "rate" not in planned.status


def test_a_pod_that_went_before_its_last_word_was_read_has_done_its_shard() -> None:
    batch = create_batch(shards=2)
    before = look(batch, live={0: BatchReport(100, 10, 38, 2, 4.0)}).status
    ends = [end(1, 0, total=100, completed=50, failed=0)]
    planned = look(batch, COMPLETE, previous=before, ends=ends)
    assert planned.status["counts"] == {"total": 100, "completed": 98, "failed": 2}
    assert condition(planned, "Succeeded") == (
        *("True", "SomeFailed"),
        "100 of 100 done, 2 failed",
    )


def test_bad_input_is_told_in_the_words_of_the_command() -> None:
    ends = [
        end(0, 2, "2025-10-09T08:00:00Z", message="nothing was sent: line 3: it is not JSON"),
        end(1, 137, "2025-10-09T09:00:00Z"),
    ]
    planned = look(create_batch(shards=2), failed("FailedIndexes"), ends=ends)
    assert planned.status["state"] == "failed"
    told = condition(planned, "Succeeded")
    assert told == ("False", "BadInput", "nothing was sent: line 3: it is not JSON")
    assert [notice.reason for notice in planned.noticed] == ["BadInput"]


def test_a_shard_that_is_killed_again_and_again_is_told_by_its_last_end() -> None:
    planned = look(create_batch(), failed("FailedIndexes"), ends=[end(0, 137)])
    status, reason, message = condition(planned, "Succeeded")
    assert (status, reason) == ("False", "ShardsFailed")
    assert message.startswith("shard 0: its container batch was ended by signal 9 (SIGKILL)")
    planned = look(create_batch(), failed("FailedIndexes"))
    assert condition(planned, "Succeeded")[2] == "as the Job says"


def test_a_window_that_is_over_is_told_with_what_was_done() -> None:
    ends = [end(0, 130, total=100, completed=60, failed=1)]
    planned = look(create_batch(), failed("DeadlineExceeded"), ends=ends)
    assert planned.status["state"] == "expired"
    said = "completionWindow is over: 61 of 100 done, 1 failed"
    assert condition(planned, "Succeeded") == ("False", "Expired", said)


def test_what_is_over_stays_so_also_without_its_job() -> None:
    batch = create_batch()
    over = look(batch, COMPLETE, ends=[end(0, 0, total=1, completed=1)]).status
    again = plan(replace(batch, generation=9), BatchObserved(None, over), SETTINGS, NOW)
    assert (again.make, again.steer, again.noticed) == (None, None, ())
    assert again.status == {**over, "observedGeneration": 9}


def test_a_message_that_is_no_report_is_left_out() -> None:
    for odd in ('{"total": -1}', "[]", "\ud800", '{"total": 1e400}'):
        found = end(0, 1, odd=1)
        assert found.report == BatchReport()
        assert end(0, 1).report is None
        terminated = {"exitCode": 1, "message": odd, "finishedAt": "2025-10-09T08:00:00Z"}
        container = {"name": "batch", "state": {"terminated": terminated}}
        assert _read(container).report is None


def _read(container: dict[str, Any]) -> Any:
    from sluice_operator.cluster.jobs import shard_end_of
    from unit.operator.batches import shard_pod

    return shard_end_of(shard_pod(0, containerStatuses=[container]), "batch")
