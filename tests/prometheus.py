"""Debian's Prometheus, which scrapes a cluster by the chart's monitors and has its rules."""

import json
import os
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import dashboards
import httpx
import yaml
from sluice_cluster import debian
from sluice_cluster.settings import ClusterSettings
from sluice_cluster.shell import Word, run, wait_until

CHART = Path(__file__).parents[1] / "charts/sluice"
PACKAGE = {"prometheus": "/usr/bin/prometheus"}
API = "monitoring.coreos.com/v1"
SYSTEM = "sluice-system"
START_S = 20.0
TIED = ("setpriv", "--pdeathsig=KILL")
Json = dict[str, Any]


def lacks() -> str:
    """Why there is no Prometheus on this machine; "" once there is one. Installs it as root."""
    settings = ClusterSettings.from_environment()
    if debian.missing(PACKAGE) and not settings.is_root:
        return "Prometheus is not installed, and only root can: apt-get install prometheus"
    debian.install_missing(settings.paths, PACKAGE)
    return ""


def monitoring(helm: Path, *arguments: str) -> dict[str, list[Json]]:
    """What the chart makes with `monitoring.enabled` for a Prometheus operator, by kind."""
    images = ("--set", "image=x,worker.image=x,monitoring.enabled=true")
    command: list[Word] = [helm, "template", "sluice", CHART, "--namespace", SYSTEM, *images]
    made: dict[str, list[Json]] = {}
    for body in yaml.safe_load_all(run([*command, "--api-versions", API, *arguments])):
        if body:
            made.setdefault(body["kind"], []).append(body)
    return made


def rules_of_chart() -> Json:
    """The rules as they are in the chart."""
    rules: Json = yaml.safe_load((CHART / "files/rules.yaml").read_text())
    return rules


def _label(word: str) -> str:
    return "".join(c if c.isalnum() else "_" for c in word)


def _job(monitor: Json, role: str, about: str, port: str, kubeconfig: Path) -> Json:
    """A scrape as the Prometheus operator makes it of a monitor. `about`, `port`: whose labels it
    selects by, and where the port's name is, in the words of the service discovery."""
    meta, spec = monitor["metadata"], monitor["spec"]
    [end] = spec.get("podMetricsEndpoints") or spec["endpoints"]
    where = spec.get("namespaceSelector", {"matchNames": [meta["namespace"]]})
    discovery: Json = {"role": role, "kubeconfig_file": str(kubeconfig)}
    if not where.get("any"):
        discovery["namespaces"] = {"names": where["matchNames"]}
    kept = {f"__meta_kubernetes_{about}_label_{_label(k)}": v
            for k, v in spec["selector"]["matchLabels"].items()}  # fmt: skip
    kept[f"__meta_kubernetes_{port}"] = end["port"]
    copied = {"namespace": "namespace", "pod_name": "pod", "pod_container_name": "container"}
    relabel: list[Json] = [
        {"action": "keep", "source_labels": [name], "regex": value} for name, value in kept.items()
    ]
    relabel += [
        {"source_labels": [f"__meta_kubernetes_{name}"], "target_label": label}
        for name, label in copied.items()
    ]
    snake = {"sourceLabels": "source_labels", "targetLabel": "target_label"}
    relabel += [
        {snake.get(key, key): value for key, value in one.items()}
        for one in end.get("relabelings", ())
    ]
    return {
        "job_name": f"{monitor['kind']}/{meta['namespace']}/{meta['name']}",
        "honor_labels": end.get("honorLabels", False),
        "kubernetes_sd_configs": [discovery],
        "relabel_configs": relabel,
    }


def jobs_of_chart(helm: Path, kubeconfig: Path) -> list[Json]:
    """Scrapes of a cluster, by the chart's monitors."""
    made = monitoring(helm)
    pod = ("pod", "pod", "pod_container_port_name", kubeconfig)
    service = ("endpoints", "service", "endpoint_port_name", kubeconfig)
    jobs = [_job(one, *pod) for one in made["PodMonitor"]]
    return jobs + [_job(one, *service) for one in made["ServiceMonitor"]]


