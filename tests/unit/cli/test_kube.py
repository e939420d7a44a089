"""What commands on a cluster say where the cluster, or kubectl, gives them nothing to go on."""

import json
from pathlib import Path

import pytest
from sluice.__main__ import main
from sluice.kube import Kube, KubeError


def test_a_kubectl_that_gives_no_json_is_quoted(tmp_path: Path) -> None:
    kubectl = tmp_path / "kubectl"
    kubectl.write_text("#!/bin/sh\necho You are not logged in.\n")
    kubectl.chmod(0o755)
    with pytest.raises(KubeError, match=r"get pods gave no JSON: 'You are not logged in\."):
        Kube(bin_dir=tmp_path).get("pods")


def test_a_kubectl_that_fails_is_quoted_without_the_log_of_its_tries(tmp_path: Path) -> None:
    kubectl = tmp_path / "kubectl"
    log = "E1124 22:34:59.123456   77 memcache.go:265] couldn't get current server API group list"
    kubectl.write_text(f'#!/bin/sh\necho "{log}" >&2\necho "{log}" >&2\necho refused >&2\nexit 1\n')
    kubectl.chmod(0o755)
    with pytest.raises(KubeError, match=r"^kubectl get pods: refused$"):
        Kube(bin_dir=tmp_path).kubectl("get", "pods")


def test_a_port_forward_that_fails_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kubectl = tmp_path / "kubectl"
    kubectl.write_text("#!/bin/sh\necho forbidden >&2\nexit 1\n")
    kubectl.chmod(0o755)
    monkeypatch.setattr(Kube, "routed_url", lambda self, name: None)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    with (
        pytest.raises(KubeError, match="port-forward -n default service/demo :80 forwards nothing"),
        Kube(bin_dir=tmp_path).service_url("demo"),
    ):
        pass


@pytest.mark.parametrize("command", ["status", "report"])
def test_a_kubeconfig_that_is_no_file_is_told(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([command, "demo", "--kubeconfig", str(tmp_path)]) == 2
    assert capsys.readouterr().err == f"sluice {command}: --kubeconfig {tmp_path} is not a file\n"


def test_a_demo_without_images_says_how_they_are_built(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["demo", "--root", str(tmp_path)]) == 3
    state = tmp_path / "build/cluster/cluster.json"
    state.parent.mkdir(parents=True)
    state.write_text(json.dumps({"kubeconfig": "k", "bin_dir": "b", "images": {}}))
    assert main(["demo", "--root", str(tmp_path)]) == 3
    told = capsys.readouterr().out
    assert told.count("make cluster") == 2
