"""What commands on a cluster say where the cluster, or kubectl, gives them nothing to go on."""

from pathlib import Path

import pytest
from sluice import kube
from sluice.__main__ import main
from sluice.kube import Kube, KubeError

PROMPT = "To sign in, open https://login.example/device and enter the code A1B2"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where kubectl is looked for."""
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    return tmp_path


def write(folder: Path, script: str) -> None:
    """A kubectl that is that script."""
    (folder / "kubectl").write_text(f"#!/bin/sh\n{script}\n")
    (folder / "kubectl").chmod(0o755)


def test_a_kubectl_that_gives_no_json_is_quoted(folder: Path) -> None:
    write(folder, "echo You are not logged in.")
    with pytest.raises(KubeError, match=r"get pods gave no JSON: 'You are not logged in\."):
        Kube().get("pods")


def test_what_kubectl_says_and_asks_is_shown_and_its_failure_is_one_sentence(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    write(folder, f'echo "{PROMPT}" >&2; echo refused >&2; exit 1')
    assert main(["status", "demo"]) == 2
    failed = "sluice status: kubectl get inferenceservices.sluice.dev demo failed"
    assert capfd.readouterr().err.splitlines() == [PROMPT, "refused", failed]


def test_reads_have_a_limit_for_each_request_and_name_their_cluster(folder: Path) -> None:
    write(folder, f'echo "$*" >> {folder}/asked; echo \'{{"items": []}}\'')
    config = folder / "config"
    assert Kube(config).events("demo", "default", None) == []
    [asked] = (folder / "asked").read_text().splitlines()
    assert asked.startswith(f"get --kubeconfig={config} --request-timeout=20s events -n default ")


def test_a_read_that_is_not_answered_ends(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kube, "COMMAND_TIMEOUT_SECONDS", 0.2)
    write(folder, "exec sleep 60")
    with pytest.raises(KubeError, match=r"^kubectl get pods did not end within 0\.2 s$"):
        Kube().get("pods")


def test_a_kubectl_that_is_not_there_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(KubeError, match="^kubectl get pods: .*No such file"):
        Kube().get("pods")


@pytest.mark.parametrize("command", ["status", "report"])
def test_a_kubeconfig_that_is_no_file_is_told(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([command, "demo", "--kubeconfig", str(tmp_path)]) == 2
    assert capsys.readouterr().err == f"sluice {command}: --kubeconfig {tmp_path} is not a file\n"
