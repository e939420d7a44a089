"""What `make rolls` counts as lost, and draws."""

import json

from e2e.rolls import Load, Report, Step, rates


def _phase(sent: int, ok: int, retries: int, **details: int) -> str:
    counts = {"sent": sent, "results": {"ok": ok}, "retries": retries, "details": details}
    return json.dumps({"phase": "0", **counts})


def test_a_request_that_was_answered_at_its_second_try_is_lost() -> None:
    load = Load()
    load.read(iter([_phase(10, 10, 1, refused=1), _phase(5, 4, 0, cut=1), _phase(7, 7, 0)]))
    report = Report([Step("roll", 0.0, 1.0)], loads={"streams": load})
    assert (report.num_sent, report.num_lost, load.is_ended) == (22, 2, True)
    assert str(report) == "1 rolls: 2 of 22 requests lost; 1 x refused; 1 x cut"


def test_a_phase_begins_its_count_anew() -> None:
    lines = [("0", 2.0, 4), ("0", 4.0, 10), ("1", 6.0, 1), ("1", 8.0, 3)]
    progress = [{"name": name, "t_s": t_s, "done": done} for name, t_s, done in lines]
    assert rates(progress) == [(4.0, 3.0), (8.0, 1.0)]
