"""A gateway reads the load in the form that it asked for."""

import json

import pytest
from sluice_worker.server.orca import load_headers

LOAD = {"kv_cache_usage_perc": 0.25, "num_requests_waiting": 3}


def test_each_form_tells_all_of_the_load() -> None:
    ((name, text),) = load_headers(b"text", LOAD)
    assert name == b"endpoint-load-metrics"
    assert text == (
        b"TEXT named_metrics.kv_cache_usage_perc=0.25, named_metrics.num_requests_waiting=3"
    )
    ((_, told),) = load_headers(b"JSON", LOAD)
    assert told.startswith(b"JSON ")
    assert json.loads(told.removeprefix(b"JSON ")) == {"named_metrics": LOAD}


@pytest.mark.parametrize("wanted", [None, b"", b"BIN", b"\xff"])
def test_nothing_is_told_to_those_who_ask_for_nothing_known(wanted: bytes | None) -> None:
    assert load_headers(wanted, LOAD) == []
