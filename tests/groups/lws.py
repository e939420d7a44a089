"""LeaderWorkerSets on the cluster that is up: their controller, and a DNS server.

    PYTHONPATH=cluster:tests .venv/bin/python -m groups.lws

Both are built from their Go modules, once per machine: three minutes on 2 cores. Later it takes
seconds. The controller's definitions, rights and webhooks are its module's too.
"""

import json
import os
import shutil
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from string import Template
from typing import Any

import yaml
from demo.kube import Kube, wait_for
from e2e.kit import HOW
from sluice.kube import KubeError
from sluice_cluster import binaries, images
from sluice_cluster.content import key_of
from sluice_cluster.images import Image
from sluice_cluster.settings import COREDNS_MODULE, ClusterSettings, LocalClusterError, Paths
from sluice_cluster.shell import Word, locked, run, run_visibly, say
from sluice_cluster.state import State

DNS_ADDRESS = "10.96.0.10"
"""kind's DNS has it too."""
IN_DNS: dict[str, Any] = {
    "dnsPolicy": "None",
    "dnsConfig": {
        "nameservers": [DNS_ADDRESS],
        "searches": ["svc.cluster.local", "cluster.local"],
        "options": [{"name": "ndots", "value": "5"}],
    },
}
"""For the spec of a pod that finds others by name: the local cluster's pods ask the name servers of
the machine, which know no pod."""
_SMALLEST: dict[str, Any] = {
    "apiVersion": "leaderworkerset.x-k8s.io/v1",
    "kind": "LeaderWorkerSet",
    "metadata": {"name": "asked", "namespace": "default"},
    "spec": {
        "leaderWorkerTemplate": {
            "workerTemplate": {"spec": {"containers": [{"name": "none", "image": "none"}]}}
        }
    },
}


@dataclass(frozen=True)
class Program:
    """A program of a Go module; `files` replace the module's own."""

    name: str
    module: str
    package: str
    files: Mapping[str, str] = field(default_factory=dict)


def importing(*plugins: str) -> str:
    """The Go file that says which plugins CoreDNS has. All of them take 6 minutes to build."""
    lines = [f'\t_ "github.com/coredns/coredns/plugin/{name}"' for name in plugins]
    return "\n".join(["package plugin", "", "import (", *lines, ")", ""])


_PLUGINS = {"core/plugin/zplugin.go": importing("errors", "forward", "kubernetes", "ready")}
CONTROLLER = Program("lws", "sigs.k8s.io/lws@v0.9.0", "./cmd")
DNS = Program("dns", COREDNS_MODULE, ".", _PLUGINS)


def built(paths: Paths, program: Program) -> Path:
    """Build the program, if there is none of this version yet."""
    key = key_of(program.module, program.package, json.dumps(program.files))
    target = paths.cache / "lws" / f"{program.name}-{key}"
    with locked(paths.cache / "lws.lock"):
        if not target.exists():
            _build(paths, program, target)
    return target


def _build(paths: Paths, program: Program, target: Path) -> None:
    """In a copy of the module, which has its own go.sum: Go's cache must stay as it is."""
    say(f"building {program.module} (about 90 seconds on 2 cores, once)")
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        copy, made = Path(folder) / "module", Path(folder) / program.name
        shutil.copytree(_source(paths, program), copy, copy_function=shutil.copyfile)
        for name, text in program.files.items():
            (copy / name).write_text(text)
        command: list[Word] = [binaries.find_go(paths), "build", "-v", "-trimpath"]
        run_visibly(
            program.name,
            [*command, "-buildvcs=false", "-ldflags=-s -w", "-o", made, program.package],
            paths.logs / f"{program.name}-build.log",
            env={**os.environ, "CGO_ENABLED": "0", "GOFLAGS": "-mod=readonly"},
            cwd=copy,
            describe=lambda lines: f"{len(lines)} packages compiled or modules downloaded",
        )
        made.replace(target)