def shortened(rules: Json, windows: Mapping[str, str]) -> Json:
    """The rules with a `for` of a second, and other `windows` in their queries."""
    text = json.dumps(rules)
    for long, short in windows.items():
        text = text.replace(f"[{long}]", f"[{short}]")
    made: Json = json.loads(text)
    for group in made["groups"]:
        for rule in group["rules"]:
            if "for" in rule:
                rule["for"] = "1s"
    return made


@dataclass(frozen=True)
class Prometheus:
    """One that runs."""

    client: httpx.Client

    def series(self, query: str) -> list[Json]:
        """What an instant query returns. A query that cannot be read fails with its words."""
        answer = self.client.get("/api/v1/query", params={"query": query}).json()
        assert answer["status"] == "success", (query, answer)
        assert answer["data"]["resultType"] == "vector", (query, answer)
        result: list[Json] = answer["data"]["result"]
        return result

    def firing(self, alert: str, **labels: str) -> bool:
        """True while the alert fires with these labels."""
        chosen = {"alertname": alert, "alertstate": "firing", **labels}
        matchers = ", ".join(f'{name}="{value}"' for name, value in chosen.items())
        return bool(self.series(f"ALERTS{{{matchers}}}"))

    def fires(self, alert: str, seconds: float, **labels: str) -> None:
        """Wait until it fires."""
        what = f"{alert} {labels} to fire"
        wait_until(what, lambda: self.firing(alert, **labels), seconds)

    def resolves(self, alert: str, seconds: float, **labels: str) -> None:
        """Wait until it fires no more."""
        what = f"{alert} {labels} to resolve"
        wait_until(what, lambda: not self.firing(alert, **labels), seconds)


@contextmanager
def running(
    jobs: Sequence[Json], folder: Path, port: int, windows: Mapping[str, str] | None = None
) -> Iterator[Prometheus]:
    """A Prometheus on loopback that scrapes and looks at the chart's rules each second, until the
    end of the block. Its data and its log are in `folder`; `windows`: as of `shortened`."""
    (folder / "rules.yaml").write_text(json.dumps(shortened(rules_of_chart(), windows or {})))
    told = {
        "global": {"scrape_interval": "1s", "scrape_timeout": "1s", "evaluation_interval": "1s"},
        "rule_files": [str(folder / "rules.yaml")],
        "scrape_configs": jobs,
    }
    (folder / "prometheus.yaml").write_text(json.dumps(told))
    command = [
        *TIED, PACKAGE["prometheus"], f"--config.file={folder / 'prometheus.yaml'}",
        f"--storage.tsdb.path={folder / 'data'}", f"--web.listen-address=127.0.0.1:{port}",
    ]  # fmt: skip
    with (folder / "prometheus.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, env=dict(os.environ))
    try:
        base = f"http://127.0.0.1:{port}"
        with httpx.Client(base_url=base, timeout=10, trust_env=False) as client:
            _await(client, process, folder / "prometheus.log")
            yield Prometheus(client)
    finally:
        process.terminate()
        process.wait(10)


def _await(client: httpx.Client, process: subprocess.Popen[bytes], log: Path) -> None:
    end = time.monotonic() + START_S
    while True:
        assert process.poll() is None, log.read_text()[-2000:]
        assert time.monotonic() < end, log.read_text()[-2000:]
        try:
            if client.get("/-/ready").is_success:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.2)


def every_query_has_series(watch: Prometheus, namespace: str, name: str, seconds: float) -> None:
    """Wait until each query of a panel has series, and each rule that is recorded. The queries of
    alerts have series while they fire."""
    variables = {"$__rate_interval": "30s", "$namespace": namespace, "$name": name,
                 "$gpu_price": "2", "$cpu_price": "0.04"}  # fmt: skip
    asked = [q for make in dashboards.DASHBOARDS.values() for q in dashboards.queries(make())]
    for group in rules_of_chart()["groups"]:
        asked += [rule["record"] for rule in group["rules"] if "record" in rule]
    for variable, value in variables.items():
        asked = [query.replace(variable, value) for query in asked]

    def without() -> list[str]:
        return [query for query in asked if not watch.series(query)]

    wait_until("series", lambda: not without(), seconds, why_not=lambda: "\n".join(without()))
