"""A kind cluster, where a Docker engine answers (written from kind's manual, tried nowhere yet)."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from sluice_cluster.binaries import find_go
from sluice_cluster.settings import KIND_MODULE, Paths
from sluice_cluster.shell import Word, run, run_visibly, succeeds

NAME = "sluice"


def _kind(paths: Paths) -> Path:
    found = shutil.which("kind") or paths.cache / "kind" / "kind"
    if not Path(found).exists():
        environment = {**os.environ, "GOBIN": str(paths.cache / "kind"), "CGO_ENABLED": "0"}
        command: list[Word] = [find_go(paths), "install", KIND_MODULE]
        run_visibly("kind", command, paths.logs / "kind-build.log", env=environment)
    return Path(found)


def up(paths: Paths) -> None:
    """Have a kind cluster called sluice, and its kubeconfig."""
    kind = _kind(paths)
    if NAME not in run([kind, "get", "clusters"]).split():
        create: list[Word] = [kind, "create", "cluster", f"--name={NAME}", "--wait=5m"]
        run_visibly("kind cluster", create, paths.logs / "kind.log")
    run([kind, "export", "kubeconfig", f"--name={NAME}", f"--kubeconfig={paths.kubeconfig}"])


def load(paths: Paths, reference: str, dockerfile: str) -> None:
    """Build an image with Docker and copy it to the node."""
    build = ["docker", "build", "-t", reference, "-f", dockerfile, "."]
    if not succeeds(["docker", "image", "inspect", reference]):
        run_visibly(reference, build, paths.logs / "docker.log", cwd=paths.repository)
    load: list[Word] = [_kind(paths), "load", "docker-image", reference, f"--name={NAME}"]
    run_visibly("kind load", load, paths.logs / "kind-load.log")


def down(paths: Paths) -> None:
    """Delete the kind cluster."""
    run([_kind(paths), "delete", "cluster", f"--name={NAME}"])
