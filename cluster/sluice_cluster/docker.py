"""The part of a Docker engine: building and pushing our images, if there is one."""

from pathlib import Path

from sluice_cluster.settings import Paths
from sluice_cluster.shell import run_visibly, succeeds


def answers() -> bool:
    """True if a Docker engine answers, not only its client."""
    return succeeds(["docker", "info"], timeout=10.0)


def build(paths: Paths, what: str, dockerfile: str, name: str, context: Path) -> None:
    """Build one image, unless the engine has that tag."""
    if not has(name):
        command = ["docker", "build", "-t", name, "-f", dockerfile, "."]
        log = paths.logs / f"image-{what}.log"
        run_visibly(f"{what} image", command, log, cwd=context)


def push(paths: Paths, what: str, name: str) -> None:
    """Push one image to the registry in its name."""
    run_visibly(f"{what} push", ["docker", "push", name], paths.logs / f"push-{what}.log")


def has(name: str) -> bool:
    """True if the engine has an image of that name."""
    return succeeds(["docker", "image", "inspect", name])
