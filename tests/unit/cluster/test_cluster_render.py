"""The configuration files of the local cluster, and what the API server is started with."""

from __future__ import annotations

import base64
import json
import tomllib
from pathlib import Path

import pytest
import yaml
from sluice_cluster.node import controlplane, render
from sluice_cluster.node.pki import Authority, Identity
from sluice_cluster.settings import ClusterSettings, LocalClusterError

TEMPLATES = ClusterSettings.from_environment({}).paths.templates
VALUES = {
    "run": "/run/s",
    "var": "/var/s",
    "config": "/run/s/config",
    "pki": "/run/s/pki",
    "containerd_root": "/cache/containerd",
    "registry_root": "/cache/registry",
    "registry": "127.0.0.1:5077",
    "bridge": "sluice0",
    "pod_cidr": "10.77.128.0/17",
    "name_servers": '["10.0.0.53"]',
    "node_ip": "10.77.0.1",
    "node_name": "sluice",
    "pause_image": "127.0.0.1:5077/sluice/pause:1",
}


@pytest.fixture
def rendered(tmp_path: Path) -> Path:
    render.render_folder(TEMPLATES, tmp_path, VALUES)
    return tmp_path


def test_every_template_is_rendered_whole(rendered: Path) -> None:
    sources = [p for p in TEMPLATES.rglob("*") if p.is_file()]
    targets = [rendered / p.relative_to(TEMPLATES) for p in sources]
    assert all("${" not in target.read_text() for target in targets)
    assert len(targets) >= 6


def test_every_rendered_file_parses(rendered: Path) -> None:
    for file in rendered.rglob("*.yaml"):
        assert isinstance(yaml.safe_load(file.read_text()), dict)
    for file in rendered.rglob("*.toml"):
        assert tomllib.loads(file.read_text())
    for file in rendered.rglob("*.conflist"):
        assert json.loads(file.read_text())["plugins"]


def test_the_kubelet_refills_cpu_quotas_every_ten_milliseconds(rendered: Path) -> None:
    kubelet = yaml.safe_load((rendered / "kubelet.yaml").read_text())
    assert kubelet["cpuCFSQuotaPeriod"] == "10ms"
    assert kubelet["featureGates"]["CustomCPUCFSQuotaPeriod"] is True


def test_a_value_that_nobody_gave_is_named() -> None:
    with pytest.raises(LocalClusterError, match="node_port"):
        render.render("port: ${node_port}", {})


def test_a_kubeconfig_carries_its_credentials() -> None:
    config = yaml.safe_load(render.kubeconfig("https://h:1", b"ca", b"cert", b"key"))
    user = config["users"][0]["user"]
    assert config["clusters"][0]["cluster"]["server"] == "https://h:1"
    assert base64.b64decode(user["client-certificate-data"]) == b"cert"
    assert base64.b64decode(user["client-key-data"]) == b"key"


def test_a_client_certificate_cannot_serve_and_a_server_names_its_addresses() -> None:
    client = Identity("node", "system:node:n", groups=("system:nodes",))
    server = Identity("apiserver", "kube-apiserver", addresses=("10.77.0.1", "localhost"))
    assert client.subject == "/O=system:nodes/CN=system:node:n"
    assert "serverAuth" not in client.extensions
    assert "IP:10.77.0.1,DNS:localhost" in server.extensions


def test_the_api_server_listens_only_where_it_is_told_and_asks_who_is_there() -> None:
    authority = Authority(Path("/pki"))
    plane = controlplane.ControlPlane(
        Path("/bin"), authority, Path("/data"), "127.0.0.1", 6443, 2379, 2380
    )
    command = [str(word) for word in plane.apiserver()]
    assert "--bind-address=127.0.0.1" in command
    assert "--authorization-mode=Node,RBAC" in command
    assert "--client-cert-auth=true" in [str(word) for word in plane.etcd()]
