"""`sluice status` and `sluice report` of an object on a real API server, read through kubectl."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from typing import Any

import pytest
from integration.apiserver import ApiServer
from integration.operator_runs import Namespace, administrator, create_namespace
from sluice.__main__ import main
from sluice_operator.reasons import Reason
from sluice_operator.status import events
from unit.cli.served import service_under_traffic
from unit.operator.observations import NOW


@pytest.fixture
def demo(apiserver: ApiServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[Namespace]:
    """A namespace with the object demo, its status and an event, and kubectl on the path."""
    folder = apiserver.kubectl.parent
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("KUBECONFIG", str(apiserver.kubeconfig))
    with administrator(apiserver) as client:
        space = create_namespace(client, f"report-{os.urandom(4).hex()}")
        body = service_under_traffic()
        body["metadata"] = {"name": "demo", "namespace": space.name}
        made = space.create("inferenceservices", body)
        status = {"status": body["status"]}
        stored = space.patch("inferenceservices", "demo", status, subresource="status")
        assert stored["status"] == body["status"], "the schema keeps every field of the status"
        notice = events.Notice(False, Reason.HEADROOM, "epoch 1: cap 2 -> 4", "epoch/1")
        space.create("events", events.manifest(made["metadata"], notice, NOW))
        earlier = made["metadata"] | {"uid": "of-an-object-that-is-gone"}
        notice = events.Notice(False, Reason.HEADROOM, "of an earlier object", "epoch/1")
        space.create("events", events.manifest(earlier, notice, NOW))
        yield space


def test_status_is_one_page_from_the_object_and_its_events(
    demo: Namespace, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["status", "demo", "-n", demo.name]) == 0
    said = capsys.readouterr().out
    assert said.startswith(f"{demo.name}/demo\n")
    assert "Headroom: epoch 1: cap 2 -> 4" in said
    assert "of an earlier object" not in said
    assert "SLOMet=False" in said


def test_report_is_text_or_json(demo: Namespace, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", "demo", "-n", demo.name, "--price", "0.1"]) == 0
    text = capsys.readouterr().out
    assert "CPU-seconds for 1,000 tokens, " in text
    assert main(["report", "demo", "-n", demo.name, "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert found["targets"][0]["samples"] == 240
    assert "97.500%" in text


@pytest.mark.parametrize("command", ["status", "report"])
def test_an_object_that_is_not_there_is_named_and_code_2(
    demo: Namespace, command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([command, "nobody", "-n", demo.name]) == 2
    assert "nobody" in capsys.readouterr().err
