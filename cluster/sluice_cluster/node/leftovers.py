"""Undo everything that a local cluster did to the machine, even if it was killed."""

import contextlib
import json
import os
import shutil
import signal
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Self

from sluice_cluster.node import network, processes
from sluice_cluster.settings import LocalClusterError, Paths
from sluice_cluster.shell import run, say, wait_until, write_whole

# programs of a cluster; those whose arguments name our folder are ours
PROGRAMS = (
    "etcd",
    "kube-apiserver",
    "kube-controller-manager",
    "kube-scheduler",
    "kubelet",
    "kube-proxy",
    "docker-registry",
    "containerd-shim-runc-v2",
    "containerd",
    "buildah",
)
# what Kubernetes and containerd make outside the folders that we give them
FOREIGN = (
    "/etc/cni",
    "/run/containers",
    "/run/containerd",
    "/var/lib/cni",
    "/var/lib/kubelet",
    "/var/log/containers",
    "/var/log/pods",
    "/usr/libexec/kubernetes",
)
CGROUPS = Path("/sys/fs/cgroup")


@dataclass(frozen=True, slots=True)
class Before:
    """State of the machine before a start, in a file: a killed run can be undone too."""

    sysctls: dict[str, str]
    present: list[str]

    @classmethod
    def observe(cls) -> Self:
        return cls(network.read_sysctls(), [path for path in FOREIGN if os.path.exists(path)])

    def write(self, file: Path) -> None:
        write_whole(file, json.dumps(asdict(self)))

    @classmethod
    def read(cls, file: Path) -> Self | None:
        return cls(**json.loads(file.read_text())) if file.exists() else None


def clean(paths: Paths) -> None:
    """Leave no process, mount, interface, address, rule, cgroup or folder of a local cluster."""
    _stop_processes(paths)
    _unmount((paths.run, paths.var, paths.cache / "containerd"))
    if not any(_ours(str(paths.build_run))):  # else an image is being built
        _unmount((paths.build_run, paths.cache / "buildah"))
        shutil.rmtree(paths.build_run, ignore_errors=True)
    network.remove()
    _remove_cgroups()
    before = Before.read(paths.run / "before.json")
    if before is not None:
        network.restore_sysctls(before.sysctls)
        for path in FOREIGN:
            if path not in before.present:
                shutil.rmtree(path, ignore_errors=True)
    shutil.rmtree(paths.var, ignore_errors=True)
    shutil.rmtree(paths.run, ignore_errors=True)


def _stop_processes(paths: Paths) -> None:
    register = processes.Register(paths.run / "processes.json")
    entries = register.read()
    first = [n for n in ("kubelet", "kube-proxy") if n in entries]  # or they would restart pods
    for name in first:
        processes.stop(entries[name])
    _kill_pods()
    if "containerd" in entries and entries["containerd"].alive:
        forget_containers(paths)
    for process in reversed(entries.values()):
        processes.stop(process)
    for process in _ours(str(paths.run) + "/"):
        processes.stop(process, seconds=5.0)


def _ours(marker: str) -> Iterator[processes.Process]:
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit():
            continue
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            arguments = (folder / "cmdline").read_bytes().decode(errors="replace").split("\0")
            started = processes.started_at(int(folder.name))
            if Path(arguments[0]).name in PROGRAMS and marker in "\0".join(arguments) and started:
                yield processes.Process(int(folder.name), started)


def forget_containers(paths: Paths) -> list[str]:
    """Delete the containers that our containerd remembers; images stay. Returns their ids."""
    ctr = ["ctr", "--address", str(paths.run / "containerd.sock"), "--namespace", "k8s.io"]
    ids = run([*ctr, "containers", "list", "-q"]).split()
    for task in run([*ctr, "tasks", "list", "-q"]).split():
        run([*ctr, "tasks", "delete", "--force", task], check=False)
    if ids:
        run([*ctr, "containers", "delete", *ids], check=False)
    return ids


def _pod_cgroups() -> list[Path]:
    """Every cgroup below kubepods, in each hierarchy, deepest first."""
    tops = [*CGROUPS.glob("kubepods"), *CGROUPS.glob("*/kubepods")]
    return sorted((p for top in tops for p in [top, *_folders(top)]), reverse=True)


def _folders(top: Path) -> list[Path]:
    return [Path(root) / name for root, names, _ in os.walk(top) for name in names]


def _pod_pids() -> set[int]:
    pids: set[int] = set()
    for folder in _pod_cgroups():
        with contextlib.suppress(OSError):  # it may go while we look
            pids.update(map(int, (folder / "cgroup.procs").read_text().split()))
    return pids


def _kill_pods() -> None:
    def all_gone() -> bool:
        pids = _pod_pids()
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return not pids

    wait_until("the pods' processes to end", all_gone, 30.0)


def _remove_cgroups() -> None:
    for folder in _pod_cgroups():
        with contextlib.suppress(OSError):
            folder.rmdir()
    left = [str(folder) for folder in _pod_cgroups()]
    if left:
        say(f"could not remove the cgroups {', '.join(left)}")


def mounts_under(roots: tuple[Path, ...], mountinfo: str) -> list[str]:
    """Mount points below `roots` in the text of /proc/self/mountinfo, the last mounted first."""
    points = [line.split()[4].replace("\\040", " ") for line in mountinfo.splitlines()]
    prefixes = tuple(f"{root}/" for root in roots)
    return [point for point in reversed(points) if point.startswith(prefixes)]


def _unmount(roots: tuple[Path, ...]) -> None:
    resolved = tuple(root.resolve() for root in roots)
    for point in mounts_under(resolved, Path("/proc/self/mountinfo").read_text()):
        try:
            run(["umount", point])
        except LocalClusterError:
            run(["umount", "--lazy", point], check=False)
