"""An operator that cannot go on says why in a line, and ends."""

from __future__ import annotations

from pathlib import Path

from integration.apiserver import ApiServer
from integration.operator_runs import (
    CRD,
    LONG_S,
    administrator,
    create_demo,
    create_namespace,
    running_operator,
    settle,
)


def test_an_operator_whose_crd_is_deleted_ends_without_a_traceback(
    apiserver: ApiServer, models: Path, tmp_path: Path
) -> None:
    log = tmp_path / "operator.log"
    with administrator(apiserver) as client:
        space = create_namespace(client, "no-crd")
        create_demo(space)
        with running_operator(apiserver, models, log) as operator:
            settle(operator, space)
            try:
                assert client.delete(CRD).is_success
                status = operator.process.wait(timeout=LONG_S)
            finally:
                with administrator(apiserver):  # what comes after this test needs it
                    pass
    assert status == 1
    assert "sluice-operator: it cannot go on: " in log.read_text()
