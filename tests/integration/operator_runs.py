"""A real operator process against a real API server, and an administrator's view of what it did."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import signal
import ssl
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
import yaml
from integration.apiserver import ApiServer
from kubernetes.client import ApiClient, Configuration
from kubernetes.config import load_kube_config
from sluice.processes import free_ports
from sluice_cluster import binaries
from sluice_cluster.settings import ClusterSettings
from sluice_cluster.shell import run, tail, wait_until
from sluice_operator.spec.batch import BATCH_PLURAL
from sluice_operator.spec.service import PLURAL
from unit.operator.objects import changed, valid_object

ROOT = Path(__file__).parents[2]
Object = dict[str, Any]
_PREFIX = {
    "inferenceservices": "/apis/sluice.dev/v1alpha1",
    "inferencebatches": "/apis/sluice.dev/v1alpha1",
    "jobs": "/apis/batch/v1",
    "deployments": "/apis/apps/v1",
    "poddisruptionbudgets": "/apis/policy/v1",
}
CHILDREN = {
    "configmaps": "demo-runtime",
    "secrets": "demo-admin",
    "services": "demo",
    "poddisruptionbudgets": "demo",
    "deployments": "demo",
}
"""Every child of an object named demo."""


@dataclass(frozen=True, slots=True)
class Namespace:
    """One namespace as an administrator sees it."""

    client: httpx.Client
    name: str

    def path(self, plural: str, name: str = "") -> str:
        """The path of a collection, or of one object in it."""
        prefix = _PREFIX.get(plural, "/api/v1")
        return f"{prefix}/namespaces/{self.name}/{plural}" + (f"/{name}" if name else "")

    def find(self, plural: str, name: str) -> Object | None:
        """One object, None if there is none."""
        answer = self.client.get(self.path(plural, name))
        if answer.status_code == 404:
            return None
        return self._object(answer)

    def get(self, plural: str, name: str) -> Object:
        """One object that must be there."""
        return self._object(self.client.get(self.path(plural, name)))

    def all(self, plural: str) -> list[Object]:
        """All of a collection."""
        items: list[Object] = self._object(self.client.get(self.path(plural)))["items"]
        return items

    def create(self, plural: str, body: Object) -> Object:
        """A new object."""
        return self._object(self.client.post(self.path(plural), json=body))

    def patch(self, plural: str, name: str, body: Object, subresource: str = "") -> Object:
        """A merge patch, as a person's `kubectl edit` ends in."""
        path = self.path(plural, name) + (f"/{subresource}" if subresource else "")
        headers = {"Content-Type": "application/merge-patch+json"}
        return self._object(self.client.patch(path, json=body, headers=headers))

    def delete(self, plural: str, name: str) -> None:
        """Gone at once."""
        self._object(self.client.delete(self.path(plural, name)))

    def events(self, reason: str) -> list[str]:
        """Messages of the events with `reason`."""
        return [event["message"] for event in self.all("events") if event["reason"] == reason]

    def condition(self, kind: str, name: str = "demo", plural: str = PLURAL) -> Object:
        """One condition of an object; empty before it has one."""
        status = self.get(plural, name).get("status", {})
        found = [c for c in status.get("conditions", []) if c["type"] == kind]
        return found[0] if found else {}

    def versions(self) -> dict[str, str]:
        """resourceVersion of the object demo and of all its children."""
        everything = {**CHILDREN, "inferenceservices": "demo"}
        return {
            plural: self.get(plural, name)["metadata"]["resourceVersion"]
            for plural, name in everything.items()
        }

    @property
    def demo(self) -> tuple[str, str]:
        """Namespace and name of the object demo."""
        return self.name, "demo"

    @staticmethod
    def child(kind: str) -> str:
        """The name of demo's child of `kind`."""
        return {"ConfigMap": "demo-runtime", "Secret": "demo-admin"}.get(kind, "demo")

    def ours(self, plural: str) -> list[Object]:
        """Those of a collection that the operator made."""
        label = "app.kubernetes.io/managed-by"
        return [o for o in self.all(plural) if label in o["metadata"].get("labels", {})]

    def has_children(self) -> bool:
        """Whether every child of demo is there."""
        return all(self.find(plural, name) for plural, name in CHILDREN.items())

    @staticmethod
    def _object(answer: httpx.Response) -> Object:
        assert answer.is_success, answer.text
        body: Object = answer.json()
        return body


