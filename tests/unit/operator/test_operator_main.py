"""Which errors of kopf end the process."""

import pytest
from kopf._cogs.clients.errors import APIError, APIForbiddenError, APIServerError
from kopf._cogs.clients.watching import WatchingError
from sluice_operator.__main__ import _passes


@pytest.mark.parametrize(
    ("error", "passes"),
    [
        (APIServerError("unavailable", status=503, headers={}), True),
        (APIError("too many requests", status=429, headers={}), True),
        (APIError("the token has expired", status=410, headers={}), True),
        (WatchingError("etcdserver: no leader"), True),
        (APIForbiddenError("no right", status=403, headers={}), False),
        (APIError("no such kind", status=404, headers={}), False),
        (ValueError("a fault of ours"), False),
    ],
)
def test_what_the_api_server_fails_at_passes(error: Exception, passes: bool) -> None:
    assert _passes(error) is passes
