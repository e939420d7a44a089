"""Kubernetes on this machine: one node, its own containerd, an image registry on loopback."""

import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from sluice_cluster import binaries, debian, images
from sluice_cluster.node import leftovers, network, pki, render
from sluice_cluster.node.controlplane import ControlPlane, identities
from sluice_cluster.node.leftovers import Before
from sluice_cluster.node.pki import Authority, Identity
from sluice_cluster.node.processes import Register, spawn, stop
from sluice_cluster.settings import (
    API_PORT,
    BRIDGE,
    NODE_IP,
    NODE_NAME,
    POD_CIDR,
    REGISTRY,
    SERVICE_CIDR,
    LocalClusterError,
    Paths,
)
from sluice_cluster.shell import Word, run, say, succeeds, tail, wait_until

SERVER = f"https://{NODE_IP}:{API_PORT}"
SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
# clients of the apiserver and their user names (RBAC's own bindings name these users)
CLIENTS = (
    Identity("kube-controller-manager", "system:kube-controller-manager"),
    Identity("kube-scheduler", "system:kube-scheduler"),
    Identity("kube-proxy", "system:kube-proxy"),
    Identity("node", f"system:node:{NODE_NAME}", groups=("system:nodes",)),
)
KUBELET_SERVER = Identity("kubelet", f"system:node:{NODE_NAME}", addresses=(NODE_IP, NODE_NAME))


@dataclass(frozen=True, slots=True)
class Node:
    """The folders, programs and keys of the one local cluster of this machine."""

    paths: Paths
    binaries: Path

    @property
    def config(self) -> Path:
        return self.paths.run / "config"

    @property
    def authority(self) -> Authority:
        return Authority(self.paths.run / "pki")

    @property
    def register(self) -> Register:
        return Register(self.paths.run / "processes.json")

    @property
    def admin_config(self) -> Path:
        return self.paths.run / "kubeconfig"

    @property
    def control_plane(self) -> ControlPlane:
        return ControlPlane(
            self.binaries, self.authority, self.paths.var, NODE_IP, API_PORT, 2379, 2380
        )

    def kubectl(self, *arguments: str, timeout: float = 5.0) -> str:
        """Output of kubectl as administrator, without any proxy of the user's environment; "" on
        failure."""
        command: list[Word] = [self.binaries / "kubectl", f"--kubeconfig={self.admin_config}"]
        try:
            return run([*command, *arguments], env=self.environment(), timeout=timeout)
        except LocalClusterError:
            return ""

    def environment(self) -> dict[str, str]:
        path = f"{self.binaries}:{SYSTEM_PATH}"
        return {"PATH": path, "HOME": os.environ.get("HOME", "/root")}

    def start(self, name: str, command: list[Word], **more: str) -> None:
        """Start one program and remember it."""
        environment = self.environment() | more
        self.register.add(name, spawn(name, command, self.paths.logs, environment))

    def require_alive(self) -> None:
        """ClusterError with the end of the log of a program that ended."""
        for name, process in self.register.read().items():
            if not process.alive:
                log = self.paths.logs / f"{name}.log"
                raise LocalClusterError(f"{name} ended; the end of {log}:\n{tail(log)}")


def up(paths: Paths) -> None:
    """Start a healthy cluster: at once if there is one, else from a clean machine."""
    node = Node(paths, binaries.folder(paths))
    if is_healthy(node):
        say(f"the local cluster is already up ({SERVER})")
    else:
        debian.install_missing(paths)
        debian.check_disk(paths)
        binaries.ensure(paths)
        if paths.run.exists() or paths.var.exists():
            say("removing what an earlier run left behind")
        leftovers.clean(paths)
        _start(node)
        say(f"the local cluster is up ({SERVER}), logs in {paths.logs}")
    paths.build.mkdir(parents=True, exist_ok=True)
    shutil.copy(node.admin_config, paths.kubeconfig)


def down(paths: Paths) -> None:
    """Stop everything and restore the machine. Built and pulled things stay cached."""
    leftovers.clean(paths)
    paths.kubeconfig.unlink(missing_ok=True)
    paths.state_file.unlink(missing_ok=True)
    say("the local cluster is down")


def is_healthy(node: Node) -> bool:
    """True if every program is alive, the API server ready and the node Ready."""
    entries = node.register.read()
    if not entries or not node.admin_config.exists():
        return False
    return all(process.alive for process in entries.values()) and _node_is_ready(node)


def describe(paths: Paths) -> str:
    """One line for each program, then the node's state."""
    node = Node(paths, binaries.folder(paths))
    entries = node.register.read()
    if not entries:
        return "the local cluster is down"
    lines = [
        f"{name:26s} {'running' if p.alive else 'ENDED'} (pid {p.pid})"
        for name, p in entries.items()
    ]
    lines.append(f"node {NODE_NAME}: {'Ready' if _node_is_ready(node) else 'not Ready'}")
    return "\n".join(lines)


def _start(node: Node) -> None:
    paths = node.paths
    Before.observe().write(paths.run / "before.json")
    paths.run.chmod(0o711)
    pki.create(node.authority.folder, [*identities(NODE_IP), *CLIENTS, KUBELET_SERVER])
    _configure(node)
    network.prepare((node.config / "masquerade.nft").read_text())
    _start_control_plane(node)
    _start_containers(node)
    _start_controllers(node)
    _start_node(node)


