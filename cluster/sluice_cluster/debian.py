"""Packages that the local cluster takes from Debian or Ubuntu."""

import contextlib
import glob
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path

from sluice_cluster.settings import COLD_NEED_BYTES, WARM_NEED_BYTES, LocalClusterError, Paths
from sluice_cluster.shell import locked, run_visibly, say

# package: a file (or a pattern) that is there when the package is
PACKAGES = {
    "containerd": "/usr/bin/containerd",
    "runc": "/usr/sbin/runc",
    "containernetworking-plugins": "/usr/lib/cni/bridge",
    "nftables": "/usr/sbin/nft",
    "conntrack": "/usr/sbin/conntrack",
    "iproute2": "/usr/sbin/ip",
    "iptables": "/usr/sbin/iptables",
    "socat": "/usr/bin/socat",
    "openssl": "/usr/bin/openssl",
    "buildah": "/usr/bin/buildah",
    "debootstrap": "/usr/sbin/debootstrap",
    "docker-registry": "/usr/bin/docker-registry",
    "ca-certificates": "/etc/ssl/certs/ca-certificates.crt",
    "python3-venv": "/usr/lib/python3*/ensurepip",
}
# while it exists and exits 101, dpkg starts no service: we start instances of our own
POLICY = Path("/usr/sbin/policy-rc.d")
FOUND_ELSEWHERE = {"iproute2": "/sbin/ip", "nftables": "/sbin/nft", "iptables": "/sbin/iptables"}


def missing(packages: Mapping[str, str] = PACKAGES) -> list[str]:
    """Packages whose file is not on this machine, wherever it came from."""
    return [package for package, file in packages.items() if not _is_there(package, file)]


def _is_there(package: str, file: str) -> bool:
    return any(glob.glob(path) for path in (file, FOUND_ELSEWHERE.get(package, file)))


def install_missing(paths: Paths, packages: Mapping[str, str] = PACKAGES) -> None:
    """Install missing packages with apt-get, and say so. None of their services is started."""
    if not missing(packages):
        return
    with locked(paths.cache / "apt.lock"):
        _install(paths, missing(packages))


def _install(paths: Paths, absent: list[str]) -> None:
    if not absent:
        return
    say(f"installing Debian packages: {' '.join(absent)}")
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    log = paths.logs / "apt.log"
    run_visibly("apt-get update", ["apt-get", "update", "-q"], log, env=environment)
    command = ["apt-get", "install", "-y", "-q", "--no-install-recommends", *absent]
    with _no_services():
        run_visibly("apt-get install", command, log, env=environment)


@contextlib.contextmanager
def _no_services() -> Iterator[None]:
    if POLICY.exists():  # somebody else's policy stands
        yield
        return
    POLICY.write_text("#!/bin/sh\nexit 101\n")
    POLICY.chmod(0o755)
    try:
        yield
    finally:
        POLICY.unlink()


def check_disk(paths: Paths) -> None:
    """ClusterError if images and pods would not fit on the disk of the cache."""
    paths.cache.mkdir(parents=True, exist_ok=True)
    warm = (paths.cache / "registry" / "docker").exists()
    need = WARM_NEED_BYTES if warm else COLD_NEED_BYTES
    free = shutil.disk_usage(paths.cache).free
    if free < need:
        raise LocalClusterError(
            f"{paths.cache} has {free / 1e9:.0f} GB free, and the cluster with its images needs "
            f"about {need / 1e9:.0f} GB: free some, or set XDG_CACHE_HOME to a larger disk"
        )


def suite() -> str:
    """The release of this machine, for debootstrap."""
    for line in Path("/etc/os-release").read_text().splitlines():
        if line.startswith("VERSION_CODENAME="):
            return line.partition("=")[2].strip('"')
    raise LocalClusterError("/etc/os-release names no VERSION_CODENAME, which debootstrap needs")
