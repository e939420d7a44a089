"""Claims on talking to the API server: what becomes of a connection that breaks."""

from __future__ import annotations

import asyncio
import json
import socket
import socketserver
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import ClassVar
from urllib.parse import unquote

import pytest
from kubernetes.client import ApiClient, Configuration
from kubernetes.config.config_exception import ConfigException
from sluice_operator.cluster import client
from sluice_operator.cluster.client import Cluster, ClusterError, Listed, Ref
from sluice_operator.metrics import Metrics


class HangUp(socketserver.BaseRequestHandler):
    """Ends the connection once it has been spoken to."""

    def handle(self) -> None:
        self.request.recv(1)


@pytest.fixture
def port() -> Iterator[int]:
    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), HangUp) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield server.server_address[1]
        server.shutdown()


async def test_a_handshake_that_is_cut_is_an_api_server_that_cannot_be_reached(
    port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "_ATTEMPTS", 1)
    configuration = Configuration(host=f"https://127.0.0.1:{port}")
    configuration.retries = False
    api = Cluster(ApiClient(configuration), Metrics())
    with pytest.raises(ClusterError, match="cannot be reached") as refused:
        await api.get(Ref("ConfigMap", "default", "demo"))
    assert refused.value.reason == "Unreachable"


async def test_an_api_server_that_says_nothing_is_given_up_in_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The connection stands, as of one behind a load balancer that has lost it."""
    monkeypatch.setattr(client, "_ATTEMPTS", 1)
    monkeypatch.setattr(client, "_DEADLINE_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as mute:
        host = f"http://127.0.0.1:{mute.getsockname()[1]}"
        api = Cluster(ApiClient(Configuration(host=host)), Metrics())
        async with asyncio.timeout(10.0):
            with pytest.raises(ClusterError, match="cannot be reached"):
                await api.get(Ref("ConfigMap", "default", "demo"))


class Lists(BaseHTTPRequestHandler):
    """Answers any list with what `listed` gives."""

    def listed(self, path: str) -> dict[str, object]:
        raise NotImplementedError

    def do_GET(self) -> None:
        answer = json.dumps(self.listed(unquote(self.path))).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, *_: object) -> None:
        return


@contextmanager
def served_by(lists: type[Lists]) -> Iterator[Cluster]:
    """A cluster whose API server answers so."""
    with ThreadingHTTPServer(("127.0.0.1", 0), lists) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        host = f"http://127.0.0.1:{server.server_address[1]}"
        yield Cluster(ApiClient(Configuration(host=host)), Metrics())
        server.shutdown()


class OneOfEach(Lists):
    """Answers any list with one object, and notes what it was asked."""

    asked: ClassVar[list[tuple[str, str]]] = []

    def listed(self, path: str) -> dict[str, object]:
        self.asked.append((path, self.headers["Accept"]))
        return {"items": [{"metadata": {"uid": "uid-1"}}], "metadata": {"resourceVersion": "7"}}


async def test_looking_for_missed_deletions_reads_no_spec_and_no_pod_that_has_ended() -> None:
    """There may be thousands."""
    with served_by(OneOfEach) as api:
        for kind in ("Pod", "Service"):
            listed = await api.listed(Ref(kind, "default"), label="a=b")
            assert listed == Listed(frozenset({"uid-1"}), 7)
        assert len([pod async for pod in api.failed_pods("default", "a=b")]) == 1
    [(pods, accept), (services, _), (failed, _)] = OneOfEach.asked
    assert "fieldSelector=status.phase!=Failed,status.phase!=Succeeded" in pods
    assert "labelSelector=a=b" in pods
    assert "as=PartialObjectMetadataList" in accept
    assert "fieldSelector" not in services
    assert "fieldSelector=status.phase=Failed&limit=10" in failed


class Pages(Lists):
    """Holds pods without end, a page of ten at a time."""

    asked: ClassVar[list[str]] = []

    def listed(self, path: str) -> dict[str, object]:
        self.asked.append(path)
        first = int(path.partition("continue=")[2] or 0)
        items = [{"metadata": {"uid": f"uid-{first + number}"}} for number in range(10)]
        return {"items": items, "metadata": {"continue": str(first + 10)}}


async def test_of_a_list_a_few_objects_are_held_at_a_time_and_failed_pods_have_an_end() -> None:
    with served_by(Pages) as api:
        found = [pod["metadata"]["uid"] async for pod in api.failed_pods("default", "a=b")]
        async for pod in api.live_pods("default", "a=b"):
            if pod["metadata"]["uid"] == "uid-25":
                break
    assert found == [f"uid-{number}" for number in range(200)]
    failed, live = Pages.asked[:20], Pages.asked[20:]
    assert all("status.phase=Failed&limit=10" in path for path in failed)
    assert [path.partition("&continue=")[2] for path in live] == ["", "10", "20"]
    assert all("status.phase!=Failed,status.phase!=Succeeded&limit=10" in path for path in live)


@pytest.mark.parametrize("error", [FileNotFoundError("token"), ConfigException("empty")])
async def test_a_token_that_is_missing_for_a_moment_is_one_more_reason_to_try_again(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refresh(_: Configuration) -> None:
        tried.append(error)
        raise error

    tried: list[Exception] = []
    monkeypatch.setattr(client, "_MAX_WAIT_S", 0.0)
    configuration = Configuration(host="https://127.0.0.1:1")
    configuration.api_key["BearerToken"] = "bearer stale"
    configuration.refresh_api_key_hook = refresh
    api = Cluster(ApiClient(configuration), Metrics())
    with pytest.raises(ClusterError, match="cannot be reached"):
        await api.get(Ref("ConfigMap", "default", "demo"))
    assert len(tried) == client._ATTEMPTS
