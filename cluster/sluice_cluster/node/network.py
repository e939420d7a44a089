"""The node's address, its firewall table and the kernel settings that a node changes."""

import json
import re
from pathlib import Path

from sluice_cluster.settings import BRIDGE, NODE_IP
from sluice_cluster.shell import run

# settings that we change, and those that the kubelet and the bridge plugin change
SYSCTLS = {
    "net.ipv4.ip_forward": "1",
    "vm.overcommit_memory": None,
    "vm.panic_on_oom": None,
    "kernel.panic": None,
    "kernel.panic_on_oops": None,
    "kernel.keys.root_maxkeys": None,
    "kernel.keys.root_maxbytes": None,
}
TABLES = ("ip sluice", "ip kube-proxy", "ip6 kube-proxy")


def _file(sysctl: str) -> Path:
    return Path("/proc/sys") / sysctl.replace(".", "/")


def read_sysctls() -> dict[str, str]:
    """The present value of each of SYSCTLS that this kernel has."""
    return {name: _file(name).read_text().strip() for name in SYSCTLS if _file(name).exists()}


def restore_sysctls(saved: dict[str, str]) -> None:
    """Write back the values that differ."""
    for name, value in saved.items():
        if _file(name).read_text().strip() != value:
            _file(name).write_text(value)


def prepare(masquerade_rules: str) -> None:
    """Forwarding on, the node's address on lo, and a way out for pods."""
    for name, value in SYSCTLS.items():
        if value is not None:
            _file(name).write_text(value)
    run(["ip", "address", "replace", f"{NODE_IP}/32", "dev", "lo"])
    run(["nft", "-f", "-"], stdin=masquerade_rules)


def remove() -> None:
    """Take away every interface, table and address of ours that is there."""
    for table in TABLES:
        if f"table {table}" in run(["nft", "list", "tables"]):
            run(["nft", "delete", "table", *table.split()])
    for link in _links_of_bridge():
        run(["ip", "link", "delete", link])
    if NODE_IP in run(["ip", "address", "show", "dev", "lo"]):
        run(["ip", "address", "delete", f"{NODE_IP}/32", "dev", "lo"])


def _links_of_bridge() -> list[str]:
    """The bridge's ports, then the bridge."""
    links = json.loads(run(["ip", "-json", "link", "show"]) or "[]")
    ports = [link["ifname"] for link in links if link.get("master") == BRIDGE]
    return ports + [BRIDGE for link in links if link["ifname"] == BRIDGE]


def name_servers() -> list[str]:
    """Addresses of the name servers in `resolv_conf`."""
    return re.findall(r"^nameserver\s+(\S+)", resolv_conf(), re.MULTILINE)


def resolv_conf() -> str:
    """Name servers that a pod can reach: systemd's stub on loopback is not one."""
    text = Path("/etc/resolv.conf").read_text() if Path("/etc/resolv.conf").exists() else ""
    real = Path("/run/systemd/resolve/resolv.conf")
    if re.search(r"^nameserver\s+127\.", text, re.MULTILINE) and real.exists():
        return real.read_text()
    return text
