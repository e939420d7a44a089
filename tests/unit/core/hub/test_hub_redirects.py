"""Claims on where a hub may send its clients, each for the worker's and the operator's."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable, Iterator
from contextlib import suppress
from ipaddress import ip_address
from typing import Any

import httpx
import pytest
from sluice_core.errors import CheckpointError, DownloadError
from sluice_core.hub import redirects
from sluice_core.hub.redirects import RedirectRefused, Redirects, may_lead_to
from sluice_core.hub.reference import HubModel
from sluice_core.hub.site import Site
from sluice_operator.model import hub as operators
from sluice_operator.model.checkpoint import ModelFacts, Refused
from unit.operator.model.test_checkpoint import CONFIG
from unit.worker.hub.hub_server import COMMIT, REPO, TOKEN, Hub, running_hub, safetensors

PUBLIC, PRIVATE, LOOPBACK = "151.101.1.6", "10.0.0.7", "127.0.0.1"
INNER = [
    "127.0.0.1", "127.9.9.9", "0.0.0.1", "10.0.0.8", "172.16.0.1", "192.168.1.1", "100.64.0.1",
    "169.254.169.254", "168.63.129.16", "100.100.100.200", "::1", "::", "fe80::1", "fe80::1%eth0",
    "fd00:ec2::254", "fd12::1", "::ffff:127.0.0.1", "::ffff:169.254.169.254",
]  # fmt: skip
Client = Callable[[str], str]
"""Asks the hub at an endpoint for the commit of its model; or says why not."""


@pytest.fixture
def hub() -> Iterator[Hub]:
    weights = {"w": {"dtype": "BF16", "shape": [8], "data_offsets": [0, 16]}}
    files = {
        "config.json": json.dumps(CONFIG).encode(),
        "model.safetensors": safetensors(weights, 16),
    }
    with running_hub(Hub(files)) as served:
        yield served


def _worker(endpoint: str) -> str:
    with Site(endpoint, HubModel(REPO), TOKEN, advice="none") as site:
        return site.listing().commit


def _operator(endpoint: str) -> str:
    found = operators.read(operators.HubSource(endpoint, REPO, "main", TOKEN), "auto", on_cpu=True)
    if isinstance(found, Refused):
        raise CheckpointError(found.message)
    return str(found.commit if isinstance(found, ModelFacts) else found.message)


@pytest.fixture(params=[_worker, _operator])
def client(request: pytest.FixtureRequest) -> Client:
    asks: Client = request.param
    return asks


def redirected(hub: Hub, location: str) -> None:
    hub.answers["/revision/main"] = [(302, {"Location": location})]


def refusal(client: Client, endpoint: str) -> str:
    with pytest.raises((DownloadError, CheckpointError)) as refused:
        client(endpoint)
    said = str(refused.value)
    assert "\n" not in said
    assert TOKEN not in said
    return said


def named(hub: Hub, name: str) -> str:
    """The hub's endpoint by a name that `resolving` knows."""
    return hub.url.replace(LOOPBACK, name)


@pytest.fixture
def resolving(monkeypatch: pytest.MonkeyPatch) -> None:
    """hub.test and cdn.test, for the time of a test, on loopback."""
    real = socket.getaddrinfo

    def getaddrinfo(host: Any, *given: Any, **more: Any) -> Any:
        return real(LOOPBACK if str(host).endswith(".test") else host, *given, **more)

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)


@pytest.fixture
def on_the_internet(monkeypatch: pytest.MonkeyPatch) -> None:
    """The hub's own address is taken for one of the internet."""
    public = ip_address(PUBLIC)
    monkeypatch.setattr(redirects, "may_lead_to", lambda address, _: may_lead_to(address, public))


@pytest.mark.parametrize("address", INNER)
def test_the_internet_leads_to_no_inner_address(address: str) -> None:
    assert not may_lead_to(ip_address(address), ip_address(PUBLIC))
    assert not may_lead_to(ip_address(address), None)


@pytest.mark.parametrize("endpoint", [PUBLIC, PRIVATE, LOOPBACK, None])
def test_every_hub_may_lead_to_the_internet(endpoint: str | None) -> None:
    found = ip_address(endpoint) if endpoint else None
    assert may_lead_to(ip_address("104.16.0.1"), found)
    assert may_lead_to(ip_address("2606:4700::1"), found)


def test_a_mirror_leads_to_its_own_kind_and_never_to_metadata() -> None:
    private, loopback = ip_address(PRIVATE), ip_address(LOOPBACK)
    assert may_lead_to(ip_address("192.168.1.1"), private)
    assert may_lead_to(ip_address("fd12::1"), private)
    assert not may_lead_to(loopback, private)
    assert may_lead_to(loopback, loopback)
    for metadata in ("169.254.169.254", "168.63.129.16", "100.100.100.200", "fd00:ec2::254"):
        assert not may_lead_to(ip_address(metadata), private)
        assert not may_lead_to(ip_address(metadata), loopback)


