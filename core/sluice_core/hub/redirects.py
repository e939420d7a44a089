"""Which redirects of a hub are followed: the rule of `hub.site`. No torch.

A hub redirects large files to hosts of a CDN. An attacker who can write to a hub could redirect to
an address that only this process can reach. So a redirect to another host must end at a public
address, or at a private one if the endpoint is private too (a mirror). It must never lead from
https to http. `docs/decisions/models.md` says what is not covered.
"""

from collections.abc import Callable
from ipaddress import IPv4Address, IPv6Address, ip_address
from typing import Any

import httpx

Address = IPv4Address | IPv6Address

_METADATA = frozenset(map(ip_address, ("168.63.129.16", "100.100.100.200", "fd00:ec2::254")))
"""Metadata services of clouds (Azure, Alibaba, AWS) that are not link-local."""
_SHOWN = 128
"""Characters of a name that somebody else chose."""


class RedirectRefused(Exception):
    """A redirect that is not followed; the message is one sentence."""


def may_lead_to(address: Address, endpoint: Address | None) -> bool:
    """True if a redirect to another host may end at `address`.

    `endpoint`: the hub's own address, None if it is not known (behind a proxy).
    """
    address, endpoint = _unmapped(address), endpoint and _unmapped(endpoint)
    if address in _METADATA or address.is_link_local:
        return False
    if address.is_global:
        return True
    if endpoint is None or endpoint.is_global:
        return False
    return endpoint.is_loopback or not address.is_loopback


class Redirects:
    """Sends the requests of one client to `endpoint`, and on to where that may redirect them."""

    def __init__(self, client: httpx.Client, endpoint: str) -> None:
        self.client, self._host = client, httpx.URL(endpoint).host
        self._address = _literal(self._host)

    def send(self, request: httpx.Request) -> httpx.Response:
        """The last answer, its body unread; RedirectRefused, or what httpx raises.

        httpx takes the token out of a request to another host. Bodies of redirects are not read.
        """
        came_from = self._host
        for _ in range(self.client.max_redirects + 1):
            self._watch(request, came_from)
            try:
                response = self.client.send(request, stream=True, follow_redirects=False)
            except httpx.InvalidURL as e:
                raise RedirectRefused(f"{came_from} redirects to what is no URL.") from e
            if response.next_request is None:
                return response
            response.close()
            self._check(request.url, response.next_request.url)
            came_from, request = request.url.host, response.next_request
        raise httpx.TooManyRedirects("it redirects again and again", request=request)

    def _check(self, before: httpx.URL, after: httpx.URL) -> None:
        """Check what the URL shows, without resolving a name."""
        if after.scheme not in ("http", "https"):
            raise _refused(before.host, after, "it is no http")
        if (before.scheme, after.scheme) == ("https", "http"):
            raise _refused(before.host, after, "it leads from https to http")
        if address := _literal(after.host):
            self._check_address(before.host, after, address)

    def _check_address(self, before: str, url: httpx.URL, address: Address) -> None:
        if url.host != self._host and not may_lead_to(address, self._address):
            raise _refused(before, url, f"{address} is not on the internet")

    def _watch(self, request: httpx.Request, came_from: str) -> None:
        """Look at the address of a new connection before anything is sent over it.

        A name resolved for the check could resolve to another address for the connection.
        """

        def connected(address: Address) -> None:
            if request.url.host == self._host:
                self._address = address
            self._check_address(came_from, request.url, address)

        request.extensions["trace"] = _trace(request.url.raw_host.decode(), connected)


def _trace(host: str, connected: Callable[[Address], None]) -> Callable[[str, Any], None]:
    """A trace hook for httpcore. A proxy's address does not belong to `host`: it is not checked."""
    is_direct = False

    def trace(event: str, info: Any) -> None:
        nonlocal is_direct
        if event == "connection.connect_tcp.started":
            is_direct = info["host"] == host
        elif event == "connection.connect_tcp.complete" and is_direct:
            stream = info["return_value"]
            try:
                connected(ip_address(stream.get_extra_info("server_addr")[0]))
            except RedirectRefused:
                stream.close()
                raise

    return trace


def _refused(before: str, after: httpx.URL, why: str) -> RedirectRefused:
    to = f"{after.scheme}://{after.host}"[:_SHOWN]
    return RedirectRefused(f"{before[:_SHOWN]} redirects to {to}, which is not followed: {why}.")


def _unmapped(address: Address) -> Address:
    mapped = address.ipv4_mapped if isinstance(address, IPv6Address) else None
    return mapped or address


def _literal(host: str) -> Address | None:
    """The address that `host` is; None for a name."""
    try:
        return ip_address(host)
    except ValueError:
        return None
