"""The chart's dashboards for Grafana, from the queries below: `fleet` and `service`.

    PYTHONPATH=tests python -m dashboards [charts/sluice/files/dashboards]

A panel's queries are PromQL with Grafana's variables. `queries` lists those of a dashboard.
"""

import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parents[1] / "charts/sluice/files/dashboards"
Json = dict[str, Any]
SOURCE: Json = {"type": "prometheus", "uid": "${datasource}"}
MANY = 'namespace=~"$namespace"'
ONE = 'namespace="$namespace", name="$name"'
BY = "by (namespace, name)"


def _nearest(metric: str) -> str:
    """Of each object, the value at the target that is nearest to its limit."""
    used = f"sluice_service_target_used_ratio{{{MANY}}} / sluice_service_target_allowed_ratio"
    nearest = f"topk {BY} (1, {used})"
    here = f"{metric}{{{MANY}}} and on (namespace, name, target) {nearest}"
    return f"max by (namespace, name, target) ({here})"


def _busy(which: str, window: str) -> str:
    """By pod: of another maker's engine without reports of steps, the time with requests in it."""
    steps = f"rate(sluice_step_seconds_total{{{which}}}[{window}]) > 0"
    return f"clamp_max(({steps}) or rate(sluice_busy_seconds_total{{{which}}}[{window}]), 1)"


def _cost(which: str, window: str) -> str:
    """Of a million tokens, from the price of an hour of one device or CPU; none without a price."""
    units = [
        f'max {BY} (sluice_service_pod_units{{{which}, unit="{unit}"}}) * ${unit.lower()}_price'
        for unit in ("GPU", "CPU")
    ]
    pods = f'max {BY} (sluice_service_replicas{{{which}, state="ready"}})'
    tokens = f"sum {BY} (rate(sluice_generated_tokens_total{{{which}}}[{window}])) > 0"
    return f"(({' or '.join(units)}) > 0) * {pods} / ({tokens}) * 1e6 / 3600"


COLUMNS: Sequence[tuple[str, str, str]] = (
    ("Cap", f"max {BY} (sluice_service_cap{{{MANY}}})", "none"),
    ("Limit", f"max by (namespace, name, limited_by) (sluice_service_cap_ceiling{{{MANY}}})",
     "none"),
    ("P99", _nearest("sluice_service_latency_seconds"), "s"),
    ("Bound", _nearest("sluice_service_latency_bound_seconds"), "s"),
    ("n", _nearest("sluice_service_latency_samples"), "short"),
    ("Target is", _nearest("sluice_service_target_seconds"), "s"),
    ("Within target", f"1 - {_nearest('sluice_service_target_used_ratio')}", "percentunit"),
    ("Queue", f"sum {BY} (sluice_num_requests_waiting{{{MANY}}})", "none"),
    ("Replicas", f'max {BY} (sluice_service_replicas{{{MANY}, state="ready"}})', "none"),
    ("KV in use", f"max {BY} (sluice_kv_usage{{{MANY}}})", "percentunit"),
    ("In steps", f"avg {BY} ({_busy(MANY, '5m')})", "percentunit"),
    ("Tokens/s", f"sum {BY} (rate(sluice_generated_tokens_total{{{MANY}}}[5m]))", "short"),
    ("Cost of 1M tokens", _cost(MANY, "5m"), "none"),
    ("Misses/s", "topk by (namespace, name) (1, sum by (namespace, name, cause) "
     f"(rate(sluice_first_token_misses_total{{{MANY}}}[5m])) > 0)", "short"),
)  # fmt: skip
"""Of the fleet's table: title, query and unit. Labels `target`, `limited_by` and `cause` are its
columns too."""