def _source(paths: Paths, program: Program) -> Path:
    """The module's folder in Go's cache."""
    command: list[Word] = [binaries.find_go(paths), "mod", "download", "-json", program.module]
    return Path(json.loads(run(command, cwd=paths.module))["Dir"])


def _image(paths: Paths, program: Program) -> Image:
    """An image of the program alone."""
    context = paths.build / program.name
    context.mkdir(parents=True, exist_ok=True)
    shutil.copy(built(paths, program), context / program.name)
    run_as = f'USER 65532:65532\nENTRYPOINT ["/{program.name}"]\n'
    (context / "Dockerfile").write_text(f"FROM scratch\nCOPY {program.name} /\n{run_as}")
    return Image(program.name, "Dockerfile", ("*",), context)


def adapted(manifests: str, image: str) -> str:
    """The module's manifests with `image`, in one pod that fits beside others."""
    return "\n---\n".join(
        _adapted(document, image) if "\nkind: Deployment\n" in document else document
        for document in manifests.split("\n---\n")
    )


def _adapted(document: str, image: str) -> str:
    body = yaml.safe_load(document)
    body["spec"]["replicas"] = 1
    [container] = body["spec"]["template"]["spec"]["containers"]
    container |= {
        "image": image,
        "command": [f"/{CONTROLLER.name}"],
        "args": [*container["args"], "--leader-elect=false"],
        "resources": {"requests": {"cpu": "50m", "memory": "64Mi"}},
    }
    return json.dumps(body)


def install(kube: Kube) -> None:
    """Have LeaderWorkerSets in the cluster that is up, and DNS in a local one. If a cluster that
    the user brought has them, they are used. Raises LocalClusterError and KubeError."""
    paths = ClusterSettings.from_environment().paths
    state = State.read(paths.state_file)
    if state is None:
        raise LocalClusterError(f"no cluster is up ({HOW})")
    if state.kind == "existing" and _answers(kube):
        return
    programs = (CONTROLLER, DNS) if state.kind == "local" else (CONTROLLER,)
    references = images.deliver(paths, state, [_image(paths, program) for program in programs])
    if image := references.get(DNS.name):
        template = Template((Path(__file__).parent / "dns.yaml").read_text())
        _apply(kube, template.substitute(image=image, address=DNS_ADDRESS))
        _await_rollout(kube, "kube-system", "dns")
    config = _source(paths, CONTROLLER) / "config" / "default"
    _apply(kube, adapted(kube.kubectl("kustomize", str(config)), references[CONTROLLER.name]))
    _await_rollout(kube, "lws-system", "lws-controller-manager")
    # The controller is ready before its webhooks answer.
    wait_for("the webhooks of LeaderWorkerSets", 120, lambda: _answers(kube) or None)


def _apply(kube: Kube, manifests: str) -> None:
    """By the server: a definition of 1.3 MB does not fit into the annotation of a plain `apply`."""
    kube.kubectl("apply", "--server-side", "--force-conflicts", "-f", "-", stdin=manifests)


def _await_rollout(kube: Kube, namespace: str, name: str) -> None:
    kube.kubectl("rollout", "status", "-n", namespace, f"deployment/{name}", "--timeout=120s")


def _answers(kube: Kube) -> bool:
    """True if a LeaderWorkerSet would be taken."""
    try:
        kube.kubectl("create", "--dry-run=server", "-f", "-", stdin=json.dumps(_SMALLEST))
    except KubeError:
        return False
    return True


def main() -> int:
    """0 if the cluster has LeaderWorkerSets, 1 if not, 3 without a cluster."""
    paths = ClusterSettings.from_environment().paths
    state = State.read(paths.state_file)
    if state is None:
        print(f"no cluster is up ({HOW})", file=sys.stderr)
        return 3
    try:
        install(Kube(Path(state.kubeconfig), binaries.folder(paths)))
    except (KubeError, LocalClusterError) as e:
        print(f"lws: {e}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
