"""Debian's Prometheus, which scrapes a cluster by the chart's monitors and has its rules."""

import json
import os
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import dashboards
import httpx
import yaml
from demo.kube import Kube
from sluice_cluster import debian
from sluice_cluster.settings import ClusterSettings
from sluice_cluster.shell import Word, run, wait_until

CHART = Path(__file__).parents[1] / "charts/sluice"
PACKAGE = {"prometheus": "/usr/bin/prometheus"}
API = "monitoring.coreos.com/v1"
SYSTEM = "sluice-system"
START_S = 20.0
TIED = ("setpriv", "--pdeathsig=KILL")
META = "__meta_kubernetes"
Json = dict[str, Any]
Windows = Mapping[str, str] | None


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


def _job(monitor: Json, role: str, about: str, port: str) -> Json:
    """A scrape as the Prometheus operator makes it of a monitor. `about`, `port`: whose labels it
    selects by, and where the port's name is, in the words of the service discovery."""
    meta, spec = monitor["metadata"], monitor["spec"]
    [end] = spec.get("podMetricsEndpoints") or spec["endpoints"]
    where = spec.get("namespaceSelector", {"matchNames": [meta["namespace"]]})
    kept = {f"{META}_{about}_label_{_label(k)}": v
            for k, v in spec["selector"]["matchLabels"].items()}  # fmt: skip
    kept[f"{META}_{port}"] = end["port"]
    if not where.get("any"):
        kept[f"{META}_namespace"] = "|".join(where["matchNames"])
    copied = {"namespace": "namespace", "pod_name": "pod", "pod_container_name": "container"}
    relabel: list[Json] = [
        {"action": "keep", "source_labels": [name], "regex": value} for name, value in kept.items()
    ]
    relabel += [
        {"source_labels": [f"{META}_{name}"], "target_label": label}
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
        "file_sd_configs": [{"files": [f"{role}.json"]}],
        "relabel_configs": relabel,
    }


def jobs_of_chart(helm: Path) -> list[Json]:
    """Scrapes of a cluster, by the chart's monitors."""
    made = monitoring(helm)
    jobs = [_job(one, "pod", "pod", "pod_container_port_name") for one in made["PodMonitor"]]
    service = ("endpoints", "service", "endpoint_port_name")
    return jobs + [_job(one, *service) for one in made["ServiceMonitor"]]


def _target(address: str, port: int, body: Json, labels: Json, **told: Json) -> Json:
    """`labels`: of the discovery, below `META`; `told`: the labels of objects, by kind."""
    found = {f"{META}_{name}": value for name, value in labels.items()}
    found[f"{META}_namespace"] = body["metadata"]["namespace"]
    for kind, of in told.items():
        values = of["metadata"].get("labels", {}).items()
        found |= {f"{META}_{kind}_label_{_label(name)}": value for name, value in values}
    return {"targets": [f"{address}:{port}"], "labels": found}


def _pods(pods: Sequence[Json]) -> Iterator[Json]:
    for pod in pods:
        for container in pod["spec"]["containers"] if "podIP" in pod["status"] else ():
            for port in container.get("ports", ()):
                labels = {
                    "pod_name": pod["metadata"]["name"],
                    "pod_container_name": container["name"],
                    "pod_container_port_name": port.get("name", ""),
                }
                yield _target(pod["status"]["podIP"], port["containerPort"], pod, labels, pod=pod)


def _endpoints(
    endpoints: Sequence[Json], services: Mapping[tuple[str, str], Json]
) -> Iterator[Json]:
    for one in endpoints:
        meta = one["metadata"]
        service = services.get((meta["namespace"], meta["name"]))
        if service is None:
            continue
        for subset in one.get("subsets", ()):
            for address, port in product(subset.get("addresses", ()), subset.get("ports", ())):
                labels = {
                    "pod_name": address.get("targetRef", {}).get("name", ""),
                    "endpoint_port_name": port.get("name", ""),
                }
                yield _target(address["ip"], port["port"], one, labels, service=service)


def _discover(kube: Kube, folder: Path) -> None:
    """What Prometheus' own service discovery tells of a cluster, which Debian's package lacks."""
    items = kube.get("pods,endpoints,services", "--all-namespaces")["items"]
    found: dict[str, list[Json]] = {"Pod": [], "Endpoints": [], "Service": []}
    for item in items:
        found[item["kind"]].append(item)
    services = {(s["metadata"]["namespace"], s["metadata"]["name"]): s for s in found["Service"]}
    told = {"pod": _pods(found["Pod"]), "endpoints": _endpoints(found["Endpoints"], services)}
    for role, targets in told.items():
        beside = folder / f".{role}.json"
        beside.write_text(json.dumps(list(targets)))
        beside.replace(folder / f"{role}.json")


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
    jobs: Sequence[Json], folder: Path, port: int, windows: Windows = None
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


@contextmanager
def watching(kube: Kube, folder: Path, port: int, windows: Windows = None) -> Iterator[Prometheus]:
    """A Prometheus, as of `running`, that scrapes what the chart's monitors select."""
    is_over = threading.Event()

    def keep() -> None:
        while not is_over.wait(2):
            _discover(kube, folder)

    _discover(kube, folder)
    with ThreadPoolExecutor(1) as pool:
        keeps = pool.submit(keep)
        try:
            with running(jobs_of_chart(kube.bin_dir / "helm"), folder, port, windows) as one:
                yield one
        finally:
            is_over.set()
        keeps.result()


def every_query_has_series(
    watch: Prometheus, namespace: str, name: str, seconds: float, ask: Callable[[], None]
) -> None:
    """Wait until each query of a panel has had series, and each rule that is recorded, while `ask`
    keeps requests coming. The queries of alerts have series while they fire."""
    variables = {"$__rate_interval": "30s", "$namespace": namespace, "$name": name,
                 "$gpu_price": "2", "$cpu_price": "0.04"}  # fmt: skip
    left = [q for make in dashboards.DASHBOARDS.values() for q in dashboards.queries(make())]
    for group in rules_of_chart()["groups"]:
        left += [rule["record"] for rule in group["rules"] if "record" in rule]
    for variable, value in variables.items():
        left = [query.replace(variable, value) for query in left]

    def all_had() -> bool:
        ask()
        left[:] = [query for query in left if not watch.series(query)]
        return not left

    wait_until("series", all_had, seconds, why_not=lambda: "\n".join(left))
