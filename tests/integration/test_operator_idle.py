"""What idle objects cost the API server: nothing more where there are more of them."""

from __future__ import annotations

import time
from pathlib import Path

from integration.apiserver import ApiServer
from integration.operator_runs import (
    Namespace,
    OperatorProcess,
    running_operator,
)
from unit.operator.objects import changed, valid_object

RESYNC_S, WATCHED_S = 2.0, 16.0
FEW, MANY = 10, 40


def create(space: Namespace, numbers: range, uri: str) -> None:
    for number in numbers:
        body = changed(valid_object(f"idle-{number}"), "spec.model.uri", uri)
        body["metadata"]["namespace"] = space.name
        space.create("inferenceservices", body)


def reads(operator: OperatorProcess) -> float:
    """Reads a second, once nothing is written any more."""

    def is_idle() -> bool:
        before = operator.writes()
        operator.await_passes(MANY)
        return operator.writes() == before

    operator.wait("nothing to do", is_idle, 120.0)
    before, began_s = operator.metric(NAME, verb="GET"), time.monotonic()
    time.sleep(WATCHED_S)  # what is measured is the time in which nothing happens
    num = operator.metric(NAME, verb="GET") - before
    return num / (time.monotonic() - began_s)


NAME = "sluice_operator_api_requests_total"


def test_four_times_as_many_idle_objects_are_read_no_more_often(
    apiserver: ApiServer, space: Namespace, models: Path, tmp_path: Path
) -> None:
    """200 of them took 1,470 reads a minute, and those that do not fit 674."""
    flag = f"--resync-seconds={RESYNC_S}"
    with running_operator(apiserver, models, tmp_path / "log", space.name, flag) as operator:
        create(space, range(FEW), "file:///models/demo")
        few = reads(operator)
        create(space, range(FEW, MANY), "file:///models/demo")
        many = reads(operator)
        assert len(space.ours("deployments")) == MANY
        create(space, range(MANY, 2 * MANY), "file:///models/huge")
        more = reads(operator)
        print(f"reads a second: {few:.1f} of {FEW}, {many:.1f} of {MANY}, {more:.1f} of {2 * MANY}")
        assert 0 < many < 1.5 * few
        assert more < 1.5 * few
