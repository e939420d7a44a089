"""What the chart makes for a Prometheus operator: where its definitions are, and where not."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from integration.apiserver import ApiServer
from integration.test_crd_chart import CHART, IMAGES, Manifest, kubectl, of_kind, template
from prometheus import API, rules_of_chart
from sluice_cluster import binaries
from sluice_cluster.settings import ClusterSettings, LocalClusterError
from sluice_cluster.shell import Word, run, wait_until

MODULE = "github.com/prometheus-operator/prometheus-operator@v0.85.0"
KINDS = ("podmonitors", "servicemonitors", "prometheusrules")
_numbers = itertools.count()
ON = (*IMAGES, "--set", "monitoring.enabled=true")


@pytest.fixture(scope="module")
def helm() -> Path:
    return binaries.ensure(ClusterSettings.from_environment().paths, ("helm",)) / "helm"


@pytest.fixture(scope="module")
def definitions() -> list[Path]:
    """Those of the Prometheus operator, from its Go module."""
    paths = ClusterSettings.from_environment().paths
    command: list[Word] = [binaries.find_go(paths), "mod", "download", "-json", MODULE]
    folder = Path(json.loads(run(command, cwd=paths.module))["Dir"])
    crds = folder / "example/prometheus-operator-crd"
    return [crds / f"monitoring.coreos.com_{kind}.yaml" for kind in KINDS]


@pytest.fixture
def namespace(apiserver: ApiServer) -> Iterator[str]:
    name = f"monitoring-{next(_numbers)}"
    kubectl(apiserver, "create", "namespace", name)
    yield name
    kubectl(apiserver, "delete", "namespace", name, "--wait=false")


def test_without_the_definitions_dashboards_are_made_and_with_them_monitors_too(
    helm: Path, apiserver: ApiServer, namespace: str, definitions: list[Path]
) -> None:
    """The API server checks each against its schema."""
    where: list[Word] = ["--namespace", namespace, "--kubeconfig", apiserver.kubeconfig]
    alone = ("--set", "crds.install=false,userRoles=false")
    chart: list[Word] = ["monitored-sluice", CHART, *ON, *alone, *where]
    said = run([helm, "install", *chart])
    assert "Only the dashboards were made" in said

    def made(kinds: str) -> list[str]:
        return kubectl(apiserver, "get", kinds, "-n", namespace, "-o", "name").split()

    dashboards = ["configmap", "-l", "grafana_dashboard=1"]
    names = kubectl(apiserver, "get", *dashboards, "-n", namespace, "-o", "name").split()
    assert names == [
        f"configmap/monitored-sluice-dashboard-{name}" for name in ("fleet", "service")
    ]
    for file in definitions:
        kubectl(apiserver, "apply", "--server-side", "-f", str(file))
    crds = [f"crd/{kind}.monitoring.coreos.com" for kind in KINDS]
    kubectl(apiserver, "wait", "--for=condition=Established", "--timeout=60s", *crds)
    shown = ("api-resources", "--api-group=monitoring.coreos.com", "-o", "name")
    wait_until("their discovery", lambda: len(kubectl(apiserver, *shown).split()) == 3, 30.0)
    try:
        said = run([helm, "upgrade", *chart])
        assert "Only the dashboards were made" not in said
        group = "monitoring.coreos.com"
        assert made(",".join(KINDS)) == [
            f"podmonitor.{group}/monitored-sluice-gate",
            f"podmonitor.{group}/monitored-sluice-worker",
            f"servicemonitor.{group}/monitored-sluice",
            f"prometheusrule.{group}/monitored-sluice",
        ]
        strict = ("create", "--dry-run=server", "--validate=strict", "-n", "default", "-f", "-")
        for body in _monitors(helm):
            del body["metadata"]["namespace"]
            kubectl(apiserver, *strict, stdin=json.dumps(body))
        broken = _monitors(helm)[0]
        del broken["metadata"]["namespace"]
        broken["spec"]["podMetricsEndpoints"][0]["prot"] = "admin"
        with pytest.raises(LocalClusterError, match=r'unknown field "spec.*prot"'):
            kubectl(apiserver, *strict, stdin=json.dumps(broken))
        run([helm, "uninstall", "monitored-sluice", *where])
    finally:
        kubectl(apiserver, "delete", *crds)


def _monitors(helm: Path, *arguments: str) -> list[Manifest]:
    rendered = template(helm, *ON, "--api-versions", API, *arguments)
    return [body for body in rendered if body["apiVersion"] == API]


def test_monitoring_is_off_by_default(helm: Path) -> None:
    rendered = template(helm, *IMAGES, "--api-versions", API)
    assert not [body for body in rendered if body["apiVersion"] == API]
    assert not of_kind(rendered, "ConfigMap")


@pytest.mark.parametrize(
    ("value", "named"),
    [
        ("monitoring.enabled=maybe", "/monitoring/enabled"),
        ("monitoring.lables.a=b", "lables"),
        ("metrics.service=7", "/metrics/service"),
        ("imagePullPolicy=Sometimes", "/imagePullPolicy"),
    ],
)
def test_a_wrong_value_is_refused_with_its_name(helm: Path, value: str, named: str) -> None:
    with pytest.raises(LocalClusterError, match=f"(?s)schema.*{named}"):
        template(helm, *IMAGES, "--set", value)


def test_monitors_look_where_the_operator_serves(helm: Path) -> None:
    def where(*more: str) -> set[str]:
        found = of_kind(_monitors(helm, *more), "PodMonitor")
        return {json.dumps(one["spec"]["namespaceSelector"]) for one in found}

    assert where() == {'{"any": true}'}
    assert where("--set", "watchNamespaces={a,b}") == {'{"matchNames": ["a", "b"]}'}


def test_labels_select_monitors_and_rules_and_the_charts_own_stay(helm: Path) -> None:
    mine = "monitoring.labels.release=stack,monitoring.labels.app\\.kubernetes\\.io/name=other"
    for body in _monitors(helm, "--set", mine):
        labels = body["metadata"]["labels"]
        assert labels["release"] == "stack"
        assert labels["app.kubernetes.io/name"] == "sluice-operator"


def test_the_operators_monitor_finds_its_service_which_monitoring_brings(helm: Path) -> None:
    off = ("--set", "metrics.service=false")
    [service] = of_kind(template(helm, *ON, *off), "Service")
    [monitor] = of_kind(_monitors(helm, *off), "ServiceMonitor")
    selected = monitor["spec"]["selector"]["matchLabels"]
    assert selected.items() <= service["metadata"]["labels"].items()
    [end] = monitor["spec"]["endpoints"]
    assert end["port"] in [port["name"] for port in service["spec"]["ports"]]
    assert not of_kind(template(helm, *IMAGES, *off), "Service")
    assert not of_kind(template(helm, *IMAGES, *off), "Pod")


def test_the_rules_are_those_of_the_file(helm: Path) -> None:
    [rule] = of_kind(_monitors(helm), "PrometheusRule")
    assert rule["spec"] == rules_of_chart()


def test_the_pod_of_helm_test_has_no_token_and_passes_pod_security_restricted(
    helm: Path, apiserver: ApiServer, namespace: str
) -> None:
    [pod] = of_kind(template(helm, *IMAGES), "Pod")
    assert pod["spec"]["automountServiceAccountToken"] is False
    assert "serviceAccountName" not in pod["spec"]
    [container] = pod["spec"]["containers"]
    assert container["command"][-1] == "$(SLUICE_METRICS_SERVICE_HOST):9090"
    label = "pod-security.kubernetes.io/enforce=restricted"
    kubectl(apiserver, "label", "namespace", namespace, label)
    pod["metadata"]["namespace"] = namespace
    said = kubectl(apiserver, "create", "--dry-run=server", "-f", "-", stdin=json.dumps(pod))
    assert "created" in said
