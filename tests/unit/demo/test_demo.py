"""What the demo says where there is no cluster, and which phases tell its story."""

import json
from pathlib import Path

import pytest
from demo.__main__ import main
from demo.kube import Kube
from sluice.kube import KubeError


def test_a_port_forward_that_fails_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kubectl = tmp_path / "kubectl"
    kubectl.write_text("#!/bin/sh\necho forbidden >&2\nexit 1\n")
    kubectl.chmod(0o755)
    monkeypatch.setattr(Kube, "routed_url", lambda self, name: None)
    with (
        pytest.raises(KubeError, match="port-forward -n default service/demo :80 forwards nothing"),
        Kube(tmp_path, tmp_path).service_url("demo"),
    ):
        pass


def test_a_demo_without_images_says_how_they_are_built(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--root", str(tmp_path)]) == 3
    state = tmp_path / "build/cluster/cluster.json"
    state.parent.mkdir(parents=True)
    state.write_text(json.dumps({"kubeconfig": "k", "bin_dir": "b", "images": {}}))
    assert main(["--root", str(tmp_path)]) == 3
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
        status = main(["--root", str(tmp_path), "--phases", *phases])
    except SystemExit as stop:
        status = int(str(stop.code))
    assert status == 2
    assert why in capsys.readouterr().err


def test_the_demo_s_own_phases_tell_its_story(tmp_path: Path) -> None:
    fewer = ["capacity:closed:48:20", "high:open:1.3:120"]
    assert main(["--root", str(tmp_path)]) == 3
    assert main(["--root", str(tmp_path), "--phases", *fewer]) == 3
