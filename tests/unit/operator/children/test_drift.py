"""Claims on what counts as a difference between live and wanted."""

from __future__ import annotations

import json
from typing import Any

import pytest
from sluice_operator.children import drift, manifests
from sluice_operator.children.runtime import DecidedRuntime
from sluice_operator.tuner.types import LoadedCap
from unit.operator.observations import SETTINGS, create_service


def _wanted() -> dict[str, Any]:
    return manifests.workload(create_service(), SETTINGS, ceiling=8, replicas=1, live=None)


def _live() -> dict[str, Any]:
    live: dict[str, Any] = json.loads(json.dumps(_wanted()))
    return live


def test_defaults_and_fields_of_others_are_no_difference() -> None:
    live = _live()
    live["metadata"]["labels"]["team"] = "search"
    live["spec"]["template"]["spec"]["dnsPolicy"] = "ClusterFirst"
    live["spec"]["template"]["spec"]["containers"].insert(0, {"name": "sidecar"})
    assert list(drift.differences(_wanted(), live)) == []


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("spec.replicas", 5),
        ("spec.template.spec.containers.0.image", "other"),
        ("spec.template.spec.containers.0.args", []),
        ("spec.template.spec.containers", []),
        ("metadata.labels", {}),
        ("metadata.ownerReferences", []),
    ],
)
def test_every_edit_of_a_field_of_ours_is_named(path: str, value: Any) -> None:
    live = _live()
    *parents, last = path.split(".")
    at: Any = live
    for part in parents:
        at = at[int(part) if part.isdigit() else part]
    at[last] = value
    named = list(drift.differences(_wanted(), live))
    assert named
    assert all(name.startswith(path.partition(".")[0]) for name in named)


def test_a_key_more_in_a_selector_is_an_edit_as_it_chooses_other_pods() -> None:
    service = create_service()
    for wanted in (manifests.kube_service(service), manifests.disruption_budget(service, 0)):
        live = json.loads(json.dumps(wanted))
        selector = live["spec"]["selector"]
        selector.get("matchLabels", selector)["track"] = "canary"
        assert list(drift.differences(wanted, live)) == ["spec.selector"]


def test_a_field_that_is_no_longer_wanted_shows_in_the_manifest_hash() -> None:
    service = create_service(hardware__nodeSelector={"disk": "ssd"})
    before = manifests.workload(service, SETTINGS, ceiling=8, replicas=1, live=None)
    assert "metadata.annotations.sluice.dev/manifest" in drift.differences(_wanted(), before)


def test_a_target_that_is_no_longer_wanted_is_named_and_the_keys_of_others_are_not() -> None:
    runtime = DecidedRuntime(1, 4, 1)
    live = manifests.configmap(create_service(), SETTINGS, runtime)
    live["data"]["others"] = "x"
    wanted = manifests.configmap(create_service(slo__interTokenLatency=None), SETTINGS, runtime)
    named = set(drift.changes(wanted, live))
    assert named == {"data.slo_itl_ms", "metadata.annotations.sluice.dev/manifest"}


def test_a_difference_that_the_api_server_made_itself_is_accepted_once() -> None:
    wanted, live = _wanted(), _live()
    live["spec"]["replicas"] = 7
    accepted = drift.acceptance(wanted, live)
    live["metadata"]["resourceVersion"] = "8"
    live["status"] = {"replicas": 1}
    assert drift.acceptance(wanted, live) == accepted
    live["spec"]["replicas"] = 9
    assert drift.acceptance(wanted, live) != accepted


def test_the_runtime_survives_its_configmap() -> None:
    from sluice_operator.children.runtime import parse

    for runtime in (DecidedRuntime(0, None, 1), DecidedRuntime(7, 12, 3)):
        manifest = manifests.configmap(create_service(), SETTINGS, runtime)
        assert parse(manifest["data"]) == runtime


def test_a_memory_that_an_earlier_operator_wrote_is_read() -> None:
    from sluice_operator.children.runtime import parse

    loaded = '{"loaded_cap": {"cap": 18, "time_s": 500.0, "times": 2, "per_s": 1.5}}'
    runtime = parse({"epoch": "1", "replicas": "1", "past.json": loaded})
    assert runtime is not None
    assert runtime.past.loaded_cap == LoadedCap(18, 500.0, 2, 1.5)


@pytest.mark.parametrize(
    "data",
    [
        {},
        {"epoch": "x", "replicas": "1"},
        {"epoch": "1", "replicas": "-1"},
        {"epoch": "9" * 20, "replicas": "1"},
        {"epoch": "1", "replicas": "1001"},
        {"epoch": "1", "replicas": "1", "cap": "4097"},
    ],
)
def test_nonsense_in_the_configmap_is_not_taken_for_a_runtime(data: dict[str, str]) -> None:
    from sluice_operator.children.runtime import parse

    assert parse(data) is None


def test_a_memory_of_times_that_are_none_is_forgotten() -> None:
    from sluice_operator.children.runtime import parse

    assert parse(DecidedRuntime(7, 4096, 2).data()) == DecidedRuntime(7, 4096, 2)
    change = {"time_s": 1.0, "from_cap": 1, "to_cap": 2, "epoch": 1, "reason": "Headroom"}
    known = {"epoch": "1", "replicas": "1"}
    for nonsense in ({"epoch": 10**23}, {"time_s": -1e15}):
        past = json.dumps({"last_change": {**change, **nonsense}})
        assert parse({**known, "past.json": past}) == DecidedRuntime(1, None, 1)
    kept = parse({**known, "past.json": json.dumps({"last_change": change})})
    assert kept is not None
    assert kept.past.last_change is not None
