"""What the API server says that is no fault of ours ends nothing."""

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


def test_a_watch_that_ends_with_an_error_is_begun_anew(
    apiserver: ApiServer, models: Path, tmp_path: Path
) -> None:
    log = tmp_path / "operator.log"
    with administrator(apiserver) as client, gateway(apiserver, tmp_path) as (way, through):
        space = create_namespace(client, "no-leader")
        create_demo(space)
        with running_operator(through, models, log) as operator:
            settle(operator, space)
            way.fail()
            operator.wait("the error", lambda: "watching anew" in log.read_text(), LONG_S)
            way.fails = False
            space.delete("deployments", "demo")
            operator.wait("a new Deployment", space.has_children, LONG_S)
            assert operator.process.poll() is None
