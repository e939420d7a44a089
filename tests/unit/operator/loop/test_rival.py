"""Claims on who counts as another writer of the Deployment's replicas."""

from __future__ import annotations

from typing import Any

from sluice_operator.plan.rival import Rivalry, after
from sluice_operator.settings import FIELD_MANAGER


def _live(replicas: int, writer: str, generation: int) -> dict[str, Any]:
    owned: dict[str, Any] = {"f:spec": {"f:replicas": {}}}
    entry = {"manager": writer, "operation": "Update", "subresource": "scale", "fieldsV1": owned}
    other = {"manager": FIELD_MANAGER, "fieldsV1": {"f:spec": {"f:template": {}}}}
    meta = {"generation": generation, "managedFields": [other, entry]}
    return {"metadata": meta, "spec": {"replicas": replicas}}


def _seen(*edits: tuple[dict[str, Any], float], generation: int = 1) -> Rivalry:
    known = Rivalry()
    for live, now in edits:
        known = after(known, live, 1, generation, now)
    return known


def test_who_sets_the_number_again_after_it_was_put_back_keeps_it() -> None:
    back = _live(1, FIELD_MANAGER, 3)
    known = _seen((_live(3, "hpa", 2), 0.0), (back, 1.0), (_live(3, "hpa", 4), 15.0))
    assert known.writer == "hpa"
    assert after(known, _live(1, FIELD_MANAGER, 5), 1, 1, 9_000.0).writer == "hpa"
    assert after(known, _live(1, FIELD_MANAGER, 5), 1, 2, 16.0).writer == "", "an edit ends it"


def test_an_edit_that_is_not_put_back_yet_is_one_however_often_it_is_seen() -> None:
    assert _seen(*((_live(3, "kubectl", 2), float(n)) for n in range(10))).writer == ""


def test_two_writers_and_two_edits_far_apart_are_no_controller() -> None:
    assert _seen((_live(3, "a", 2), 0.0), (_live(3, "b", 4), 15.0)).writer == ""
    assert _seen((_live(3, "a", 2), 0.0), (_live(3, "a", 4), 900.0)).writer == ""


def test_our_own_number_that_is_on_its_way_is_nobodys_edit() -> None:
    edits = [(_live(3, FIELD_MANAGER, generation), float(generation)) for generation in range(5)]
    assert _seen(*edits) == Rivalry(generation=1)