LONG_S = 120.0
"""kopf asks some times more before it gives a watch up, lets go of what it has, and lists anew."""
CRDS = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
CRD = f"{CRDS}/inferenceservices.sluice.dev"
KINDS = (PLURAL, BATCH_PLURAL)


@contextlib.contextmanager
def administrator(server: ApiServer) -> Iterator[httpx.Client]:
    """A connection with every right, the CRD in force."""
    context = ssl.create_default_context(cafile=str(server.certificate_authority))
    context.load_cert_chain(str(server.client_certificate), str(server.client_key))
    with httpx.Client(base_url=server.url, verify=context, trust_env=False, timeout=30) as client:
        for plural in KINDS:
            answer = client.patch(
                f"{CRDS}/{plural}.sluice.dev",
                params={"fieldManager": "test", "force": "true"},
                headers={"Content-Type": "application/apply-patch+yaml"},
                content=(ROOT / f"crds/{plural}.yaml").read_text(),
            )
            assert answer.is_success, answer.text

        def served() -> bool:
            return all(client.get(f"/apis/sluice.dev/v1alpha1/{p}").is_success for p in KINDS)

        wait_until("the CRDs to be served", served, 30.0)
        yield client


def as_account(server: ApiServer, client: httpx.Client, name: str, folder: Path) -> ApiServer:
    """The API server for one who is that service account of the namespace default."""
    request = {"spec": {"expirationSeconds": 3600}}
    account = f"/api/v1/namespaces/default/serviceaccounts/{name}/token"
    token = client.post(account, json=request).json()["status"]["token"]
    authority = base64.b64encode(server.certificate_authority.read_bytes()).decode()
    cluster = {"server": server.url, "certificate-authority-data": authority}
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "it",
        "clusters": [{"name": "it", "cluster": cluster}],
        "users": [{"name": "it", "user": {"token": token}}],
        "contexts": [{"name": "it", "context": {"cluster": "it", "user": "it"}}],
    }
    kubeconfig = folder / "kubeconfig"
    kubeconfig.write_text(json.dumps(config))
    return replace(server, kubeconfig=kubeconfig)


def rendered_chart(release: str, *flags: str) -> list[Object]:
    """What `helm install` of that release into the namespace default would create."""
    helm = binaries.ensure(ClusterSettings.from_environment().paths, ("helm",)) / "helm"
    given = ["--set=image=x", "--set=worker.image=y", "--namespace=default", *flags]
    text = run([helm, "template", release, ROOT / "charts/sluice", *given])
    return [body for body in yaml.safe_load_all(text) if body]


def api_client(server: ApiServer) -> ApiClient:
    """The kubernetes library's, with every right."""
    configuration = Configuration()
    load_kube_config(str(server.kubeconfig), client_configuration=configuration)
    return ApiClient(configuration)


