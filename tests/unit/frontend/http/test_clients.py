"""Who a client is, and how much of a whole one may hold beside others."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sluice_frontend.http.clients import (
    CLIENT,
    RESERVE,
    SALT,
    client_of,
    has_too_many,
    networks_of,
    room_for,
)
from starlette.datastructures import Headers

TRUSTED = networks_of(["10.0.0.0/8", "2001:db8::/32"])


def client(peer: str, *told: str, salt: str = "", trusted: bool = True) -> str:
    scope = {"client": (peer, 4711), "state": {SALT: salt}}
    headers = Headers(raw=[(b"x-forwarded-for", each.encode()) for each in told])
    return client_of(scope, headers, TRUSTED if trusted else ())


@pytest.mark.parametrize(
    ("peer", "told", "found"),
    [
        ("192.0.2.1", (), "192.0.2.1"),
        ("192.0.2.1", ("198.51.100.1",), "192.0.2.1"),  # no proxy of ours says so
        ("10.0.0.1", ("198.51.100.1",), "198.51.100.1"),
        ("10.0.0.1", ("203.0.113.9, 198.51.100.1",), "198.51.100.1"),  # the client wrote the first
        ("10.0.0.1", ("203.0.113.9", "198.51.100.1"), "198.51.100.1"),
        ("10.0.0.1", ("198.51.100.1, 10.9.9.9",), "198.51.100.1"),
        ("10.0.0.1", ("10.1.1.1, 10.9.9.9",), "10.1.1.1"),
        ("10.0.0.1", (), "10.0.0.1"),
        ("10.0.0.1", ("unknown",), "10.0.0.1"),
        ("10.0.0.1", ("198.51.100.1, unknown, 10.9.9.9",), "10.9.9.9"),
        ("10.0.0.1", ("198.51.100.1:8080",), "198.51.100.1"),
        ("10.0.0.1", ("[2001:db9::5]:80",), "2001:db9::/64"),
        ("::ffff:10.0.0.1", ("198.51.100.1",), "198.51.100.1"),
        ("2001:db8:1::9", ("198.51.100.1",), "198.51.100.1"),
        ("2001:db9:1:2:3::4", (), "2001:db9:1:2::/64"),
    ],
)
def test_the_right_most_address_that_is_no_proxys_is_the_client(
    peer: str, told: tuple[str, ...], found: str
) -> None:
    assert client(peer, *told) == found


def test_a_key_is_the_client_wherever_it_is_used() -> None:
    assert client("192.0.2.1", salt="a") == client("10.0.0.1", "198.51.100.1", salt="a") == "a"


def test_without_proxies_of_ours_nobodys_word_is_taken() -> None:
    assert client("10.0.0.1", "198.51.100.1", trusted=False) == "10.0.0.1"
    assert CLIENT != SALT


@given(st.integers(0, 3000))
def test_a_lone_client_may_hold_the_most_and_no_more(most: int) -> None:
    assert not has_too_many(most, most, most)
    assert has_too_many(most + 1, most + 1, most)


@given(st.integers(1, 2000), st.integers(1, 40))
def test_each_of_many_greedy_clients_gets_something_while_there_is_room_for_it(
    most: int, num: int
) -> None:
    """They come one after another, each until it is refused."""
    held: list[int] = []
    for _ in range(num):
        own = 0
        while not has_too_many(own + 1, sum(held) + own + 1, most):
            own += 1
        held.append(own)
    assert sum(held) <= room_for(most)
    assert held == sorted(held, reverse=True)
    assert held[0] == most
    if room_for(most) - sum(held[:-1]) > RESERVE:
        assert held[-1] > 0
