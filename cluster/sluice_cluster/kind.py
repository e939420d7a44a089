"""A kind cluster, if a Docker engine answers. Written from kind's manual and tried nowhere."""

import os
import shutil
from pathlib import Path

from sluice_cluster.binaries import find_go
from sluice_cluster.settings import KIND_MODULE, Paths
from sluice_cluster.shell import run, run_visibly

NAME = "--name=sluice"


def _kind(paths: Paths) -> str:
    found = Path(shutil.which("kind") or paths.cache / "kind" / "kind")
    if not found.exists():
        environment = {**os.environ, "GOBIN": str(found.parent), "CGO_ENABLED": "0"}
        command = [str(find_go(paths)), "install", KIND_MODULE]
        run_visibly("kind", command, paths.logs / "kind-build.log", env=environment)
    return str(found)


def up(paths: Paths) -> None:
    """Start a kind cluster called sluice, if it is not there, and write its kubeconfig."""
    kind = _kind(paths)
    if "sluice" not in run([kind, "get", "clusters"]).split():
        command = [kind, "create", "cluster", NAME, "--wait=5m"]
        run_visibly("kind cluster", command, paths.logs / "kind.log")
    run([kind, "export", "kubeconfig", NAME, f"--kubeconfig={paths.kubeconfig}"])


def load(paths: Paths, what: str, name: str) -> None:
    command = [_kind(paths), "load", "docker-image", name, NAME]
    run_visibly(f"{what} load", command, paths.logs / f"load-{what}.log")


def down(paths: Paths) -> None:
    run([_kind(paths), "delete", "cluster", NAME])
