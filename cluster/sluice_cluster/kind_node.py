"""kind's node image, made here: for machines that reach package registries, but no image registry.

It follows kind's own images/base and `kind build node-image`. Two things differ: Debian's
containerd, and a fixed pod network of one node in place of kindnetd.
"""

import json
import os
import shutil
import tarfile
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path

from sluice_cluster import binaries, debian, docker
from sluice_cluster.content import key_of_files
from sluice_cluster.settings import COREDNS_MODULE, KIND_MODULE, KUBERNETES_VERSION, Paths
from sluice_cluster.shell import Word, locked, run, run_visibly, say

PACKAGES = (
    "systemd,containerd,runc,containernetworking-plugins,conntrack,iptables,nftables,iproute2,"
    "ethtool,kmod,socat,jq,procps,ca-certificates"
)
SANDBOX_IMAGE = "registry.k8s.io/pause:3.10"  # kind's containerd configuration names it
PREPARE = """
set -e
rm -f /lib/systemd/system/sysinit.target.wants/systemd-tmpfiles-setup.service
rm -f /lib/systemd/system/multi-user.target.wants/* /etc/systemd/system/*.wants/*
rm -f /lib/systemd/system/local-fs.target.wants/* /lib/systemd/system/basic.target.wants/*
rm -f /lib/systemd/system/sockets.target.wants/*udev*
echo ReadKMsg=no >> /etc/systemd/journald.conf
ln -sf /usr/lib/systemd/systemd /sbin/init
ln -s /usr/bin/containerd /usr/bin/ctr /usr/local/bin/
mkdir -p /opt/cni /etc/kubernetes/manifests
ln -s /usr/lib/cni /opt/cni/bin
ctr oci spec | jq '.hooks.createContainer += [{"path": "/kind/bin/mount-product-files.sh"}]
  | del(.process.rlimits)' > /etc/containerd/cri-base.json
# a host that lacks CAP_SYS_RESOURCE may not lower an oom_score_adj
sed -i 's/restrict_oom_score_adj = false/restrict_oom_score_adj = true/' /etc/containerd/config.toml
systemctl enable kubelet containerd undo-mount-hacks sluice-images
systemctl mask systemd-binfmt
"""
OPTIONS = (
    'ENTRYPOINT ["/usr/local/bin/entrypoint", "/sbin/init"]',
    "ENV container=docker",
)


def reference(paths: Paths) -> str:
    """The node image's name: its tag tells everything that goes into it."""
    inputs = ("binaries/go.sum", "binaries/pause/main.go", "templates/kind-node")
    versions = (KIND_MODULE, COREDNS_MODULE, KUBERNETES_VERSION, PACKAGES, PREPARE, *OPTIONS)
    return f"sluice/kind-node:{key_of_files(paths.repository / 'cluster', inputs, *versions)}"


def build(paths: Paths) -> None:
    """Make the node image in the Docker engine, unless it is there."""
    name = reference(paths)
    if docker.has(name):
        say(f"the node image is there ({name})")
        return
    debian.install_missing(paths)
    programs = _programs(paths)
    with locked(paths.cache / "base.lock"), tempfile.TemporaryDirectory(dir=paths.cache) as folder:
        root = Path(folder) / "root"
        options = ["--variant=minbase", f"--include={PACKAGES}"]
        command: list[Word] = ["debootstrap", *options, debian.suite(), root]
        run_visibly("node's base", command, paths.logs / "debootstrap-node.log")
        _add_files(paths, root, programs)
        _save_images(Path(folder), root / "kind" / "images.tar", control_plane(programs))
        run(["chroot", root, "sh", "-c", PREPARE])
        archive = Path(folder) / "root.tar"
        run(["tar", "-C", root, "--one-file-system", "-cf", archive, "."])
        _import(archive, name, OPTIONS)
    say(f"the node image is made ({name})")


def install(paths: Paths, module: str) -> Path:
    """The program of a Go module, built once per version: `example.org/name@v1`."""
    folder = paths.cache / "kind" / module.rpartition("@")[2]
    program = folder / module.partition("@")[0].rpartition("/")[2]
    if not program.exists():
        _go_install(paths, program, [module])
    return program


