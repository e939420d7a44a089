"""`sluice status`: one page from the object and its events."""

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
from sluice.__main__ import main
from sluice.status import MAX_EVENTS, UNSEEN, describe
from unit.cli.served import service_under_traffic

FORBIDDEN = 'Error from server (Forbidden): events is forbidden: User "dev" cannot list'


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


def test_fields_that_are_not_there_are_dashes() -> None:
    """As of another version of the operator, which reads no field back that it does not need."""
    body = service_under_traffic()
    status = body["status"]
    del status["batching"]["epoch"], status["batching"]["lastChange"]["time"]
    for target in (part for part in status["slo"].values() if isinstance(part, dict)):
        del target["allowedPercent"], target["samplesNeeded"]
    for change in status["scaling"]["history"]:
        del change["reason"], change["from"]
    for entry in status["conditions"]:
        del entry["reason"], entry["type"]
    said = describe(body, [{"lastTimestamp": "t1", "message": "no reason"}])
    for part in ("epoch -", "2 -> 4 at -: Headroom", "- -> 1: -", "-=False", "t1  -: no reason"):
        assert part in said, said


def test_an_object_that_is_being_deleted_says_so_whether_it_was_seen_or_not() -> None:
    body = service_under_traffic()
    body["metadata"]["deletionTimestamp"] = "2026-01-02T03:04:05Z"
    clause = "; it is being deleted, since 2026-01-02T03:04:05Z"
    assert describe(body, []).splitlines()[1].endswith(clause)
    del body["status"]
    assert describe(body, []).endswith(clause)


def test_a_cap_that_is_not_used_is_told_instead_of_rare_traffic() -> None:
    body = service_under_traffic()
    status = body["status"]
    status["slo"]["timeToFirstToken"] |= {"samplesNeeded": 299, "verifiable": False}
    assert "299 (over an hour at this traffic)" in describe(body, [])
    status["batching"]["reason"] = "CapUnused"
    said = describe(body, [])
    assert "299 (the cap is unused)" in said
    assert "over an hour" not in said


@pytest.fixture
def kubectl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder whose object.json is what kubectl gives; events may not be listed."""
    script = tmp_path / "kubectl"
    script.write_text(
        f'#!/bin/sh\ncase "$*" in *events*) echo {shlex.quote(FORBIDDEN)} >&2; exit 1;; esac\n'
        f"cat {shlex.quote(str(tmp_path))}/object.json\n"
    )
    script.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    return tmp_path


def test_events_that_may_not_be_listed_are_told_below_the_rest(
    kubectl: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (kubectl / "object.json").write_text(json.dumps(service_under_traffic()))
    assert main(["status", "demo"]) == 0
    told = capfd.readouterr()
    assert "4 of at most 64, epoch 1" in told.out
    assert told.out.splitlines()[-2] == "Events"
    assert told.out.splitlines()[-1].startswith("  cannot be listed: kubectl get ")
    assert told.out.endswith(" failed\n")
    assert told.err == f"{FORBIDDEN}\n"


@pytest.mark.parametrize("command", ["status", "report"])
@pytest.mark.parametrize(
    ("path", "value"),
    [("status", ["4"]), ("status.batching", "4"), ("status.load", [1]), ("status.memory", "1Gi")],
)
def test_a_status_of_another_shape_is_one_sentence_and_code_2(
    kubectl: Path, command: str, path: str, value: object, capsys: pytest.CaptureFixture[str]
) -> None:
    body: dict[str, Any] = service_under_traffic()
    *parents, last = path.split(".")
    part = body
    for parent in parents:
        part = part[parent]
    part[last] = value
    (kubectl / "object.json").write_text(json.dumps(body))
    assert main([command, "demo"]) == 2
    told = capsys.readouterr()
    assert told.out == ""
    assert told.err.startswith(f"sluice {command}: its status is of another version: ")
    assert told.err.count("\n") == 1


def test_failed_requests_are_told_by_how() -> None:
    said = describe(service_under_traffic(failed={"500": 1}), ())
    assert "failed requests: 60 500 (20 %)" in said
    assert "RequestsSucceed=False (RequestsFail)" in said
    assert "failed requests" not in describe(service_under_traffic(), ())
