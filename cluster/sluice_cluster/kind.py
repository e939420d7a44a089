"""A kind cluster, if a Docker engine answers."""

import shutil
from pathlib import Path

from sluice_cluster import docker, kind_node
from sluice_cluster.settings import KIND_MODULE, Paths
from sluice_cluster.shell import Word, run, run_visibly

NAME = "--name=sluice"
NODE = "sluice-control-plane"


def _kind(paths: Paths) -> Word:
    return shutil.which("kind") or kind_node.install(paths, KIND_MODULE)


def has_own_node(paths: Paths) -> bool:
    """True if `kind-image` made a node image: then no image registry is asked for anything."""
    return docker.has(kind_node.reference(paths))


def up(paths: Paths) -> None:
    """Start a kind cluster called sluice, if it is not there, and write its kubeconfig."""
    kind = _kind(paths)
    if "sluice" not in run([kind, "get", "clusters"]).split():
        config = paths.templates / "kind.yaml"
        command: list[Word] = [kind, "create", "cluster", NAME, "--wait=5m", f"--config={config}"]
        command.append(f"--kubeconfig={paths.kubeconfig}")
        if has_own_node(paths):
            command.append(f"--image={kind_node.reference(paths)}")
        run_visibly("kind cluster", command, paths.logs / "kind.log")
    run([kind, "export", "kubeconfig", NAME, f"--kubeconfig={paths.kubeconfig}"])


def has(name: str) -> bool:
    """True if the node holds an image of that name."""
    ctr: list[Word] = ["docker", "exec", NODE, "ctr", "--namespace=k8s.io", "images"]
    return bool(run([*ctr, "list", "-q", f"name==docker.io/{name}"]).strip())


def load(paths: Paths, what: str, name: str) -> None:
    """Bring one image of the Docker engine to the node."""
    command = [_kind(paths), "load", "docker-image", name, NAME]
    run_visibly(f"{what} load", command, paths.logs / f"load-{what}.log")


def load_archive(paths: Paths, what: str, archive: Path) -> None:
    """Bring the image of a `docker save` archive to the node."""
    command = [_kind(paths), "load", "image-archive", archive, NAME]
    run_visibly(f"{what} load", command, paths.logs / f"load-{what}.log")


def down(paths: Paths) -> None:
    run([_kind(paths), "delete", "cluster", NAME, f"--kubeconfig={paths.kubeconfig}"])
