"""A real etcd and kube-apiserver on loopback ports: no root, no node, gone with the tests."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from sluice.processes import free_ports
from sluice_cluster import binaries
from sluice_cluster.node import controlplane, pki, processes, render
from sluice_cluster.settings import ClusterSettings
from sluice_cluster.shell import Word, succeeds, tail, wait_until

PROGRAMS = ("etcd", "kube-apiserver", "kubectl")
# a test run that is killed takes its servers with it
TIED = ("setpriv", "--pdeathsig=KILL")


@dataclass(frozen=True, slots=True)
class ApiServer:
    """Where the server answers, and how to be its administrator."""

    url: str
    kubeconfig: Path
    kubectl: Path
    certificate_authority: Path
    client_certificate: Path
    client_key: Path


@contextmanager
def running_apiserver(folder: Path) -> Iterator[ApiServer]:
    """Start etcd and kube-apiserver with data, keys and logs in `folder`; stop them at the end."""
    bin_folder = binaries.ensure(ClusterSettings.from_environment().paths, PROGRAMS)
    plane = _plan(bin_folder, folder)
    started: list[processes.Process] = []
    try:
        for name, command in (("etcd", plane.etcd()), ("kube-apiserver", _alone(plane))):
            tied = [*TIED, *command]
            started.append(processes.spawn(name, tied, folder / "logs", os.environ))
        server = _describe(plane, folder)
        _await_ready(server, started, folder)
        yield server
    finally:
        for process in reversed(started):
            processes.stop(process)


def _plan(bin_folder: Path, folder: Path) -> controlplane.ControlPlane:
    authority = pki.create(folder / "pki", controlplane.identities("127.0.0.1"))
    api, etcd, peer = free_ports(3)
    return controlplane.ControlPlane(bin_folder, authority, folder, "127.0.0.1", api, etcd, peer)


def _alone(plane: controlplane.ControlPlane) -> list[Word]:
    # a loopback address cannot be advertised, and nobody asks for the kubernetes service here;
    # without a controller manager nobody makes the service accounts that pods would need
    return [
        *plane.apiserver(),
        f"--cert-dir={plane.data / 'certs'}",
        "--endpoint-reconciler-type=none",
        "--disable-admission-plugins=ServiceAccount",
    ]


def _describe(plane: controlplane.ControlPlane, folder: Path) -> ApiServer:
    authority = plane.authority
    certificate, key = authority.cert("admin"), authority.key("admin")
    config = folder / "kubeconfig"
    config.write_text(
        render.kubeconfig(
            plane.server,
            authority.certificate.read_bytes(),
            certificate.read_bytes(),
            key.read_bytes(),
        )
    )
    config.chmod(0o600)
    kubectl = plane.binaries / "kubectl"
    return ApiServer(plane.server, config, kubectl, authority.certificate, certificate, key)


def _await_ready(server: ApiServer, started: list[processes.Process], folder: Path) -> None:
    kubectl: list[Word] = [server.kubectl, f"--kubeconfig={server.kubeconfig}"]

    def answers() -> bool:
        if not all(process.alive for process in started):
            raise RuntimeError(f"the API server ended: {tail(folder / 'logs/kube-apiserver.log')}")
        return succeeds([*kubectl, "get", "--raw=/readyz"]) and succeeds(
            [*kubectl, "get", "namespace", "default"]
        )

    log = folder / "logs" / "kube-apiserver.log"
    wait_until("kube-apiserver to be ready", answers, 60.0, why_not=lambda: tail(log))
