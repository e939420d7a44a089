"""What `helm test` asks: a service whose pods serve, or the operator alone."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import httpx
import pytest
from sluice_operator.metrics import Metrics, MetricsServer
from sluice_operator.served import check, first_served
from sluice_operator.spec.service import KIND
from sluice_operator.status.samples import ObjectCollector, Shown
from unit.operator.observations import create_service


def shown(name: str, reason: str, address: str = "127.0.0.1") -> Shown:
    ready = {"type": "Ready", "status": "True", "reason": reason}
    return Shown(KIND, "ns", name, {"conditions": [ready]}, create_service(), address)


@pytest.fixture
def objects() -> list[Shown]:
    return [
        shown("asleep", "ScaledToZero"),
        Shown(KIND, "ns", "broken", {"conditions": [
            {"type": "Ready", "status": "False", "reason": "Starting"}]}),
    ]  # fmt: skip


@pytest.fixture
def operator(objects: list[Shown]) -> Iterator[str]:
    """The address of the metrics of an operator with `objects`."""
    metrics = Metrics()
    metrics.registry.register(ObjectCollector(lambda: objects))
    with MetricsServer("127.0.0.1", 0, metrics.registry) as server:
        server.start()
        yield f"127.0.0.1:{server.server_port}"
        server.shutdown()


def test_where_nothing_is_served_the_operator_is_asked(operator: str) -> None:
    assert check(operator) == "the operator answers, and no InferenceService is served"


def test_the_first_that_is_served_is_asked(operator: str, objects: list[Shown]) -> None:
    objects += [shown("z", "Serving"), shown("b", "Serving"), shown("a", "Serving", "")]
    page = httpx.get(f"http://{operator}/metrics", trust_env=False).text
    found = first_served(page)
    assert found is not None
    assert (found["name"], found["namespace"], found["cluster_ip"]) == ("b", "ns", "127.0.0.1")


@pytest.mark.parametrize(("status", "fails"), [(200, False), (503, True)])
def test_a_service_that_does_not_answer_well_fails(
    operator: str, objects: list[Shown], status: int, *, fails: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    asked = []

    class Service(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            self.send_response(status)
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            """Log nothing."""

    with HTTPServer(("127.0.0.1", 0), Service) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        objects.append(shown("demo", "Serving", f"127.0.0.1:{server.server_port}"))
        monkeypatch.setattr("sluice_operator.served.in_url", str)  # a cluster IP brings no port
        if fails:
            with pytest.raises(httpx.HTTPStatusError, match="503"):
                check(operator)
        else:
            assert check(operator) == "the InferenceService demo in ns answers"
        server.shutdown()
        thread.join()
    assert asked == ["/health"]
