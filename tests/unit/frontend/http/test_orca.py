"""A gateway reads the load in the form that it asked for."""

import json

import pytest
from sluice_frontend.http.orca import load_report

LOAD = {"kv_cache_usage_perc": 0.25, "num_requests_waiting": 3}


def test_each_form_tells_all_of_the_load() -> None:
    assert load_report("text", LOAD) == (
        "TEXT named_metrics.kv_cache_usage_perc=0.25, named_metrics.num_requests_waiting=3"
    )
    told = load_report("JSON", LOAD)
    assert told is not None
    assert told.startswith("JSON ")
    assert json.loads(told.removeprefix("JSON ")) == {"named_metrics": LOAD}


@pytest.mark.parametrize("wanted", ["", "BIN", "\xff"])
def test_nothing_is_told_to_those_who_ask_for_nothing_known(wanted: str) -> None:
    assert load_report(wanted, LOAD) is None
