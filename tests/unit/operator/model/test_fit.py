"""Whether a model fits, and how many sequences memory and the object allow."""

from dataclasses import replace
from typing import Any

import pytest
from sluice_operator.children.runtime import DecidedRuntime
from sluice_operator.model.checkpoint import Unread
from sluice_operator.model.fit import ceiling_of, judge
from sluice_operator.plan.plan import plan
from sluice_operator.reasons import Reason
from unit.operator.objects import static_batches
from unit.operator.observations import (
    CHECKPOINT,
    NOW,
    SETTINGS,
    create_fit,
    create_observed,
    create_pod,
    create_scrape,
    create_service,
)

UNREAD = Unread("the hub is away")


def test_quantised_weights_of_a_type_that_they_cannot_be_made_of_are_refused() -> None:
    spec = create_service(engine__args=["--quantization=w8a8"]).spec
    fit = judge(spec, replace(CHECKPOINT, dtype="float16"))
    assert (fit.status, fit.reason) == ("False", Reason.IMPOSSIBLE_SIZE)
    assert "needs dtype bfloat16 or float32" in fit.message


@pytest.mark.parametrize(
    ("changes", "ceiling", "limited_by"),
    [
        ({}, 202, "VRAM"),
        ({"hardware__memory": "3Gi"}, 256, "User"),  # as long as maxNumSeqs is Auto
        ({"batching__maxNumSeqs": 64}, 64, "User"),
        ({"batching__maxNumSeqs": 64, "batching__maxNumBatchedTokens": 32}, 32, "User"),
        ({"batching": static_batches(8)}, 8, "User"),
        ({"batching": static_batches(300)}, 202, "VRAM"),
        ({"engine__args": ["--num-gpu-blocks-override=200"]}, 18, "VRAM"),
    ],
)
def test_a_ceiling_is_memorys_only_where_memory_is_what_ends_it(
    changes: dict[str, Any], ceiling: int, limited_by: str
) -> None:
    service = create_service(**changes)
    assert ceiling_of(service.spec, create_fit(service.spec)) == ceiling
    pod = create_pod()
    scrapes = {pod.uid: create_scrape(ceiling=ceiling, cap=ceiling)}
    seen = create_observed(
        service, pods=(pod,), scrapes=scrapes, runtime=DecidedRuntime(1, ceiling, 1)
    )
    batching: Any = plan(service, seen, SETTINGS, NOW).status["batching"]
    assert (batching["ceiling"], batching["limitedBy"]) == (ceiling, limited_by)


def test_no_ceiling_that_a_pod_reports_is_more_than_the_object_may_ask_for() -> None:
    """Any image may stand for the worker's."""
    service, pod = create_service(), create_pod()
    seen = create_observed(
        service,
        fit=judge(service.spec, UNREAD),
        pods=(pod,),
        scrapes={pod.uid: create_scrape(ceiling=1 << 53)},
        runtime=DecidedRuntime(1, 4, 1),
    )
    batching: Any = plan(service, seen, SETTINGS, NOW).status["batching"]
    assert batching["ceiling"] == 4096


def test_what_limits_a_model_that_nobody_has_read_is_not_known() -> None:
    service = create_service(batching__initialNumSeqs=6)
    seen = create_observed(service, fit=judge(service.spec, UNREAD))
    batching: Any = plan(service, seen, SETTINGS, NOW).status["batching"]
    assert (batching["cap"], "limitedBy" in batching) == (6, False)


def test_a_model_that_cannot_be_read_gets_no_more_sequences_than_a_step_has_tokens() -> None:
    spec = create_service(batching__maxNumSeqs=4096).spec
    assert ceiling_of(spec, judge(spec, UNREAD)) == 2048
    roomy = create_service(batching__maxNumSeqs=4096, batching__maxNumBatchedTokens=8192).spec
    assert ceiling_of(roomy, judge(roomy, UNREAD)) == 4096
    auto = create_service().spec
    assert ceiling_of(auto, judge(auto, UNREAD)) is None
