"""What a pod's processes ask by a hub's proxy: with the variables of its manifest, real clients."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from sluice_operator.children import manifests
from unit.operator.objects import HUB
from unit.operator.observations import SETTINGS, create_service
from unit.worker.hub.forward_proxy import Proxy, running_proxy

ASK = """
import sys, contextlib, urllib.request, httpx, requests
for url in sys.argv[1:]:
    for get in (httpx.get, requests.get, urllib.request.urlopen):
        with contextlib.suppress(Exception):
            get(url, timeout=20)
"""
HUB_URL = "http://hub.invalid/models"


@pytest.fixture
def itself() -> Iterator[tuple[str, list[str]]]:
    """An engine's own port on loopback, and what it was asked."""
    asked: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, format: str, *args: Any) -> None:
            """Say nothing."""

        def do_GET(self) -> None:
            asked.append(self.path)
            self.send_response(200)
            self.send_header("content-length", "0")
            self.end_headers()

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/health_generate", asked
        server.shutdown()
        thread.join()


def _variables(proxy: Proxy, engine: dict[str, Any]) -> dict[str, str]:
    """The variables with values of the container that loads the model."""
    service = create_service(model=HUB, engine=engine)
    settings = dataclasses.replace(SETTINGS, hub_proxy=proxy.url)
    made = manifests.workload(service, settings, ceiling=8, replicas=1, live=None)
    pod = made["spec"]["template"]["spec"]
    container = [*pod["containers"], *pod.get("initContainers", ())][-1]
    return {one["name"]: one["value"] for one in container["env"] if "value" in one}


def _ask(variables: dict[str, str], *urls: str) -> None:
    proxies = {name: value for name, value in variables.items() if name.upper().endswith("_PROXY")}
    bare = {
        name: value for name, value in os.environ.items() if not name.lower().endswith("_proxy")
    }
    subprocess.run([sys.executable, "-c", ASK, *urls], env={**bare, **proxies}, check=True)


@pytest.mark.parametrize("engine", ["Sluice", "SGLang", "VLLM", "Custom"])
def test_an_engine_that_asks_itself_reaches_itself_and_the_hub_goes_by_the_proxy(
    engine: str, itself: tuple[str, list[str]]
) -> None:
    """sglang#9155: its warm-up went to the proxy, which refused it, and the engine ended."""
    url, asked = itself
    by_name = url.replace("127.0.0.1", "localhost")
    image = {} if engine == "Sluice" else {"image": "r/e:1"}
    with running_proxy() as proxy:
        _ask(_variables(proxy, {"name": engine, **image}), url, by_name, HUB_URL)
        assert proxy.asked == [HUB_URL] * 3
    assert len(asked) == 6


@pytest.mark.parametrize("spelling", ["NO_PROXY", "no_proxy"])
def test_a_users_own_list_wins_in_either_spelling(spelling: str) -> None:
    own = [{"name": spelling, "value": "hub.invalid"}]
    with running_proxy() as proxy:
        variables = _variables(proxy, {"name": "VLLM", "image": "r/e:1", "env": own})
        assert [variables[one] for one in ("NO_PROXY", "no_proxy") if one in variables] == [
            "hub.invalid"
        ]
        _ask(variables, HUB_URL)
        assert proxy.asked == []
