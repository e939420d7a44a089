"""Whatever a valid object says: a plan, sound children, and a status that the API keeps."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jsonschema
from hypothesis import given, settings
from hypothesis import strategies as st
from sluice_operator.plan.plan import plan
from sluice_operator.spec.service import parse
from sluice_operator.status.schema import STATUS as STATUS_SCHEMA
from unit.operator.objects import Object, valid_objects
from unit.operator.observations import (
    NOW,
    SETTINGS,
    create_evidence,
    create_fit,
    create_observed,
    create_pod,
    create_scrape,
    create_tick,
)


def _strict(schema: dict[str, Any]) -> dict[str, Any]:
    """The schema as pruning sees it: a field that it does not name would be lost."""
    made: dict[str, Any] = {}
    for key, value in schema.items():
        if key == "properties":
            made[key] = {name: _strict(inner) for name, inner in value.items()}
            made["additionalProperties"] = False
        else:
            made[key] = _strict(value) if key == "items" else value
    return made


STATUS = jsonschema.Draft202012Validator(_strict(STATUS_SCHEMA))


def _body(body: Object) -> Object:
    meta = {"namespace": "default", **body["metadata"], "uid": "uid-1", "generation": 1}
    return {**body, "metadata": meta}


@settings(max_examples=150)
@given(valid_objects(), st.booleans(), st.sampled_from(["", "Unschedulable", "CrashLoopBackOff"]))
def test_every_valid_object_is_planned_and_its_status_survives_pruning(
    body: Object, serving: bool, trouble: str
) -> None:
    service = parse(_body(body))
    waiting = [{"state": {"waiting": {"reason": trouble, "message": "m"}}, "restartCount": 2}]
    status: dict[str, Any] = {"containerStatuses": waiting, "conditions": []} if trouble else {}
    pod = create_pod(**status)
    evidence = create_evidence(ticks=[create_tick(1, arrivals=3)])
    scrape = replace(create_scrape(), evidence=evidence)
    observed = create_observed(
        service,
        fit=create_fit(service.spec),
        pods=(pod,) if serving else (),
        scrapes={pod.uid: scrape},
    )
    planned = plan(service, observed, SETTINGS, NOW)
    STATUS.validate(planned.status)
    if observed.fit.status == "False":
        assert planned.apply == ()
    else:
        assert {m["metadata"]["namespace"] for m in planned.apply} == {service.namespace}
        assert all(len(m["metadata"]["name"]) <= 63 for m in planned.apply)