RATE = "$__rate_interval"
PANELS: Sequence[tuple[str, str, Sequence[tuple[str, str]]]] = (
    ("Time at the percentile, its bound, and the target", "s", (
        (f"sluice_service_latency_seconds{{{ONE}}}", "{{target}}"),
        (f"sluice_service_latency_bound_seconds{{{ONE}}}", "{{target}}, bound"),
        (f"sluice_service_target_seconds{{{ONE}}}", "{{target}}, target"))),
    ("Share within target, and what is asked", "percentunit", (
        (f"1 - sum by (target) (rate(sluice_target_misses_total{{{ONE}}}[{RATE}])) / "
         f"(sum by (target) (rate(sluice_target_values_total{{{ONE}}}[{RATE}])) > 0)",
         "{{target}}"),
        (f"1 - sluice_service_target_allowed_ratio{{{ONE}}}", "{{target}}, target"))),
    ("Cap", "none", (
        (f"max(sluice_service_cap{{{ONE}}})", "cap"),
        (f"max by (limited_by) (sluice_service_cap_ceiling{{{ONE}}})", "limit {{limited_by}}"))),
    ("Replicas", "none", ((f"sluice_service_replicas{{{ONE}}}", "{{state}}"),)),
    ("Queue, by what is waited for", "none", (
        (f"sum by (reason) (sluice_num_requests_waiting{{{ONE}}})", "{{reason}}"),)),
    ("Late first tokens a second, by cause", "short", (
        (f"sum by (cause) (rate(sluice_first_token_misses_total{{{ONE}}}[{RATE}]))",
         "{{cause}}"),)),
    ("KV cache in use", "percentunit", ((f"sluice_kv_usage{{{ONE}}}", "{{pod}}"),)),
    ("Share of the device's time that steps took", "percentunit", (
        (_busy(ONE, RATE), "{{pod}}"),)),
    ("Tokens a second", "short", (
        (f"sum by (pod) (rate(sluice_generated_tokens_total{{{ONE}}}[{RATE}]))", "{{pod}}"),)),
    ("Cost of a million tokens", "none", ((_cost(ONE, RATE), "cost"),)),
    ("Memory: plan and measured", "bytes", (
        (f"max by (class, kind) (sluice_memory_bytes{{{ONE}}})", "{{class}}, {{kind}}"),)),
    ("Measured memory over the plan", "percentunit", (
        (f"sluice_service_memory_error_ratio{{{ONE}}}", "of the plan"),)),
    ("Batch work: requests of the background", "none", (
        (f"sum by (state) (sluice_num_requests_background{{{ONE}}})", "{{state}}"),
        (f"sum by (outcome) (rate(sluice_background_requests_total{{{ONE}}}[{RATE}]))",
         "{{outcome}} a second"))),
    ("InferenceBatches of the namespace", "none", (
        ('sluice_batch_requests{namespace="$namespace"}', "{{name}}, {{state}}"),)),
    ("Conditions", "none", (
        (f"sluice_condition{{{ONE}}}", "{{type}} {{status}}: {{reason}}"),)),
)  # fmt: skip
"""Of one service over time: title, unit, and queries with their legends."""
NAMESPACES = 'label_values(sluice_condition{kind="InferenceService"}, namespace)'
CHANGES = f"sluice_service_change_timestamp_seconds{{{ONE}}} * 1000"
"""Annotations: the times of decisions, in ms."""


def _variable(name: str, query: str, **more: Any) -> Json:
    return {
        "name": name, "type": "query", "datasource": SOURCE, "definition": query, "refresh": 2,
        "query": {"query": query, "refId": name}, "sort": 1, **more,
    }  # fmt: skip


def _price(unit: str) -> Json:
    label = f"Price of one {unit} hour"
    default = {"text": "0", "value": "0"}
    return {"name": f"{unit.lower()}_price", "label": label, "type": "textbox", "query": "0",
            "current": default, "options": [{**default, "selected": True}]}  # fmt: skip


def _dashboard(uid: str, title: str, variables: Sequence[Json], **more: Any) -> Json:
    source = {"name": "datasource", "type": "datasource", "query": "prometheus"}
    return {
        "uid": uid, "title": title, "tags": ["sluice"], "schemaVersion": 39, "editable": True,
        "refresh": "30s", "time": {"from": "now-3h", "to": "now"},
        "templating": {"list": [source, *variables, _price("GPU"), _price("CPU")]}, **more,
    }  # fmt: skip


