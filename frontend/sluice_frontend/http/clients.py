"""Who a client is, and how much of what all use one of them may hold. Pure.

A client is a key, or where the API has no keys, an address. Connections know addresses alone.
"""

from collections.abc import Iterator, Sequence
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network

from starlette.datastructures import Headers
from starlette.types import Scope

Address = IPv4Address | IPv6Address
Network = IPv4Network | IPv6Network

SALT = "salt"
"""Key in the ASGI scope's state: the salt of a request's share of the prefix cache."""
CLIENT = "client"
"""Another key there: whose share a request takes."""
FORWARDED = "x-forwarded-for"
RESERVE = 4
"""Divisor: over what a lone client may hold, this part of it is kept for others."""
SITE_BITS = 64
"""A network of IPv6 that is one client's: it has all addresses in it (RFC 6177)."""


def client_of(scope: Scope, headers: Headers, trusted: Sequence[Network]) -> str:
    """The name of a request's share: its key's salt, or where there are no keys, its address.

    Behind `trusted` proxies it is the right-most address in X-Forwarded-For that is none of theirs:
    what stands left of it was written by the client itself.
    """
    if salt := scope["state"].get(SALT):
        return str(salt)
    told = ",".join(headers.getlist(FORWARDED)) if trusted else ""
    found = ""
    for address in _from_the_right(scope["client"][0] if scope["client"] else "", told):
        found = site_of(address)
        if not any(address in network for network in trusted):
            break
    return found


def _from_the_right(peer: str, told: str) -> Iterator[Address]:
    """The address that connected, and those that its proxies name, up to what is no address."""
    while (address := _address(peer)) is not None:
        yield address
        told, _, peer = told.rpartition(",")


def _address(text: str) -> Address | None:
    """Of "192.0.2.1", "192.0.2.1:80", "[2001:db8::1]:80" and the like; None if it is none."""
    text = text.strip()
    if text.startswith("["):
        text = text[1:].partition("]")[0]
    elif text.count(":") == 1:
        text = text.partition(":")[0]
    try:
        address = ip_address(text)
    except ValueError:
        return None
    mapped = address.ipv4_mapped if isinstance(address, IPv6Address) else None
    return mapped or address


def site_of(address: Address) -> str:
    """The name of an address's share."""
    if isinstance(address, IPv4Address):
        return str(address)
    return str(IPv6Network((int(address), SITE_BITS), strict=False))


def peer_of(name: object) -> str:
    """The share of a connection's other end, as its transport names it; "" for none."""
    address = _address(str(name[0])) if isinstance(name, tuple) and name else None
    return site_of(address) if address is not None else ""


def networks_of(texts: Sequence[str]) -> tuple[Network, ...]:
    """The networks that `texts` name; raises ValueError for the first that is none."""
    return tuple(ip_network(text) for text in texts)


def room_for(most: int) -> int:
    """What all clients may hold together, if a lone one may hold `most`."""
    return most + -(-most // RESERVE)


def has_too_many(num_own: int, num_all: int, most: int) -> bool:
    """True if a client with `num_own` of all clients' `num_all` holds more than it may.

    That is RESERVE times what is still free, so something always is. A lone client may hold `most`,
    and each holds less the more others there are (dynamic thresholds, doi:10.1109/90.664262).
    """
    return num_own > RESERVE * (room_for(most) - num_all)
