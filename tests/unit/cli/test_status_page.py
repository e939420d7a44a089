"""`sluice status`: one page from the object and its events."""

from sluice.status import MAX_EVENTS, UNSEEN, describe
from unit.cli.served import service_under_traffic


def event(number: int) -> dict[str, str]:
    return {"lastTimestamp": f"t{number}", "reason": "Headroom", "message": f"epoch {number}"}


def test_page_tells_plan_cap_evidence_conditions_and_history() -> None:
    said = describe(service_under_traffic(), [event(n) for n in range(MAX_EVENTS + 3)])
    for part in (
        "default/demo\n  file:///models/demo at http://demo.default.svc",
        "planned (GiB): total",
        "the KV cache of a pod holds 4096 tokens",
        "4 of at most 64, epoch 1",
        "last change: 2 -> 4",
        "late first tokens by cause: 6 cap",
        "2 -> 1: LowDemand",
        "SLOMet=False (TargetMissed)",
        "(3 older ones)",
        f"epoch {MAX_EVENTS + 2}",
    ):
        assert part in said, said
    rows = [line.split() for line in said.splitlines() if "timeToFirstToken " in line]
    assert [rows[0][1], *rows[0][3:5]] == ["500ms", "240", "6"]


def test_object_that_no_operator_has_seen_is_told_without_a_guess() -> None:
    body = service_under_traffic()
    del body["status"]
    assert describe(body, []) == f"default/demo\n  file:///models/demo: {UNSEEN}"


def test_object_whose_address_is_not_known_is_told_with_its_generation() -> None:
    body = service_under_traffic()
    body["status"] = {"conditions": []}
    said = describe(body, [])
    assert "no address yet (of generation 0; the spec is at 3)" in said
    assert "0 of 0 ready" in said
    assert "Cap" not in said
