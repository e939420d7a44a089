"""Claims on the Secret of the API's keys: what is of no use, and how often it is read."""

from __future__ import annotations

import base64
from typing import Any

import pytest
from sluice_operator.children.api_keys import ApiKeys, problem_of
from unit.operator.loop.test_reconciler import Store
from unit.operator.observations import create_service


def _secret(keys: bytes, key: str = "keys") -> dict[str, Any]:
    return {"data": {key: base64.b64encode(keys).decode()}}


@pytest.mark.parametrize(
    ("secret", "says"),
    [
        (None, "there is no Secret api"),
        ({"metadata": {}}, "the Secret api has no key `keys`"),
        (_secret(b"one", "token"), "the Secret api has no key `keys`"),
        (_secret(b""), "`keys` of the Secret api is empty"),
        (_secret(b" \n\n"), "`keys` of the Secret api is empty"),
        (_secret(b"\xff\xfe"), "`keys` of the Secret api is not UTF-8 text"),
    ],
)
def test_a_secret_without_keys_is_named_with_what_it_lacks(secret: Any, says: str) -> None:
    assert problem_of(secret, "api") == f"spec.apiKeySecretRef: {says}"
    assert problem_of(_secret(b"\none\n"), "api") == ""


async def test_a_secret_that_lacks_is_read_again_soon_and_one_that_is_well_rarely() -> None:
    store = Store()
    keys, service = ApiKeys(store), create_service(apiKeySecretRef={"name": "api"})
    assert await keys.problem(create_service(), 0.0, 30.0) == ""
    assert await keys.problem(service, 1.0, 30.0)
    store.objects["Secret", "api"] = _secret(b"one")
    assert await keys.problem(service, 5.0, 30.0), "not read"
    assert await keys.problem(service, 6.5, 30.0) == ""
    del store.objects["Secret", "api"]
    assert await keys.problem(service, 36.0, 30.0) == "", "not read"
    assert await keys.problem(service, 37.0, 30.0)
    other = create_service(apiKeySecretRef={"name": "other"})
    store.objects["Secret", "other"] = _secret(b"two")
    assert await keys.problem(other, 37.5, 30.0) == "", "another is read at once"
