"""Dashboards and alerts name metrics that are there. Each alert has a paragraph."""

import re
from pathlib import Path

import dashboards
import prometheus
import pytest
from sluice_frontend.evidence.metrics import OWN
from sluice_operator.metrics import Metrics
from sluice_operator.status.samples import FAMILIES

PAGE = (Path(__file__).parents[3] / "docs/monitoring.md").read_text()
RULES = [rule for group in prometheus.rules_of_chart()["groups"] for rule in group["rules"]]
ALERTS = {rule["alert"]: rule for rule in RULES if "alert" in rule}
RECORDED = {rule["record"] for rule in RULES if "record" in rule}
QUERIES = [
    *(query for make in dashboards.DASHBOARDS.values() for query in dashboards.queries(make())),
    *(rule["expr"] for rule in RULES),
]


def exported() -> set[str]:
    """Every name that a pod or the operator shows."""
    own = {f.name + "_total" * f.kind.__name__.startswith("Counter") for f in OWN}
    of_operator = {s.name for family in Metrics().registry.collect() for s in family.samples}
    return own | of_operator | {family.name for family in FAMILIES}


@pytest.mark.parametrize("name", dashboards.DASHBOARDS)
def test_a_dashboard_of_the_chart_is_as_the_module_writes_it(name: str, tmp_path: Path) -> None:
    dashboards.main(tmp_path)
    file = f"{name}.json"
    assert (dashboards.FOLDER / file).read_text() == (tmp_path / file).read_text()


@pytest.mark.parametrize("query", QUERIES)
def test_a_query_names_only_metrics_that_are_there(query: str) -> None:
    names = set(re.findall(r"\bsluice[_:][\w:]+", query))
    assert names
    assert names - exported() - RECORDED == set()


def test_each_alert_has_its_paragraph_and_row() -> None:
    headings = re.findall(r"^### (\w+)$", PAGE, re.MULTILINE)
    rows = re.findall(r"^\| `(Sluice\w+)` \|", PAGE, re.MULTILINE)
    assert headings == rows == [*ALERTS]
    for name, rule in ALERTS.items():
        assert rule["annotations"]["runbook"] == f"docs/monitoring.md#{name.lower()}"
        assert rule["labels"]["severity"] in ("critical", "warning")
