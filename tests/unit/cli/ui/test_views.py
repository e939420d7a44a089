"""What the pages say, in which order, and that nothing of others becomes markup."""

from __future__ import annotations

import re
from collections.abc import Mapping
from html import unescape
from typing import Any

import pytest
from sluice.page import Html
from sluice.ui import views
from sluice.ui.history import History, of_status
from sluice.ui.objects import Detail, Fleet, in_order, marks_of, pod_rows
from sluice_core.words import clean, clean_all
from sluice_operator.reasons import Reason
from sluice_operator.status import events
from unit.cli.served import NUM_TICKS, service_under_traffic
from unit.operator.observations import NOW, pod_body

HOSTILE = '<script>alert(1)</script>" onload="x\x1b[31m\u202e&amp;'
AT = NOW + 2 * NUM_TICKS + 2


def named(name: str, verdict: str, measured: str = "600ms", ready: str = "True") -> dict[str, Any]:
    """A service whose first tokens have that verdict, of a target of 500 ms."""
    body = service_under_traffic()
    body["metadata"] |= {"name": name, "uid": f"uid-{name}"}
    body["status"]["slo"]["timeToFirstToken"] |= {"verdict": verdict, "measured": measured}
    body["status"]["slo"]["interTokenLatency"]["verdict"] = "NoTraffic"
    for condition in body["status"]["conditions"]:
        if condition["type"] == "Ready":
            condition["status"] = ready
    return body


def fleet(
    *services: Mapping[str, Any], batches: tuple[Mapping[str, Any], ...] = (), **more: Any
) -> Fleet:
    """The services as they were read, with a history of one look each."""
    read = clean_all(services)
    histories = {body["metadata"]["uid"]: History() for body in read}
    for body in read:
        histories[body["metadata"]["uid"]].add(AT, of_status(body.get("status") or {}))
    return Fleet(read, clean_all(batches), AT, histories=histories, **more)


def batch(**status: Any) -> dict[str, Any]:
    """A batch of the service demo."""
    return {
        "metadata": {"name": "nightly", "namespace": "default"},
        "spec": {"serviceRef": {"name": "demo"}},
        "status": {
            "state": "in_progress", "counts": {"total": 200, "completed": 49, "failed": 1},
            "rate": "2.5", "timeLeft": 60, **status,
        },
    }  # fmt: skip


def texts(page: str) -> str:
    """The page without its tags."""
    return " ".join(unescape(re.sub("<[^>]*>", " ", page)).split())


def test_those_that_breach_are_first_and_the_worst_of_them_before_the_others() -> None:
    order = in_order(
        [
            named("quiet", "NoTraffic"),
            named("fine", "Headroom", "20ms"),
            named("starts", "NoTraffic", ready="False"),
            named("close", "Hold", "490ms"),
            named("late", "Breach", "600ms"),
            named("awful", "Breach", "9s"),
        ]
    )
    names = [body["metadata"]["name"] for body in order]
    assert names == ["awful", "late", "starts", "close", "fine", "quiet"]
    page = views.fleet(fleet(*order), AT)
    assert re.findall(r'href="/services/default/(\w+)"', page) == names
    assert "services: 6, over a target: 2" in texts(page)


def test_a_service_of_another_version_is_named_among_the_others() -> None:
    broken = named("broken", "Hold")
    broken["status"] = {"slo": "none", "conditions": []}
    seen = fleet(named("fine", "Headroom"))
    seen = Fleet(
        (*seen.services, broken), (), AT, histories={**seen.histories, "uid-broken": History()}
    )
    assert "its status is of another version" in texts(views.fleet(seen, AT))
    assert "its status is of another version" in texts(views.service(seen, broken, Detail(), AT))


def test_an_empty_cluster_says_so_and_one_that_has_not_answered_does_not() -> None:
    assert "There is no InferenceService here." in texts(views.fleet(Fleet(at_s=AT), AT))
    said = texts(views.fleet(Fleet(problem="the API server does not answer: refused"), AT))
    assert "the API server does not answer: refused." in said
    assert "There is no InferenceService" not in said


def test_data_that_is_old_is_shown_with_its_time() -> None:
    seen = fleet(named("demo", "Hold"), problem="the API server does not answer: refused")
    said = texts(views.fleet(seen, AT + 60))
    assert re.search(r"refused\. All below is old: data of \d\d:\d\d:\d\d\.", said)
    assert "demo" in said