def _configure(node: Node) -> None:
    paths = node.paths
    values = {
        "run": str(paths.run),
        "var": str(paths.var),
        "config": str(node.config),
        "pki": str(node.authority.folder),
        "containerd_root": str(paths.cache / "containerd"),
        "registry_root": str(paths.cache / "registry"),
        "registry": REGISTRY,
        "bridge": BRIDGE,
        "pod_cidr": POD_CIDR,
        "name_servers": json.dumps(network.name_servers()),
        "node_ip": NODE_IP,
        "node_name": NODE_NAME,
        "pause_image": images.pause_reference(node.binaries / "pause"),
    }
    render.render_folder(paths.templates, node.config, values)
    hosts = node.config / "registries" / REGISTRY / "hosts.toml"
    hosts.parent.mkdir(parents=True)
    (node.config / "registry-hosts.toml").replace(hosts)
    (node.config / "resolv.conf").write_text(network.resolv_conf())
    for client in CLIENTS:
        _write_kubeconfig(node, client.file, node.config / f"{client.file}.kubeconfig")
    _write_kubeconfig(node, "admin", node.admin_config)


def _write_kubeconfig(node: Node, identity: str, file: Path) -> None:
    authority = node.authority
    file.touch(mode=0o600)
    file.write_text(
        render.kubeconfig(
            SERVER,
            authority.certificate.read_bytes(),
            authority.cert(identity).read_bytes(),
            authority.key(identity).read_bytes(),
        )
    )


def _start_control_plane(node: Node) -> None:
    plane = node.control_plane
    (node.paths.var / "etcd").mkdir(parents=True, mode=0o700)
    say("starting the image registry, etcd and the API server")
    node.start("docker-registry", ["docker-registry", "serve", node.config / "registry.yaml"])
    node.start("etcd", plane.etcd())
    node.start("kube-apiserver", [*plane.apiserver(), f"--advertise-address={NODE_IP}"])


def _start_controllers(node: Node) -> None:
    def ready() -> bool:
        node.require_alive()
        return node.kubectl("get", "--raw=/readyz") == "ok"

    log = node.paths.logs / "kube-apiserver.log"
    wait_until("the API server to be ready", ready, 60.0, why_not=lambda: tail(log))
    say("starting the controllers and the scheduler")
    for name, more in (("kube-controller-manager", _controllers(node)), ("kube-scheduler", [])):
        config = node.config / f"{name}.kubeconfig"
        node.start(
            name,
            [
                node.binaries / name,
                f"--kubeconfig={config}",
                f"--authentication-kubeconfig={config}",
                f"--authorization-kubeconfig={config}",
                "--bind-address=127.0.0.1",
                "--leader-elect=false",
                *more,
            ],
        )


def _controllers(node: Node) -> list[Word]:
    return [
        f"--root-ca-file={node.authority.certificate}",
        f"--service-account-private-key-file={node.authority.service_account_key}",
        "--use-service-account-credentials=true",
        f"--service-cluster-ip-range={SERVICE_CIDR}",
    ]


def _start_containers(node: Node) -> None:
    def answers() -> bool:
        node.require_alive()
        socket = node.paths.run / "containerd.sock"
        return succeeds(["ctr", "--address", socket, "version"], timeout=5.0)

    say("starting containerd")
    images.push_pause(node.paths, node.binaries / "pause")
    command: list[Word] = ["containerd", "--config", node.config / "containerd.toml"]
    node.start("containerd", command)
    wait_until("containerd to answer", answers, 30.0)
    if leftovers.forget_containers(node.paths):  # containers of a killed run: its CRI knows them
        stop(node.register.read()["containerd"])
        node.start("containerd", command)
        wait_until("containerd to answer", answers, 30.0)


def _start_node(node: Node) -> None:
    say("starting the kubelet and kube-proxy")
    node.start(
        "kubelet",
        [
            node.binaries / "kubelet",
            f"--config={node.config / 'kubelet.yaml'}",
            f"--kubeconfig={node.config / 'node.kubeconfig'}",
            f"--root-dir={node.paths.var / 'kubelet'}",
            f"--cert-dir={node.paths.var / 'kubelet-pki'}",
            f"--hostname-override={NODE_NAME}",
            f"--node-ip={NODE_IP}",
        ],
    )
    node.start(
        "kube-proxy", [node.binaries / "kube-proxy", f"--config={node.config / 'kube-proxy.yaml'}"]
    )

    def ready() -> bool:
        node.require_alive()
        account = ("get", "serviceaccount", "default", "-o=name")
        return _node_is_ready(node) and bool(node.kubectl(*account, timeout=20.0))

    log = node.paths.logs / "kubelet.log"
    wait_until("the node to be Ready", ready, 90.0, why_not=lambda: tail(log))


def _node_is_ready(node: Node) -> bool:
    path = '{.status.conditions[?(@.type=="Ready")].status}'
    return node.kubectl("get", "node", NODE_NAME, f"-o=jsonpath={path}") == "True"