@pytest.mark.parametrize(
    "location", ["http://169.254.169.254/latest/meta-data/", "http://[fe80::1]/"]
)
def test_a_redirect_to_metadata_is_refused_with_one_sentence(
    hub: Hub, client: Client, location: str
) -> None:
    redirected(hub, location)
    said = refusal(client, hub.url)
    assert said.startswith("127.0.0.1 redirects to http://")
    assert said.endswith("is not on the internet.")


@pytest.mark.parametrize(
    "scheme", ["file:///etc/passwd", "ftp://cdn.test/x", "data:,x", "gopher:x"]
)
def test_a_redirect_out_of_http_is_refused(hub: Hub, client: Client, scheme: str) -> None:
    redirected(hub, scheme)
    assert "127.0.0.1 redirects to" in refusal(client, hub.url)


@pytest.mark.usefixtures("resolving", "on_the_internet")
def test_a_redirect_of_the_internet_to_a_name_of_an_inner_address_gets_no_request(
    hub: Hub, client: Client
) -> None:
    redirected(hub, f"{named(hub, 'cdn.test')}/secret")
    said = refusal(client, named(hub, "hub.test"))
    assert "redirects to http://cdn.test" in said
    assert "127.0.0.1 is not on the internet" in said
    assert [one.path for one in hub.seen] == [f"/api/models/{REPO}/revision/main"]


@pytest.mark.usefixtures("resolving")
def test_a_mirror_known_by_name_may_redirect_to_where_it_is_itself(
    hub: Hub, client: Client
) -> None:
    redirected(hub, f"{named(hub, 'cdn.test')}/api/models/{REPO}/revision/{COMMIT}?blobs=true")
    assert client(named(hub, "hub.test")) == COMMIT
    assert [one.authorization for one in hub.seen[:2]] == [f"Bearer {TOKEN}", ""]


def test_behind_a_proxy_names_are_its_own_to_look_up_and_addresses_are_refused(
    hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HTTP_PROXY", hub.url)
    monkeypatch.setenv("NO_PROXY", "")
    redirected(hub, f"http://cdn.test/api/models/{REPO}/revision/{COMMIT}?blobs=true")
    assert _worker("http://hub.test") == COMMIT
    redirected(hub, "http://10.0.0.8/x")
    assert "10.0.0.8 is not on the internet" in refusal(_worker, "http://hub.test")


@pytest.mark.usefixtures("on_the_internet")
def test_a_redirect_to_the_hubs_own_host_is_followed_with_the_token(
    hub: Hub, client: Client
) -> None:
    redirected(hub, f"/api/models/{REPO}/revision/{COMMIT}?blobs=true")
    assert client(hub.url) == COMMIT
    assert [one.authorization for one in hub.seen[:2]] == [f"Bearer {TOKEN}"] * 2


def _followed(*locations: str) -> list[httpx.Request]:
    """The requests to a hub on the internet that redirects to one location after the other."""
    seen: list[httpx.Request] = []

    def answer(request: httpx.Request) -> httpx.Response:
        seen.append(request)
        at = len(seen) - 1
        return httpx.Response(302 if at < len(locations) else 200, headers=[
            ("Location", location) for location in locations[at : at + 1]
        ])  # fmt: skip

    headers = {"Authorization": f"Bearer {TOKEN}"}
    with httpx.Client(transport=httpx.MockTransport(answer), headers=headers) as client:
        hub = Redirects(client, "https://hub.test")
        with suppress(RedirectRefused):
            hub.send(client.build_request("GET", "https://hub.test/x"))
    return seen


def test_hosts_of_a_cdn_are_followed_without_the_token() -> None:
    first, second, third = _followed("https://a.cdn.test/y", "https://b.cdn.test/z")
    assert first.headers["Authorization"] == f"Bearer {TOKEN}"
    assert "Authorization" not in {*second.headers, *third.headers}
    assert (second.url.host, third.url.host) == ("a.cdn.test", "b.cdn.test")


def test_no_redirect_leads_from_https_to_http_also_on_the_same_host() -> None:
    assert len(_followed("http://hub.test/x")) == 1
    assert len(_followed("https://cdn.test/x", "http://cdn.test/x")) == 2


@pytest.mark.usefixtures("on_the_internet")
def test_redirects_in_a_circle_end(hub: Hub) -> None:
    hub.answers["/revision/main"] = [(302, {"Location": "main?blobs=true"})] * 30
    assert "it redirects again and again" in _operator(hub.url)
    assert len(hub.seen) == 21
