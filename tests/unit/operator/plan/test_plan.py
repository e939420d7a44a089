"""Claims on one pass: what it writes, sends and tells for what it sees."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from sluice_core.contract import (
    Causes,
    Evidence,
    FirstTokens,
    Lengths,
    Slo,
    StepModel,
    TokenGaps,
    Waiting,
    encode,
)
from sluice_operator.children.runtime import DecidedRuntime
from sluice_operator.model.checkpoint import Refused, Unread
from sluice_operator.model.fit import Fit, judge
from sluice_operator.plan.observed import Observed
from sluice_operator.plan.plan import Plan, plan
from sluice_operator.plan.tune import limits_of
from sluice_operator.pods.scrape import Scrape
from sluice_operator.reasons import Reason
from sluice_operator.spec.service import InferenceService
from sluice_operator.status.events import Notice
from sluice_operator.tuner.types import ChunkBudget, Past, ReplicaChange
from unit.operator.observations import (
    CHECKPOINT,
    NOW,
    SETTINGS,
    create_config,
    create_evidence,
    create_fit,
    create_observed,
    create_pod,
    create_scrape,
    create_service,
    create_tick,
)


def _plan(service: InferenceService, observed: Observed, now: float = NOW) -> Plan:
    return plan(service, observed, SETTINGS, now)


def _notices(planned: Plan) -> tuple[Notice, ...]:
    return (*planned.decided, *planned.restored.values(), *planned.noticed)


def _kinds(planned: Plan) -> list[str]:
    return [manifest["kind"] for manifest in planned.apply]


def _condition(planned: Plan, kind: str) -> dict[str, Any]:
    conditions: Any = planned.status["conditions"]
    found: dict[str, Any] = next(c for c in conditions if c["type"] == kind)
    return found


def _after(planned: Plan, observed: Observed) -> Observed:
    """What the next pass sees once everything was written."""
    live = dict(observed.live)
    for manifest in planned.apply:
        stored = json.loads(json.dumps(manifest))
        stored["metadata"]["resourceVersion"] = "5"
        live[manifest["kind"]] = stored
    return replace(
        observed, live=live, runtime=planned.runtime, previous=planned.status, unsaved_s=0.0
    )


def _serving(service: InferenceService, **config: Any) -> Observed:
    """A service at epoch 1, cap 4, all written, whose one pod now answers with `config`."""
    pod = create_pod()
    scrapes = {pod.uid: create_scrape()}
    first = create_observed(service, pods=(pod,), scrapes=scrapes, runtime=DecidedRuntime(1, 4, 1))
    written = _after(_plan(service, first), first)
    return replace(written, scrapes={pod.uid: create_scrape(**config)})


def test_a_new_object_gets_all_children_with_the_cap_before_the_pods() -> None:
    service = create_service()
    planned = _plan(service, create_observed(service))
    assert _kinds(planned) == [
        "ConfigMap", "Secret", "Service", "PodDisruptionBudget", "Deployment",
    ]  # fmt: skip


def test_a_pass_over_what_it_has_written_writes_nothing() -> None:
    service = create_service()
    observed = create_observed(service)
    first = _plan(service, observed)
    second = _plan(service, _after(first, observed), NOW + 60)
    assert second.apply == ()
    assert _notices(second) == ()
    assert second.status == first.status


def test_a_pass_over_a_serving_object_without_traffic_writes_nothing() -> None:
    service = create_service()
    observed = _serving(service)
    settled = _plan(service, observed, NOW + 2)
    scrapes = {uid: replace(held, seen_s=NOW + 60) for uid, held in observed.scrapes.items()}
    later = replace(observed, previous=settled.status, scrapes=scrapes)
    again = _plan(service, later, NOW + 60)
    assert settled.apply == again.apply == ()
    assert settled.patches == again.patches == ()
    assert again.status == settled.status
    assert _notices(again) == ()


def test_a_model_that_does_not_fit_gets_no_child_and_says_what_would_fit() -> None:
    service = create_service(hardware__memory="800Mi")
    planned = _plan(service, create_observed(service))
    assert planned.apply == ()
    fits = _condition(planned, "ModelFits")
    assert (fits["status"], fits["reason"]) == ("False", "InsufficientMemory")
    assert "MiB" in fits["message"]
    assert "would fit with" in fits["message"]
    assert _condition(planned, "Ready")["status"] == "False"
    assert _condition(planned, "Stalled")["status"] == "True"
    assert [notice.reason for notice in _notices(planned)].count(Reason.INSUFFICIENT_MEMORY) == 1


def test_an_edit_that_cannot_fit_leaves_the_serving_pods_alone() -> None:
    service = create_service()
    observed = _serving(service)
    bigger = create_service(hardware__memory="800Mi")
    planned = _plan(bigger, replace(observed, fit=create_fit(bigger.spec)))
    assert planned.apply == ()
    assert _condition(planned, "Ready")["status"] == "True"
    assert _condition(planned, "ModelFits")["status"] == "False"


def test_pods_of_a_spec_that_did_fit_are_looked_after() -> None:
    """Their Service is put back, their cap and replicas move; the pods themselves stay."""
    observed = _serving(create_service(), epoch=0)
    edited = create_service(hardware__memory="800Mi", scaling__minReplicas=2)
    live = {kind: body for kind, body in observed.live.items() if kind != "Service"}
    planned = _plan(edited, replace(observed, live=live, fit=create_fit(edited.spec)))
    assert set(_kinds(planned)) == {"ConfigMap", "Service", "Deployment"}
    (pods,) = (manifest for manifest in planned.apply if manifest["kind"] == "Deployment")
    assert pods["spec"]["replicas"] == 2
    assert pods["spec"]["template"] == live["Deployment"]["spec"]["template"]
    assert [item.patch.cap for item in planned.patches] == [4]
    assert _condition(planned, "SLOMet")["reason"] == "NoTraffic"
    assert _condition(planned, "Stalled")["reason"] == "InsufficientMemory"


def test_an_edit_of_the_pods_does_not_wait_for_a_hub_that_is_away_but_another_model_does() -> None:
    observed = _serving(create_service())
    away = Fit("Unknown", Reason.HEADERS_UNAVAILABLE, "the hub is away", is_pending=True)
    patched = create_service(engine__image="r/w:patched")
    (pods,) = _plan(patched, replace(observed, fit=away)).apply
    assert pods["spec"]["template"]["spec"]["containers"][0]["image"] == "r/w:patched"

    other = create_service(model__uri="file:///models/other", engine__image="r/w:patched")
    rollout = {"observedGeneration": 1, "replicas": 1, "updatedReplicas": 1, "readyReplicas": 1}
    settled = {**observed.live["Deployment"], "status": rollout}
    withheld = _plan(
        other, replace(observed, live={**observed.live, "Deployment": settled}, fit=away)
    )
    assert withheld.apply == ()
    said = _condition(withheld, "Reconciling")
    assert (said["status"], said["reason"]) == ("True", "HeadersUnavailable")


def test_a_model_that_cannot_be_read_starts_where_its_pods_predict() -> None:
    service = create_service(model__uri="pvc://models/demo")
    unread = judge(service.spec, Unread("pvc:// is not read"))
    planned = _plan(service, create_observed(service, fit=unread))
    assert planned.runtime is not None
    assert planned.runtime.cap is None
    assert _condition(planned, "ModelFits")["status"] == "Unknown"
    assert "Deployment" in _kinds(planned)
    predicted = replace(_serving(service, epoch=0, cap=24), fit=unread, runtime=planned.runtime)
    adopted = _plan(service, predicted)
    assert adopted.runtime is not None
    assert (adopted.runtime.cap, adopted.runtime.epoch) == (24, 1)

    own = create_service(model__uri="pvc://models/demo", batching__initialNumSeqs=6)
    asked = _plan(own, create_observed(own, fit=judge(own.spec, Unread("pvc:// is not read"))))
    assert asked.runtime is not None
    assert asked.runtime.cap == 6


def test_a_model_that_is_still_being_read_gets_no_pods_and_is_looked_at_again_soon() -> None:
    service = create_service()
    reading = judge(service.spec, Unread("the model is being read", is_pending=True))
    planned = _plan(service, create_observed(service, fit=reading))
    assert (planned.apply, planned.runtime) == ((), None)
    assert planned.requeue_s == SETTINGS.tick_s
    told = {kind: _condition(planned, kind) for kind in ("Ready", "Reconciling", "Stalled")}
    assert [told[kind]["status"] for kind in told] == ["False", "True", "False"]
    assert told["Ready"]["reason"] == told["Reconciling"]["reason"] == "ReadingModel"
    assert told["Ready"]["message"] == "the model is being read"
    assert not [notice for notice in _notices(planned) if notice.warning]
    orphaned = create_observed(
        service, fit=reading, pods=(create_pod(),), runtime=DecidedRuntime(1, 4, 1)
    )
    assert "Deployment" in _kinds(_plan(service, orphaned))


def test_a_cap_in_force_is_no_first_cap_though_nothing_is_known_for_a_pass() -> None:
    service = create_service()
    unread = Fit("Unknown", Reason.HEADERS_UNAVAILABLE, "being read", is_pending=True)
    silent = {"uid-demo-1": Scrape(problem="no answer within 2 s")}
    observed = create_observed(
        service, fit=unread, pods=(create_pod(),), scrapes=silent, runtime=DecidedRuntime(7, 64, 1)
    )
    after = _plan(service, observed).runtime
    assert after is not None
    assert (after.epoch, after.cap) == (7, 64)


def test_the_first_cap_is_the_least_that_pods_predict() -> None:
    service = create_service()
    pods = (create_pod("demo-1"), create_pod("demo-2"))
    caps = {"uid-demo-1": 12, "uid-demo-2": 9}
    scrapes = {uid: create_scrape(epoch=0, cap=cap) for uid, cap in caps.items()}
    observed = create_observed(
        service, pods=pods, scrapes=scrapes, runtime=DecidedRuntime(0, None, 1)
    )
    planned = _plan(service, observed)
    assert planned.runtime is not None
    assert (planned.runtime.cap, planned.runtime.epoch) == (9, 1)
    assert _kinds(planned)[0] == "ConfigMap"
    assert {item.patch.cap for item in planned.patches} == {9}


def test_pods_that_are_about_to_be_rolled_are_not_told_as_settled() -> None:
    """`kubectl wait` and Flux take the first status of a generation at its word."""
    observed = _serving(create_service())
    counts = {"observedGeneration": 1, "replicas": 1, "updatedReplicas": 1, "readyReplicas": 1}
    settled = {**observed.live["Deployment"], "status": counts}
    observed = replace(observed, live={**observed.live, "Deployment": settled})
    same = _plan(create_service(slo__timeToFirstToken="900ms"), observed)
    assert _condition(same, "Reconciling")["reason"] == "Settled"
    rolled = _plan(create_service(engine__image="r/w:patched"), observed)
    assert _kinds(rolled) == ["Deployment"]
    said = _condition(rolled, "Reconciling")
    assert (said["status"], said["reason"]) == ("True", "RollingOut")


def test_the_tuner_s_memory_alone_is_saved_twice_a_minute_whatever_the_wall_clock_says() -> None:
    service = create_service()
    observed = _serving(service)
    assert observed.runtime
    past = Past(scale_history=(ReplicaChange(NOW, 1, 2, "Headroom", 1.0),))
    observed = replace(observed, runtime=replace(observed.runtime, past=past))
    for unsaved_s, written in ((10.0, []), (31.0, ["ConfigMap"])):
        later = replace(observed, unsaved_s=unsaved_s)
        assert _kinds(_plan(service, later, NOW - 3600)) == written


def test_the_configmap_write_is_refused_if_another_operator_wrote_since() -> None:
    service = create_service()
    observed = _serving(service)
    narrowed = create_service(batching__maxNumSeqs=2)
    planned = _plan(narrowed, replace(observed, fit=create_fit(narrowed.spec)))
    assert planned.apply[0]["metadata"]["resourceVersion"] == "5"


def test_a_lowered_maximum_lowers_the_cap_in_a_new_epoch() -> None:
    observed = _serving(create_service())
    narrowed = create_service(batching__maxNumSeqs=2)
    planned = _plan(narrowed, replace(observed, fit=create_fit(narrowed.spec)))
    assert planned.runtime is not None
    assert (planned.runtime.cap, planned.runtime.epoch) == (2, 2)
    [told] = [notice for notice in _notices(planned) if notice.reason == "WithinLimits"]
    assert told.message.startswith("epoch 2: cap 4 -> 2: the cap 4 is outside 1..2")
    assert [(p.patch.epoch, p.patch.cap) for p in planned.patches] == [(2, 2)]


@pytest.mark.parametrize("mode", ["Enforce", "Advisory"])
def test_edited_bounds_of_the_replicas_are_told_and_remembered(mode: str) -> None:
    """As a decision: the history shows it, and its cold start is measured."""
    before = _serving(create_service(slo__mode=mode))
    edited = create_service(slo__mode=mode, scaling={"minReplicas": 3, "maxReplicas": 4})
    planned = _plan(edited, before)
    assert planned.runtime is not None
    assert planned.runtime.replicas == 3
    [told] = [notice for notice in _notices(planned) if notice.reason == "WithinLimits"]
    assert "replicas 1 -> 3: 1 replicas are outside 3..4" in told.message
    [change] = planned.runtime.past.scale_history
    assert (change.from_replicas, change.to_replicas) == (1, 3)


def test_advice_keeps_the_cap_within_its_bounds() -> None:
    service = create_service(slo__mode="Advisory", batching__maxNumSeqs=2)
    planned = _plan(service, replace(_serving(service), fit=create_fit(service.spec)))
    assert planned.runtime is not None
    assert (planned.runtime.cap, planned.runtime.epoch) == (2, 2)


@pytest.mark.parametrize(
    "config",
    [
        {"epoch": 0},
        {"slo": Slo(900.0, 50.0)},
        {"overload": "Shed"},
        {"scheduling_policy": "fcfs"},
        {"hold_share": 0.5},
    ],
)
def test_a_pod_that_is_not_as_it_should_be_is_sent_everything_again(
    config: dict[str, Any],
) -> None:
    service = create_service()
    planned = _plan(service, _serving(service, **config))
    [item] = planned.patches
    assert (item.patch.epoch, item.patch.cap) == (1, 4)
    assert item.patch.slo == Slo(500.0, 50.0)


def test_advice_sheds_nothing() -> None:
    service = create_service(slo__overload="Shed", slo__mode="Advisory")
    assert _plan(service, _serving(service)).patches == ()
    [item] = _plan(service, _serving(service, overload="Shed")).patches
    assert item.patch.overload == "Queue"


def test_an_edited_order_reaches_the_pods_in_the_same_epoch_and_restarts_none() -> None:
    observed = _serving(create_service())
    planned = _plan(create_service(batching__order="FCFS"), observed)
    assert "Deployment" not in _kinds(planned)
    [patch] = [item.patch for item in planned.patches]
    assert (patch.epoch, patch.cap, patch.scheduling_policy) == (1, 4, "fcfs")


def test_an_edited_share_of_a_hold_reaches_the_pods_in_the_same_epoch_and_restarts_none() -> None:
    planned = _plan(create_service(slo__holdShare="0.25"), _serving(create_service()))
    assert "Deployment" not in _kinds(planned)
    [patch] = [item.patch for item in planned.patches]
    assert (patch.epoch, patch.cap, patch.hold_share) == (1, 4, 0.25)


def test_an_older_pod_is_not_sent_a_share_that_it_would_refuse() -> None:
    service = create_service(slo__holdShare="0.25")
    assert _plan(service, _serving(service, hold_share=None)).patches == ()
    [item] = _plan(service, _serving(service, hold_share=None, overload="Shed")).patches
    assert b"hold_share" not in encode(item.patch)


def test_a_pod_with_another_cap_in_our_epoch_is_told_in_a_new_one() -> None:
    service = create_service()
    planned = _plan(service, _serving(service, cap=3))
    [item] = planned.patches
    assert (item.patch.epoch, item.patch.cap) == (2, 4)


def test_edited_targets_reach_the_pods_and_restart_none() -> None:
    service = create_service()
    observed = _serving(service)
    edited = create_service(slo__timeToFirstToken="900ms")
    planned = _plan(edited, observed)
    assert "Deployment" not in _kinds(planned)
    assert [item.patch.slo for item in planned.patches] == [Slo(900.0, 50.0)]


def test_a_pod_is_never_sent_a_cap_over_its_own_ceiling() -> None:
    service = create_service()
    observed = _serving(service)
    pods = (*observed.pods, create_pod("demo-2"))
    scrapes = {**observed.scrapes, "uid-demo-2": create_scrape(ceiling=3, epoch=0)}
    planned = _plan(service, replace(observed, pods=pods, scrapes=scrapes))
    assert {item.patch.cap for item in planned.patches} == {3}


def test_one_pod_on_a_smaller_gpu_does_not_take_the_cap_of_all() -> None:
    service = create_service()
    observed = replace(_serving(service), runtime=DecidedRuntime(1, 12, 2))
    pods = (*observed.pods, create_pod("demo-2"))
    scrapes = {**observed.scrapes, "uid-demo-2": create_scrape(ceiling=3, epoch=1, cap=3)}
    planned = _plan(service, replace(observed, pods=pods, scrapes=scrapes))
    assert planned.runtime is not None
    assert planned.runtime.cap == 12
    assert {item.patch.cap for item in planned.patches} == {3, 12}


def test_pods_past_our_epoch_are_overtaken() -> None:
    service = create_service()
    planned = _plan(service, _serving(service, epoch=9))
    assert planned.runtime is not None
    assert planned.runtime.epoch == 10
    assert "EpochRecovered" in [notice.reason for notice in _notices(planned)]


def test_pods_that_were_made_while_the_hub_was_away_are_not_called_pinned() -> None:
    service = create_service(model__uri="hf://org/model")
    away = create_observed(service, fit=judge(service.spec, Unread("the hub answered 429")))
    first = _plan(service, away)
    live = {m["kind"]: {**m, "metadata": {**m["metadata"], "resourceVersion": "5"}}
            for m in json.loads(json.dumps(first.apply))}  # fmt: skip
    known = judge(service.spec, replace(CHECKPOINT, commit="f" * 40))
    planned = _plan(service, replace(away, live=live, fit=known, runtime=first.runtime))
    assert planned.apply == (), "no pod is restarted for it"
    model: Any = planned.status["model"]
    assert "resolvedRevision" not in model
    new: Any = _plan(service, create_observed(service, fit=known)).status["model"]
    assert new["resolvedRevision"] == "f" * 40


def test_a_deployment_that_a_webhook_changes_is_not_called_rolling_out() -> None:
    """Of a new operator, which does not know yet that writing it again changes nothing."""
    service = create_service()
    observed = _serving(service)
    live = json.loads(json.dumps(observed.live))
    live["Deployment"]["spec"]["template"]["spec"]["containers"][0]["image"] = "mirror/worker"
    mutated = replace(observed, live=live, accepted={})
    conditions: Any = {c["type"]: c for c in _plan(service, mutated).status["conditions"]}  # type: ignore[attr-defined]
    calm: Any = {c["type"]: c for c in _plan(service, observed).status["conditions"]}  # type: ignore[attr-defined]
    assert conditions["Reconciling"]["reason"] == calm["Reconciling"]["reason"]


def test_an_edit_that_is_refused_leaves_the_cap_of_what_serves() -> None:
    service = create_service(batching__maxNumSeqs=1024, batching__maxNumBatchedTokens=2048)
    config = {"ceiling": 1024, "cap": 600}
    observed = replace(_serving(service, **config), runtime=DecidedRuntime(1, 600, 1))
    refused = replace(observed, fit=judge(service.spec, Refused("quantization_config")))
    planned = _plan(service, refused)
    assert planned.runtime is not None
    assert (planned.runtime.cap, planned.runtime.epoch, planned.patches) == (600, 1, ())


def test_a_leaving_pod_is_sent_nothing() -> None:
    service = create_service()
    leaving = replace(create_pod(), terminating=True)
    observed = replace(
        _serving(service), pods=(leaving,), scrapes={leaving.uid: create_scrape(epoch=0)}
    )
    assert _plan(service, observed).patches == ()


def test_an_outside_owner_of_the_replicas_is_followed() -> None:
    service = create_service(replicas=7)
    planned = _plan(service, create_observed(service))
    deployment = planned.apply[-1]
    assert deployment["spec"]["replicas"] == 7
    scaling: Any = planned.status["scaling"]
    assert scaling["replicasOwner"] == "External"


def test_replicas_persist_when_the_outside_owner_leaves() -> None:
    service = create_service(scaling__maxReplicas=5)
    observed = create_observed(service, runtime=DecidedRuntime(1, 4, 9))
    assert _plan(service, observed).apply[-1]["spec"]["replicas"] == 5


def test_an_edited_child_is_put_back_and_the_event_says_what_was_undone() -> None:
    service = create_service()
    observed = _serving(service)
    live = json.loads(json.dumps(observed.live))
    live["Deployment"]["spec"]["replicas"] = 9
    planned = _plan(service, replace(observed, live=live))
    assert _kinds(planned) == ["Deployment"]
    [notice] = [n for n in _notices(planned) if n.reason == "ChildRestored"]
    assert "spec.replicas" in notice.message


def test_a_deleted_child_comes_back_with_an_event() -> None:
    service = create_service()
    observed = _serving(service)
    live = {kind: child for kind, child in observed.live.items() if kind != "Service"}
    planned = _plan(service, replace(observed, live=live, deleted={"Service"}))
    assert _kinds(planned) == ["Service"]
    assert "ChildRestored" in [notice.reason for notice in _notices(planned)]


def test_somebody_elses_object_of_a_childs_name_is_left_alone() -> None:
    service = create_service()
    theirs = {"metadata": {"name": "demo", "resourceVersion": "9"}, "spec": {}}
    planned = _plan(service, create_observed(service, live={"Service": theirs}))
    assert planned.apply == ()
    assert planned.patches == ()
    assert _condition(planned, "Stalled")["reason"] == "NameTaken"


def test_children_of_a_former_object_of_that_name_are_not_adopted() -> None:
    service = create_service()
    observed = _serving(service)
    live = json.loads(json.dumps(observed.live))
    live["Deployment"]["metadata"]["ownerReferences"][0]["uid"] = "uid-of-the-former"
    planned = _plan(service, replace(observed, live=live))
    assert planned.apply == ()
    assert planned.requeue_s == 1
    assert _notices(planned) == ()
    assert _condition(planned, "Reconciling")["reason"] == "AwaitingDeletion"
    assert _condition(planned, "Stalled")["status"] == "False"
    assert _condition(planned, "Ready")["status"] == "False"
    owner = live["Deployment"]["metadata"]["ownerReferences"][0]
    for other in ({"name": "another"}, {"apiVersion": "serving.kserve.io/v1beta1"}):
        live["Deployment"]["metadata"]["ownerReferences"][0] = {**owner, **other}
        theirs = _plan(service, replace(observed, live=live))
        assert _condition(theirs, "Stalled")["reason"] == "NameTaken"


def test_a_pod_without_metrics_is_named() -> None:
    service = create_service()
    observed = replace(_serving(service), scrapes={"uid-demo-1": Scrape(problem="Timeout: 2 s")})
    planned = _plan(service, observed)
    assert "demo-1: Timeout" in _condition(planned, "MetricsAvailable")["message"]


def test_evidence_is_looked_at_only_while_pods_serve() -> None:
    service = create_service()
    assert _plan(service, create_observed(service)).requeue_s == SETTINGS.resync_s
    assert _plan(service, _serving(service)).requeue_s == SETTINGS.tick_s


def test_the_token_is_in_the_secret_and_nowhere_else() -> None:
    service = create_service()
    planned = _plan(service, create_observed(service))
    others = [m for m in planned.apply if m["kind"] != "Secret"]
    said = json.dumps([others, planned.status]) + repr(_notices(planned))
    assert "secret-canary" not in said


def _breached(num_ticks: int, started: int = 20) -> Evidence:
    """Every request misses its first token, waiting for the cap, which is all in use. `started`: of
    the 20 that come in a tick."""
    busy = {
        "arrivals": 20, "finished": 8, "steps": 200, "decodes": 800, "prefill_tokens": 400,
        "generated_tokens": 800, "busy_s": 1.9, "running": 4, "max_running": 4,
        "ttft": FirstTokens(started, started, Causes(cap=started), {380: started}),
        "itl": TokenGaps(800, 0, 0, 800, 0, {120: 800}), "waiting": Waiting(cap=30),
    }  # fmt: skip
    ticks = [create_tick(seq, **busy) for seq in range(1, num_ticks + 1)]
    model = StepModel(a=2.0, b=0.5, c=0.0, d=0.05, n=4000, resid_q=1.2)
    return create_evidence(ticks=ticks, lengths=Lengths(150, 30, 200), step_model=model)


def test_a_breach_raises_the_cap_persists_it_first_and_tells_with_its_numbers() -> None:
    service = create_service()
    now = NOW + 62
    scrape = replace(create_scrape(running=4), evidence=_breached(30), seen_s=now)
    observed = replace(_serving(service), scrapes={"uid-demo-1": scrape})
    planned = _plan(service, observed, now)
    assert planned.runtime is not None
    assert planned.runtime.cap is not None
    assert planned.runtime.cap > 4
    assert planned.runtime.epoch == 2
    data = planned.apply[0]["data"]
    assert (data["epoch"], data["cap"]) == ("2", str(planned.runtime.cap))
    assert [item.patch.epoch for item in planned.patches] == [2]
    [told] = [n for n in _notices(planned) if n.message.startswith("epoch 2: cap 4 ->")]
    assert "timeToFirstToken 500ms: n=600, over=600, Breach" in told.message


def test_advice_changes_nothing() -> None:
    service = create_service(slo__mode="Advisory")
    now = NOW + 62
    scrape = replace(create_scrape(running=4), evidence=_breached(30), seen_s=now)
    observed = replace(_serving(service), scrapes={"uid-demo-1": scrape})
    planned = _plan(service, observed, now)
    assert planned.runtime is not None
    assert (planned.runtime.cap, planned.runtime.epoch) == (4, 1)
    assert planned.patches == ()


def test_a_pod_at_the_running_config_is_left_alone() -> None:
    service = create_service()
    assert create_config().epoch == 1
    assert _plan(service, _serving(service)).patches == ()


def test_the_status_says_why_the_cap_and_the_replicas_are_what_they_are() -> None:
    status: Any = _plan(create_service(), _serving(create_service()), NOW + 2).status
    assert status["batching"]["reason"] == Reason.METRICS_UNAVAILABLE
    assert "no pod has closed" in status["batching"]["message"]
    assert "proposed" not in status["batching"]


def test_advisory_mode_reports_what_it_would_do() -> None:
    service = create_service(slo__mode="Advisory")
    scrape = replace(create_scrape(running=4), evidence=_breached(30), seen_s=NOW + 62)
    observed = replace(_serving(service), scrapes={"uid-demo-1": scrape})
    status: Any = _plan(service, observed, NOW + 62).status
    assert status["batching"]["cap"] == 4
    assert status["batching"]["proposed"] > 8  # as far as the step model sees
    assert status["batching"]["reason"] == Reason.HEADROOM


def test_decisions_are_told_before_what_may_be_refused_each_with_its_own_numbers() -> None:
    service = create_service()
    scrape = replace(create_scrape(running=4), evidence=_breached(30, started=8), seen_s=NOW + 62)
    observed = replace(_serving(service), scrapes={"uid-demo-1": scrape}, previous={})
    planned = _plan(service, observed, NOW + 62)
    reasons = [notice.reason for notice in planned.decided]
    assert reasons == [Reason.HEADROOM, Reason.SCALED_OUT]
    cap, replicas = (notice.message for notice in planned.decided)
    assert "waited for the cap" in cap
    assert "arrivals/s" not in cap
    assert "arrivals/s" in replicas
    assert "waited for the cap" not in replicas
    assert Reason.TARGET_MISSED in {notice.reason for notice in planned.noticed}


def test_what_a_pod_that_is_gone_served_belongs_to_the_promise() -> None:
    service, now = create_service(), NOW + 62
    gone = replace(create_scrape(), evidence=_breached(30), seen_s=now)
    observed = _serving(service)
    observed = replace(observed, scrapes={**observed.scrapes, "uid-gone": gone})
    planned = _plan(service, observed, now)
    slo: Any = planned.status["slo"]
    assert (slo["timeToFirstToken"]["over"], slo["met"]) == (600, False)
    assert planned.patches == ()


def test_a_lost_configmap_keeps_the_replicas_and_the_cap_that_serve() -> None:
    service = create_service(scaling__maxReplicas=8)
    pods = tuple(create_pod(f"demo-{i}") for i in range(6))
    scrapes = {pod.uid: create_scrape(epoch=7, cap=12) for pod in pods}
    first = create_observed(service, pods=pods, scrapes=scrapes, runtime=DecidedRuntime(7, 12, 6))
    written = _after(_plan(service, first), first)
    planned = _plan(service, replace(written, runtime=None))
    assert planned.runtime is not None
    assert (planned.runtime.replicas, planned.runtime.cap) == (6, 12)
    assert planned.runtime.epoch == 8


def test_a_lost_configmap_keeps_the_least_cap_that_was_decided_and_no_first_one() -> None:
    """Pods that missed a raise, and one that has just started with what it predicts."""
    service = create_service()
    said = {"demo-1": (7, 12), "demo-2": (6, 9), "demo-3": (0, 3)}
    pods = tuple(create_pod(name) for name in said)
    scrapes = {
        pod.uid: create_scrape(epoch=epoch, cap=cap)
        for pod, (epoch, cap) in zip(pods, said.values(), strict=True)
    }
    planned = _plan(service, create_observed(service, pods=pods, scrapes=scrapes))
    assert planned.runtime is not None
    assert (planned.runtime.cap, planned.runtime.epoch) == (9, 8)


def test_windows_of_scaling_are_the_object_s() -> None:
    behavior = {
        "scaleUp": {"stabilizationWindowSeconds": 7},
        "scaleDown": {"stabilizationWindowSeconds": 11},
    }
    limits = limits_of(create_service(scaling__behavior=behavior).spec, 32)
    assert (limits.scale_up_window_s, limits.scale_down_window_s) == (7, 11)


def test_a_child_that_is_edited_again_and_again_is_told_of_once_in_ten_minutes() -> None:
    service = create_service()
    observed = _serving(service)
    told = set()
    for version in range(10, 200):
        edited = json.loads(json.dumps(observed.live["Service"]))
        edited["spec"]["selector"] = {"app": "mine"}
        edited["metadata"]["resourceVersion"] = str(version)
        live = {**observed.live, "Service": edited}
        planned = _plan(service, replace(observed, live=live), NOW + version)
        told |= {n.key for n in _notices(planned) if n.reason == Reason.CHILD_RESTORED}
    assert 1 <= len(told) <= 2


def test_quantised_weights_are_sized_as_they_are_loaded() -> None:
    plain = create_fit(create_service().spec)
    quantised = create_fit(create_service(engine__args=["--quantization=w8a8"]).spec)
    blocks = create_fit(create_service(engine__args=["--num-gpu-blocks-override=9"]).spec)
    assert plain.memory is not None
    assert quantised.memory is not None
    assert blocks.memory is not None
    assert quantised.memory.weights_bytes < 0.6 * plain.memory.weights_bytes
    assert blocks.memory.num_blocks == 9


def _budgeted(tokens: int | None) -> list[str]:
    """Arguments of an engine whose tuner remembers this budget."""
    service = create_service(engine={"name": "SGLang"}, slo__interTokenLatency="50ms")
    limits = limits_of(service.spec, 32).chunk
    assert limits is not None
    budget = ChunkBudget(tokens, NOW, f"{limits.key}|50.0") if tokens else None
    runtime = DecidedRuntime(1, 4, 1, past=Past(chunk_budget=budget))
    planned = _plan(service, create_observed(service, runtime=runtime))
    pods = next(manifest for manifest in planned.apply if manifest["kind"] == "Deployment")
    args: list[str] = pods["spec"]["template"]["spec"]["initContainers"][-1]["args"]
    return [arg for arg in args if "prefill" in arg]


def test_an_engine_with_fixed_chunks_starts_with_the_budget_that_the_tuner_found() -> None:
    assert _budgeted(None) == []  # the engine's own
    assert _budgeted(512) == ["--chunked-prefill-size=512"]
    asked = {"batching__maxNumBatchedTokens": 2048}
    service = create_service(engine={"name": "SGLang"}, slo__interTokenLatency="50ms", **asked)
    assert limits_of(service.spec, 32).chunk is None


@pytest.mark.parametrize(("changes", "may_roll"), [({}, True), ({"rollout": "Replace"}, False)])
def test_a_budget_is_only_proposed_where_an_edit_stops_the_last_pod(
    changes: dict[str, Any], may_roll: bool
) -> None:
    spec = {"engine": {"name": "LlamaCpp"}, "slo__interTokenLatency": "50ms", **changes}
    chunk = limits_of(create_service(**spec).spec, 100).chunk
    assert chunk is not None
    assert (chunk.may_roll, chunk.least) == (may_roll, 100)
    assert limits_of(create_service(slo__interTokenLatency="50ms").spec, 32).chunk is None
