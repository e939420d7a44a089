"""An API server that fails: the operator ends with a line, and the next process goes on."""

from __future__ import annotations

from pathlib import Path

from integration.apiserver import ApiServer
from integration.gateway import gateway
from integration.operator_runs import (
    LONG_S,
    administrator,
    create_demo,
    create_namespace,
    running_operator,
    settle,
)


def test_a_watch_that_fails_ends_the_operator_and_the_next_one_goes_on(
    apiserver: ApiServer, models: Path, tmp_path: Path
) -> None:
    log = tmp_path / "operator.log"
    with administrator(apiserver) as client, gateway(apiserver, tmp_path) as (way, through):
        space = create_namespace(client, "no-leader")
        create_demo(space)
        with running_operator(through, models, log) as operator:
            settle(operator, space)
            way.fail()
            assert operator.process.wait(timeout=LONG_S) == 1
        assert "it cannot go on: WatchingError: " in log.read_text()
        way.fails = False
        space.delete("deployments", "demo")
        with running_operator(through, models, log) as operator:  # the kubelet starts it again
            operator.wait("a new Deployment", space.has_children, LONG_S)