def _go_install(paths: Paths, program: Path, arguments: list[Word]) -> None:
    environment = {**os.environ, "GOBIN": str(program.parent), "CGO_ENABLED": "0"}
    command = [binaries.find_go(paths), "install", "-v", "-trimpath", *arguments]
    log = paths.logs / f"{program.name}-build.log"
    run_visibly(program.name, command, log, env=environment, cwd=paths.module)


def _programs(paths: Paths) -> dict[str, Path]:
    """Every program that a node runs, by its name."""
    folder = binaries.ensure(paths)
    kubeadm = paths.cache / "kind" / folder.name / "kubeadm"
    if not kubeadm.exists():
        # kubeadm needs three modules more than our go.sum lists; Go's checksum database has them
        kubeadm.parent.mkdir(parents=True, exist_ok=True)
        for name in ("go.mod", "go.sum"):
            shutil.copy(paths.module / name, kubeadm.parent / name)
        more: list[Word] = [f"-modfile={kubeadm.parent / 'go.mod'}", "-mod=mod"]
        more += ["-buildvcs=false", "-ldflags", binaries.LINKER_FLAGS]
        _go_install(paths, kubeadm, [*more, "k8s.io/kubernetes/cmd/kubeadm"])
    coredns = install(paths, COREDNS_MODULE)
    return {
        **{name: folder / name for name in binaries.PACKAGES},
        "kubeadm": kubeadm,
        "coredns": coredns,
    }


def _add_files(paths: Paths, root: Path, programs: Mapping[str, Path]) -> None:
    """kind's own files, those of this repository, and the programs that run outside of pods."""
    go = binaries.find_go(paths)
    found = json.loads(run([go, "mod", "download", "-json", KIND_MODULE], cwd=paths.module))
    for source in sorted(Path(found["Dir"], "images", "base", "files").rglob("*")):
        if source.is_file():
            target = root / source.relative_to(Path(found["Dir"], "images", "base", "files"))
            _copy(source, target, 0o755 if target.parent.name == "bin" else 0o644)
    for name in ("kubeadm", "kubelet", "kubectl"):
        _copy(programs[name], root / "usr" / "bin" / name, 0o755)
    templates = paths.templates / "kind-node"
    _copy(templates / "10-sluice.conflist", root / "etc/cni/net.d/10-sluice.conflist", 0o644)
    _copy(templates / "default-cni.yaml", root / "kind/manifests/default-cni.yaml", 0o644)
    unit = "sluice-images.service"
    _copy(templates / unit, root / "etc/systemd/system" / unit, 0o644)
    (root / "kind" / "version").write_text(KUBERNETES_VERSION)


def _copy(source: Path, target: Path, mode: int) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(source, target)
    target.chmod(mode)


def control_plane(programs: Mapping[str, Path]) -> dict[str, Path]:
    """The images that kubeadm and kind's containerd ask for, and the program in each."""
    version = f"--kubernetes-version={KUBERNETES_VERSION}"
    listed = run([programs["kubeadm"], "config", "images", "list", version]).split()
    wanted = [name for name in listed if "/pause:" not in name] + [SANDBOX_IMAGE]
    return {name: programs[program_of(name)] for name in wanted}


def program_of(image: str) -> str:
    """`registry.k8s.io/coredns/coredns:v1` runs coredns."""
    return image.rpartition(":")[0].rpartition("/")[2]


def libraries(ldd: str) -> list[Path]:
    """The files that ldd's output names: those of `=> PATH (...)`, and the loader."""
    words = [word for line in ldd.splitlines() for word in line.split()]
    return [Path(word) for word in words if word.startswith("/")]


def _save_images(folder: Path, target: Path, images: Mapping[str, Path]) -> None:
    """Save one image for each program, all in one archive; kube-proxy calls nft."""
    nft = Path("/usr/sbin/nft")
    for name, program in images.items():
        files = {f"/usr/local/bin/{program.name}": program}
        if program.name == "kube-proxy":
            files |= {str(file): file for file in [nft, *libraries(run(["ldd", nft]))]}
        layer = folder / "layer.tar"
        with tarfile.open(layer, "w", dereference=True) as archive:
            for path, file in files.items():
                archive.add(file, path)
        _import(layer, name, [f'ENTRYPOINT ["/usr/local/bin/{program.name}"]'])
    run(["docker", "save", "-o", target, *images])
    run(["docker", "rmi", *images])


def _import(archive: Path, name: str, changes: Iterable[str]) -> None:
    run(["docker", "import", *(f"--change={change}" for change in changes), archive, name])
