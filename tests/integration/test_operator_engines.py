"""A real operator on a real API server: an object of another engine becomes pods with a gate."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
from integration.apiserver import ApiServer
from integration.operator_runs import create_demo, create_namespace, running_operator, settle
from integration.test_operator_worker import running_worker

COMPILATION = {
    "cudagraph_mode": "FULL_AND_PIECEWISE",
    "cudagraph_capture_sizes": [*range(8, 736, 8)],
}
ARGS = [f"--compilation-config={json.dumps(COMPILATION)}", *(f"--flag-{n}=1" for n in range(67))]
"""Users give a JSON object as one value, and tools write 68 of them."""


def test_a_vllm_object_becomes_a_deployment_with_a_gate(
    apiserver: ApiServer, client: httpx.Client, models: Path, tmp_path: Path
) -> None:
    space = create_namespace(client, "engines")
    flags = ("--gate-image=registry.invalid/operator:1", "--engine-image=VLLM=registry.invalid/v:1")
    log = tmp_path / "operator.log"
    with running_operator(apiserver, models, log, space.name, *flags) as operator:
        hardware = {"accelerator": "nvidia", "memory": "8Gi"}
        create_demo(space, engine={"name": "VLLM", "args": ARGS}, hardware=hardware)
        settle(operator, space)
        pod = space.get("deployments", "demo")["spec"]["template"]["spec"]
        [gate], [copy, engine] = pod["containers"], pod["initContainers"]
        assert (gate["name"], gate["image"]) == ("gate", "registry.invalid/operator:1")
        assert (engine["image"], engine["restartPolicy"]) == ("registry.invalid/v:1", "Always")
        assert "restartPolicy" not in copy
        assert engine["args"][0] == "/models/demo"
        assert "--host=127.0.0.1" in engine["args"]
        assert set(ARGS) <= set(engine["args"])
        ceiling = space.get("inferenceservices", "demo")["status"]["batching"]["ceiling"]
        assert f"--max-num-seqs={ceiling}" in engine["args"]
        assert f"--max-num-seqs={ceiling}" in gate["args"]
        assert space.condition("ModelFits")["status"] == "True"
        writes = operator.writes()
        operator.await_passes(3)
        assert operator.writes() == writes, "what the API server stores is no drift"
        space.delete("inferenceservices", "demo")


class _MadeUp(BaseHTTPRequestHandler):
    """An engine that answers 500, or one token, as its server says."""

    def do_GET(self) -> None:
        self._answer(200, "application/json", b'{"data": [{"id": "demo"}]}')

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        if self.server.fails:  # type: ignore[attr-defined]
            self._answer(500, "application/json", b'{"error": {"message": "out of memory"}}')
            return
        token = {"choices": [{"index": 0, "text": "a", "finish_reason": "stop"}]}
        stream = b"data: %s\n\ndata: [DONE]\n\n" % json.dumps(token).encode()
        self._answer(200, "text/event-stream", stream)

    def _answer(self, status: int, kind: str, body: bytes) -> None:
        self.send_response(status)
        self.send_header("content-type", kind)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing."""


class _Engine(ThreadingHTTPServer):
    fails = True


@contextlib.contextmanager
def made_up_engine() -> Iterator[_Engine]:
    with _Engine(("127.0.0.1", 0), _MadeUp) as engine:
        thread = threading.Thread(target=engine.serve_forever, daemon=True)
        thread.start()
        try:
            yield engine
        finally:
            engine.shutdown()


def test_an_engine_that_answers_500_is_not_ready_until_it_is_mended(
    apiserver: ApiServer, client: httpx.Client, models: Path, tmp_path: Path
) -> None:
    space = create_namespace(client, "failing")
    log = tmp_path / "operator.log"
    flags = "--gate-image=registry.invalid/operator:1"
    with (
        made_up_engine() as engine,
        running_operator(apiserver, models, log, space.name, flags) as operator,
    ):
        own = {"name": "Custom", "image": "registry.invalid/e:1", "port": engine.server_port}
        create_demo(space, engine=own)
        settle(operator, space)
        with running_worker(space, models, tmp_path / "gate", "sluice_gate") as gate:

            def ask(num: int) -> set[int]:
                url, body = f"http://{gate.ip}:8000/v1/completions", {"prompt": "a", "stream": True}
                with httpx.Client(trust_env=False, timeout=30) as asker:
                    return {asker.post(url, json=body).status_code for _ in range(num)}

            def said(kind: str) -> tuple[str, str]:
                found = space.condition(kind)
                return found["status"], found["reason"]

            operator.wait("the pod to be served", lambda: said("Ready") == ("True", "Serving"))
            assert ask(12) == {500}
            operator.wait("the failures", lambda: said("Ready") == ("False", "RequestsFail"))
            assert said("SLOMet") == said("RequestsSucceed") == ("False", "RequestsFail")
            assert said("SLOFeasible") == ("Unknown", "RequestsFail")
            told = "12 of 12 requests failed: 500 (12) in 600 s"
            operator.wait(
                "all of them", lambda: space.condition("RequestsSucceed")["message"] == told
            )
            load = space.get("inferenceservices", "demo")["status"]["load"]
            assert (load["failed"], load["failedPercent"]) == ({"500": 12}, "100")
            assert space.get("deployments", "demo")["spec"]["replicas"] == 1
            assert len(space.events("RequestsFail")) <= 2

            engine.fails = False
            assert ask(8) == {200}
            operator.wait("an answer", lambda: said("Ready") == ("True", "Serving"))
            assert said("RequestsSucceed") == ("False", "RequestsFail")  # in the window, most did


def test_the_longest_arguments_that_are_taken_reach_the_pod(
    apiserver: ApiServer, client: httpx.Client, models: Path, tmp_path: Path
) -> None:
    """Quotes are the worst of usual text: JSON doubles them."""
    space = create_namespace(client, "longest")
    engine = {"name": "Custom", "image": "r/e:1", "args": ['"' * 4096] * 16}
    with running_operator(apiserver, models, tmp_path / "operator.log", space.name) as operator:
        create_demo(space, engine=engine)
        operator.wait("the Deployment", lambda: space.find("deployments", "demo") is not None)
        pod = space.get("deployments", "demo")["spec"]["template"]["spec"]
        assert pod["initContainers"][-1]["args"] == engine["args"]
        space.delete("inferenceservices", "demo")