@dataclass(slots=True)
class OperatorProcess:
    """One `sluice-operator`."""

    process: subprocess.Popen[bytes]
    metrics_port: int
    log: Path

    def metric(self, name: str, **labels: str) -> float:
        """Sum of a counter over all series that carry `labels`."""
        url = f"http://127.0.0.1:{self.metrics_port}/metrics"
        total = 0.0
        for line in httpx.get(url, trust_env=False, timeout=30).text.splitlines():
            wanted = all(f'{key}="{value}"' in line for key, value in labels.items())
            if line.startswith((name + "{", name + " ")) and wanted:
                total += float(line.rpartition(" ")[2])
        return total

    def answers(self) -> bool:
        """Whether it has started so far that its metrics can be read."""
        try:
            self.metric("sluice_operator_passes_total")
        except httpx.TransportError:
            return False
        return True

    def await_passes(self, count: int) -> None:
        """Until it has looked `count` more times."""
        before = self.metric("sluice_operator_passes_total")
        self.wait(
            f"{count} passes",
            lambda: self.metric("sluice_operator_passes_total") >= before + count,
        )

    def wait(self, what: str, holds: Callable[[], bool], seconds: float = 30.0) -> None:
        """Until `holds`; fails with the end of the operator's log."""
        wait_until(what, holds, seconds, why_not=lambda: tail(self.log))

    def writes(self) -> float:
        """Requests so far that could change something."""
        verbs = ("PATCH", "POST", "DELETE")
        name = "sluice_operator_api_requests_total"
        return sum(self.metric(name, verb=verb) for verb in verbs)

    def kill(self) -> None:
        """As the kernel would for memory: nothing is cleaned up."""
        self.process.send_signal(signal.SIGKILL)
        self.process.wait(timeout=10)


@contextlib.contextmanager
def running_operator(
    server: ApiServer, models: Path, log: Path, namespace: str = "", *flags: str
) -> Iterator[OperatorProcess]:
    """Start an operator, for one namespace or for all; stop it at the end, no traceback allowed."""
    metrics_port, liveness_port = free_ports(2)
    command = [
        sys.executable, "-m", "sluice_operator", "--worker-image=registry.invalid/worker:1",
        f"--models-dir={models}", "--address=127.0.0.1",
        f"--metrics-port={metrics_port}", f"--liveness-port={liveness_port}",
        "--resync-seconds=1", *([f"--namespace={namespace}"] if namespace else []), *flags,
    ]  # fmt: skip
    environment = {**os.environ, "KUBECONFIG": str(server.kubeconfig)}
    with log.open("ab") as output:
        process = subprocess.Popen(command, env=environment, stdout=output, stderr=output)
    try:
        operator = OperatorProcess(process, metrics_port, log)
        operator.wait("the operator's metrics", operator.answers)
        yield operator
    finally:
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(timeout=20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
    assert "Traceback" not in log.read_text(), tail(log)


def create_namespace(client: httpx.Client, name: str) -> Namespace:
    """A new namespace."""
    body = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}}
    answer = client.post("/api/v1/namespaces", json=body)
    assert answer.is_success, answer.text
    return Namespace(client, name)


def create_demo(space: Namespace, **changes: Any) -> Object:
    """The valid object in `space`, fields of its spec given as paths with __ for the dot."""
    body = changed(valid_object(), "metadata.namespace", space.name)
    for path, value in changes.items():
        body = changed(body, "spec." + path.replace("__", "."), value)
    return space.create("inferenceservices", body)


def settle(operator: OperatorProcess, space: Namespace) -> None:
    """Until demo's children are there, the status says so, and nothing is under way."""
    operator.wait("the children", space.has_children)
    operator.wait("a status", lambda: space.condition("Ready") != {})
    operator.await_passes(3)


def write_models(folder: Path) -> Path:
    """Checkpoints of which only the headers are there: `demo` fits anywhere, `huge` nowhere."""
    write_model(folder / "demo", layers=4, total_size=16 << 20)
    write_model(folder / "huge", layers=80, total_size=140 << 30)
    (folder / "pickled").mkdir()
    (folder / "pickled" / "config.json").write_text(json.dumps(_config(4)))
    (folder / "pickled" / "pytorch_model.bin").write_bytes(b"\x80\x02}q\x00.")
    return folder


def write_model(folder: Path, *, layers: int, total_size: int) -> None:
    """config.json and an index without its files."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(_config(layers)))
    index = {
        "metadata": {"total_size": total_size},
        "weight_map": {"lm_head.weight": "model-00001-of-00001.safetensors"},
    }
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def _config(layers: int) -> Object:
    return {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 256,
        "intermediate_size": 704,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "num_hidden_layers": layers,
        "vocab_size": 2048,
        "max_position_embeddings": 1024,
        "torch_dtype": "float32",
    }
