"""etcd and kube-apiserver: their certificates and command lines. They need no root.

The local cluster runs them at the node's address; tests run them alone on loopback ports.
"""

from dataclasses import dataclass
from pathlib import Path

from sluice_cluster.node.pki import Authority, Identity
from sluice_cluster.settings import SERVICE_CIDR, SERVICE_IP
from sluice_cluster.shell import Word

APISERVER_NAMES = ("localhost", "kubernetes", "kubernetes.default", "kubernetes.default.svc")


@dataclass(frozen=True, slots=True)
class ControlPlane:
    """Addresses of one etcd and one kube-apiserver, and the files that they run with."""

    binaries: Path
    authority: Authority
    data: Path
    host: str
    api_port: int
    etcd_port: int
    peer_port: int

    @property
    def server(self) -> str:
        return f"https://{self.host}:{self.api_port}"

    @property
    def etcd_url(self) -> str:
        return f"https://127.0.0.1:{self.etcd_port}"

    def etcd(self) -> list[Word]:
        """etcd, open to this authority's clients on loopback. It loses data only in power cuts."""
        peer = f"http://127.0.0.1:{self.peer_port}"
        return [
            self.binaries / "etcd",
            f"--data-dir={self.data / 'etcd'}",
            f"--listen-client-urls={self.etcd_url}",
            f"--advertise-client-urls={self.etcd_url}",
            f"--listen-peer-urls={peer}",
            f"--initial-advertise-peer-urls={peer}",
            f"--initial-cluster=default={peer}",
            f"--cert-file={self.authority.cert('etcd')}",
            f"--key-file={self.authority.key('etcd')}",
            f"--trusted-ca-file={self.authority.certificate}",
            "--client-cert-auth=true",
            "--unsafe-no-fsync=true",
            "--log-level=warn",
        ]

    def apiserver(self) -> list[Word]:
        """kube-apiserver with Node and RBAC authorisation and every default admission plugin."""
        authority = self.authority
        return [
            self.binaries / "kube-apiserver",
            f"--bind-address={self.host}",
            f"--secure-port={self.api_port}",
            f"--etcd-servers={self.etcd_url}",
            f"--etcd-cafile={authority.certificate}",
            f"--etcd-certfile={authority.cert('admin')}",
            f"--etcd-keyfile={authority.key('admin')}",
            f"--client-ca-file={authority.certificate}",
            f"--tls-cert-file={authority.cert('apiserver')}",
            f"--tls-private-key-file={authority.key('apiserver')}",
            f"--kubelet-certificate-authority={authority.certificate}",
            f"--kubelet-client-certificate={authority.cert('admin')}",
            f"--kubelet-client-key={authority.key('admin')}",
            # otherwise `kubectl logs` looks up the node's name in DNS
            "--kubelet-preferred-address-types=InternalIP",
            f"--service-account-key-file={authority.service_account_key}",
            f"--service-account-signing-key-file={authority.service_account_key}",
            "--service-account-issuer=https://kubernetes.default.svc",
            f"--service-cluster-ip-range={SERVICE_CIDR}",
            "--authorization-mode=Node,RBAC",
            "--enable-admission-plugins=NodeRestriction",
            "--allow-privileged=true",
            "--profiling=false",
        ]


def identities(host: str) -> list[Identity]:
    """Identities for etcd, the apiserver and an administrator."""
    return [
        Identity("admin", "sluice-admin", groups=("system:masters",)),
        Identity("etcd", "etcd", addresses=("127.0.0.1", "localhost")),
        Identity(
            "apiserver",
            "kube-apiserver",
            addresses=tuple(dict.fromkeys((host, "127.0.0.1", SERVICE_IP, *APISERVER_NAMES))),
        ),
    ]
