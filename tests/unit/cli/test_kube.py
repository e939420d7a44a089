"""What commands on a cluster say where the cluster, or kubectl, gives them nothing to go on."""

import json
import sys
from pathlib import Path

import pytest
from sluice import kube
from sluice.__main__ import main
from sluice.kube import Kube, KubeError

PROMPT = "To sign in, open https://login.example/device and enter the code A1B2"
KLOG = "E1124 22:34:59.123456   77 memcache.go:265] couldn't get current server API group list"


def test_a_kubectl_that_gives_no_json_is_quoted(tmp_path: Path) -> None:
    kubectl = tmp_path / "kubectl"
    kubectl.write_text("#!/bin/sh\necho You are not logged in.\n")
    kubectl.chmod(0o755)
    with pytest.raises(KubeError, match=r"get pods gave no JSON: 'You are not logged in\."):
        Kube(bin_dir=tmp_path).get("pods")


def test_a_kubectl_that_fails_is_quoted_without_the_log_of_its_tries(tmp_path: Path) -> None:
    found = written(tmp_path, f'echo "{KLOG}" >&2; echo "{KLOG}" >&2; echo refused >&2; exit 1')
    with pytest.raises(KubeError, match=r"^kubectl get pods: refused$"):
        found.kubectl("get", "pods")
    with pytest.raises(KubeError, match=r"^kubectl get --request-timeout=20s pods: refused$"):
        found.read("pods")


def written(folder: Path, script: str) -> Kube:
    """A cluster whose kubectl is that script."""
    (folder / "kubectl").write_text(f"#!/bin/sh\n{script}\n")
    (folder / "kubectl").chmod(0o755)
    return Kube(bin_dir=folder)


def test_reads_have_a_limit_for_each_request(tmp_path: Path) -> None:
    found = written(tmp_path, f'echo "$*" >> {tmp_path}/asked; echo \'{{"items": []}}\'')
    found.events("demo")
    found.pods("demo")
    found.inference_service("demo")
    asked = (tmp_path / "asked").read_text().splitlines()
    assert len(asked) == 3
    assert all(line.startswith("get --request-timeout=20s ") for line in asked)


@pytest.mark.parametrize("is_terminal", [True, False])
def test_what_kubectl_asks_of_a_person_is_shown_while_it_waits_for_them(
    is_terminal: bool,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its log is not, nor is a prompt's line that has not ended yet kept back."""
    script = f"""echo "{KLOG}" >&2; echo "{PROMPT}" >&2; printf "Enter: " >&2
        i=0; while [ $i -lt 100 ] && [ ! -e {tmp_path}/seen ]; do sleep 0.1; i=$((i+1)); done
        echo []"""
    told: list[str] = []

    def see(text: str) -> int:
        told.append(text)
        if "Enter: " in text:
            (tmp_path / "seen").touch()
        return len(text)

    monkeypatch.setattr(kube, "LISTEN_SECONDS", 0.1)
    if not is_terminal:
        (tmp_path / "seen").touch()
    monkeypatch.setattr(sys.stderr, "isatty", lambda: is_terminal)
    monkeypatch.setattr(sys.stderr, "write", see)
    assert written(tmp_path, script).get("pods") == []
    assert (tmp_path / "seen").exists()
    assert "".join(told) == (f"{PROMPT}\nEnter: " if is_terminal else "")


def test_a_read_that_is_not_answered_says_so_and_ends(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kube, "LISTEN_SECONDS", 0.05)
    monkeypatch.setattr(kube, "SAY_EVERY_SECONDS", 1)
    monkeypatch.setattr(kube, "COMMAND_TIMEOUT_SECONDS", 1.5)
    with pytest.raises(KubeError, match=r" pods: it did not end within 1\.5 s$"):
        written(tmp_path, f'echo "{KLOG}" >&2; exec sleep 60').read("pods")
    told = capsys.readouterr().err
    assert told == "kubectl get --request-timeout=20s pods: no answer for 1 s\n"


@pytest.mark.parametrize(
    ("said", "shown", "length"),
    [
        (f"{KLOG}\nPass", "Pass", len(KLOG) + 5),
        ("E1", "", 0),
        (f"a\n{KLOG}", "a\n", 2),
        ("Enter", "Enter", 5),
        ("", "", 0),
    ],
)
def test_a_line_that_may_become_one_of_the_log_waits(said: str, shown: str, length: int) -> None:
    assert kube._worth_showing(said) == (shown, length)


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


@pytest.mark.parametrize(
    ("phases", "why"),
    [
        (["bogus"], "argument --phases: 'bogus' is not NAME:closed"),
        (["a:closed:1.5:1"], "with a whole CONCURRENCY"),
        (["low:open:0.5:1", "high:open:1.3:1"], "--phases: needed are a closed phase capacity"),
        (["high:open:1.3:1", "capacity:closed:8:1"], "--phases: needed are a closed phase capac"),
        (["low:open:1:1", "capacity:closed:8:1", "high:open:1:1"], "phase low takes a share"),
        (["capacity:closed:8:1", "high:open:1:1", "high:open:1:1"], "phase high is given twice"),
        (["capacity:open:8:1", "high:open:1:1"], "needed are a closed phase capacity"),
    ],
)
def test_phases_that_tell_no_story_are_refused_before_anything_is_installed(
    phases: list[str], why: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        status = main(["demo", "--root", str(tmp_path), "--phases", *phases])
    except SystemExit as stop:
        status = int(str(stop.code))
    assert status == 2
    assert why in capsys.readouterr().err


def test_the_demo_s_own_phases_tell_its_story(tmp_path: Path) -> None:
    fewer = ["capacity:closed:48:20", "high:open:1.3:120"]
    assert main(["demo", "--root", str(tmp_path)]) == 3
    assert main(["demo", "--root", str(tmp_path), "--phases", *fewer]) == 3