def test_one_service_shows_targets_decisions_pods_memory_batches_and_the_report() -> None:
    body = service_under_traffic()
    notice = events.Notice(False, Reason.HEADROOM, "epoch 1: cap 2 -> 4: room", "epoch/1")
    told = [events.manifest(body["metadata"], notice, NOW)]
    other = batch() | {"metadata": {"name": "of-another", "namespace": "elsewhere"}}
    page = views.service(
        fleet(body, batches=(batch(), other)), body, Detail([pod_body(phase="Running")], told), AT
    )
    said = texts(page)
    for part in (
        "P99 of first tokens", "target 500 ms", "P99 of gaps between tokens",
        "Headroom: epoch 1: cap 2 -> 4: room", "replicas 2 -> 1", "cap now", "demo-1 Running 0",
        "planned", "KV cache", "default/nightly", "50 of 200, 1 failed", "2.5/s", "60 s",
        "97.500%", "CPU-seconds for 1,000 tokens", "SLOMet False TargetMissed",
    ):  # fmt: skip
        assert part in said, (part, said)
    assert "of-another" not in said
    assert 'class="line purple"' in page


def test_a_change_is_told_by_its_event_or_where_that_is_gone_by_the_status_once() -> None:
    body = service_under_traffic()
    notice = events.Notice(False, Reason.HEADROOM, "epoch 1: cap 2 -> 4: room", "epoch/1")
    told = events.manifest(body["metadata"], notice, NOW)
    by_event = [mark.text for mark in marks_of(body, [told], AT) if "cap 2 -> 4" in mark.text]
    assert by_event == ["Headroom: epoch 1: cap 2 -> 4: room"]
    by_status = [mark.text for mark in marks_of(body, [], AT) if "cap 2 -> 4" in mark.text]
    assert by_status == [f"Headroom: cap 2 -> 4: {Reason.HEADROOM.meaning}"]
    assert [mark.number for mark in marks_of(body, [told], AT)] == [1, 2]
    assert marks_of(body, [told], AT + 3600) == []


def test_words_of_others_are_shown_as_text() -> None:
    body = service_under_traffic()
    body["metadata"]["name"] = body["spec"]["model"]["uri"] = HOSTILE
    body["status"]["batching"]["reason"] = HOSTILE
    for condition in body["status"]["conditions"]:
        condition["message"] = condition["reason"] = HOSTILE
    told = [{"lastTimestamp": "2025-10-09T08:53:20Z", "reason": HOSTILE, "message": HOSTILE}]
    waiting = {"waiting": {"reason": "ImagePullBackOff", "message": HOSTILE}}
    pod = pod_body(HOSTILE, phase=HOSTILE, conditions=[], containerStatuses=[{"state": waiting}])
    owned = batch(state=HOSTILE, rate=HOSTILE)
    owned["spec"]["serviceRef"]["name"] = HOSTILE
    notes = (clean(HOSTILE),)
    seen = fleet(body, batches=(owned,), notes=notes, problem=notes[0])
    detail = Detail(clean_all([pod]), clean_all(told), notes)
    for page in (views.fleet(seen, AT), views.service(seen, seen.services[0], detail, AT)):
        assert isinstance(page, Html)
        assert page.count("<script") == 1, "its own, of the head"
        assert "<script>" not in page
        assert not re.search(r"<[^>]*\sonload=", page)
        assert "&lt;script&gt;alert(1)&lt;/script&gt;" in page
    shown = views.service(seen, seen.services[0], detail, AT)
    assert "\x1b" not in shown
    assert "\\x1b[31m\\u202e&amp;amp;" in shown


@pytest.mark.parametrize(
    ("status", "shown"),
    [
        ({"phase": "Running"}, "Running"),
        ({"phase": "Running", "conditions": []}, "Running, not ready"),
        ({"phase": "Pending", "conditions": []}, "Pending"),
    ],
)
def test_a_pod_is_shown_with_its_phase(status: dict[str, Any], shown: str) -> None:
    [row] = pod_rows([pod_body(**status)], NOW)
    assert row[:2] == ("demo-1", shown)
