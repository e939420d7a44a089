"""`api`: an endpoint that answers each request well, unless a test says otherwise."""

from collections.abc import Iterator

import pytest
from unit.cli.batch.tiny_api import TinyApi, tiny_api


@pytest.fixture
def api() -> Iterator[TinyApi]:
    with tiny_api() as api:
        yield api