def _targets(queries: Sequence[tuple[str, str]], **more: Any) -> list[Json]:
    return [
        {"refId": chr(ord("A") + i), "expr": query, "legendFormat": legend, "datasource": SOURCE,
         **more}
        for i, (query, legend) in enumerate(queries)
    ]  # fmt: skip


def fleet() -> Json:
    """A table with a row an object."""
    refs = [f"Value #{chr(ord('A') + i)}" for i in range(len(COLUMNS))]
    titles = dict(zip(refs, (title for title, _, _ in COLUMNS), strict=True))
    link = (
        "/d/sluice-service?var-namespace=${__data.fields.namespace}&var-name=${__data.fields.name}"
    )
    units = [
        {"matcher": {"id": "byName", "options": title},
         "properties": [{"id": "unit", "value": unit}]}
        for title, _, unit in COLUMNS
    ]  # fmt: skip
    links = {"id": "links", "value": [{"title": "over time", "url": link}]}
    named = {"matcher": {"id": "byName", "options": "name"}, "properties": [links]}
    table = {
        "id": 1, "type": "table", "title": "Services", "datasource": SOURCE,
        "description": "P99 stands for the percentile that an object asks for. It is shown of the "
        "target that is nearest to its limit.",
        "gridPos": {"x": 0, "y": 0, "w": 24, "h": 22},
        "targets": _targets([(query, "") for _, query, _ in COLUMNS], instant=True, format="table"),
        "fieldConfig": {"defaults": {"decimals": 2}, "overrides": [*units, named]},
        "transformations": [
            {"id": "merge", "options": {}},
            {"id": "organize", "options": {
                "excludeByName": {"Time": True}, "renameByName": titles,
                "indexByName": {name: i for i, name in enumerate(("namespace", "name", *refs[:2],
                    "limited_by", "target", *refs[2:], "cause"))}}},
        ],
    }  # fmt: skip
    every = {"multi": True, "includeAll": True, "allValue": ".*"}
    chosen = _variable("namespace", NAMESPACES, **every)
    return _dashboard("sluice-fleet", "Sluice: fleet", [chosen], panels=[table])


def service() -> Json:
    """The same of one service over time."""
    dashed = {"id": "custom.lineStyle", "value": {"fill": "dash"}}
    target = {"matcher": {"id": "byRegexp", "options": "/, target$/"}, "properties": [dashed]}
    panels = [
        {
            "id": i + 1, "type": "timeseries", "title": title, "datasource": SOURCE,
            "gridPos": {"x": 12 * (i % 2), "y": 8 * (i // 2), "w": 12, "h": 8},
            "targets": _targets(queries),
            "fieldConfig": {"defaults": {"unit": unit}, "overrides": [target]},
        }
        for i, (title, unit, queries) in enumerate(PANELS)
    ]  # fmt: skip
    changes = {
        "name": "Decisions", "enable": True, "datasource": SOURCE, "expr": CHANGES, "step": "30s",
        "iconColor": "orange", "titleFormat": "{{of}}: {{reason}}", "useValueForTime": True,
    }  # fmt: skip
    of = 'label_values(sluice_condition{kind="InferenceService", namespace="$namespace"}, name)'
    variables = [_variable("namespace", NAMESPACES), _variable("name", of)]
    return _dashboard(
        "sluice-service", "Sluice: one service", variables, panels=panels,
        annotations={"list": [changes]},
    )  # fmt: skip


DASHBOARDS = {"fleet": fleet, "service": service}


def queries(dashboard: Json) -> Iterator[str]:
    """The queries of panels and annotations."""
    for panel in dashboard["panels"]:
        yield from (target["expr"] for target in panel["targets"])
    yield from (one["expr"] for one in dashboard.get("annotations", {"list": []})["list"])


def main(folder: Path) -> None:
    """Write the dashboards' files."""
    for name, make in DASHBOARDS.items():
        (folder / f"{name}.json").write_text(json.dumps(make(), indent=1) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else FOLDER)
