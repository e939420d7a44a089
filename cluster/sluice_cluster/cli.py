"""The commands: up, down, status, binaries, images, kind-image, env."""

import argparse
import json
import shutil
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace

from sluice_cluster import binaries, docker, images, kind, kind_node
from sluice_cluster.choose import Choice, Found, choose
from sluice_cluster.node import local
from sluice_cluster.settings import REGISTRY, ClusterSettings, ImpossibleError, LocalClusterError
from sluice_cluster.shell import Word, locked, run, say, succeeds
from sluice_cluster.state import State

CLIENTS = ("kubectl", "helm")


def find(settings: ClusterSettings) -> Found:
    """Find out what this machine offers."""
    return Found(
        kubeconfig=settings.kubeconfig,
        docker_answers=settings.wanted != "local" and docker.answers(),
        wants_kind=settings.wanted == "kind",
        is_root=settings.is_root,
        is_linux=sys.platform == "linux",
        has_apt=shutil.which("apt-get") is not None,
    )


def decide(settings: ClusterSettings) -> Choice:
    """The cluster to use; ImpossibleError says what is missing."""
    choice = choose(find(settings))
    if choice.kind == "none":
        raise ImpossibleError(choice.reason)
    return choice


def up(settings: ClusterSettings, with_images: bool) -> None:
    """Start a cluster, with our images if asked; both at once if nothing is built yet."""
    choice = decide(settings)
    say(choice.reason)
    paths = settings.paths
    aside = with_images and choice.kind == "local"
    building = _aside(lambda: images.prepare(paths)) if aside else None
    with locked(paths.cache / "cluster.lock"):
        state = _up(settings, choice)
        state.write(paths.state_file)
    if building is not None:
        building.result()
    if with_images:
        make_images(settings)


def _up(settings: ClusterSettings, choice: Choice) -> State:
    paths = settings.paths
    before = State.read(paths.state_file)
    known = before.images if before is not None and before.kind == choice.kind else {}
    bin_dir = str(binaries.folder(paths))
    if choice.kind == "existing":
        binaries.ensure(paths, CLIENTS)
        kubectl: list[Word] = [binaries.folder(paths) / "kubectl", "get", "--raw=/readyz"]
        run([*kubectl, f"--kubeconfig={settings.kubeconfig}"], timeout=30.0)
        return State("existing", str(settings.kubeconfig), bin_dir, settings.registry, known)
    if choice.kind == "kind":
        binaries.ensure(paths, CLIENTS)
        kind.up(paths)
        return State("kind", str(paths.kubeconfig), bin_dir, None, known)
    local.up(paths)
    return State("local", str(paths.kubeconfig), bin_dir, REGISTRY, known)


def _aside(work: Callable[[], None]) -> Future[None]:
    """`work` in a thread that an exit does not wait for; it would wait for an executor's."""
    done: Future[None] = Future()

    def run() -> None:
        try:
            work()
            done.set_result(None)
        except BaseException as error:
            done.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return done


def make_images(settings: ClusterSettings) -> None:
    """Build what changed, bring it to the cluster, and print the references."""
    state = State.read(settings.paths.state_file)
    if state is None:
        raise LocalClusterError("no cluster is up: run `python3 cluster/cluster.py up` first")
    references = images.deliver(settings.paths, state)
    replace(state, images=references).write(settings.paths.state_file)
    print(json.dumps(references, indent=1))


def down(settings: ClusterSettings) -> None:
    """End the cluster that was started here; one that the user brought is left alone."""
    paths = settings.paths
    state = State.read(paths.state_file)
    if state is not None and state.kind == "existing":
        say("the cluster that SLUICE_KUBECONFIG named is not ours to stop")
        paths.state_file.unlink()
    elif state is not None and state.kind == "kind":
        kind.down(paths)
        paths.state_file.unlink()
    elif settings.is_root:
        with locked(paths.cache / "cluster.lock"):
            local.down(paths)
    else:
        say("no cluster was started from here")


def status(settings: ClusterSettings) -> int:
    """Say what is up; 0 when it is healthy."""
    state = State.read(settings.paths.state_file)
    if state is not None:
        print(json.dumps({"kind": state.kind, "kubeconfig": state.kubeconfig, **state.images}))
    if state is None or state.kind == "local":
        print(local.describe(settings.paths))
        node = local.Node(settings.paths, binaries.folder(settings.paths))
        return 0 if settings.is_root and local.is_healthy(node) else 1
    kubectl = binaries.folder(settings.paths) / "kubectl"
    healthy = succeeds([kubectl, f"--kubeconfig={state.kubeconfig}", "get", "--raw=/readyz"])
    print("the API server is ready" if healthy else "the API server does not answer")
    return 0 if healthy else 1


def environment(settings: ClusterSettings) -> str:
    """Shell lines that make kubectl and helm find the cluster."""
    paths = settings.paths
    state = State.read(paths.state_file)
    config = state.kubeconfig if state is not None else str(paths.kubeconfig)
    return f'export KUBECONFIG="{config}"\nexport PATH="{binaries.folder(paths)}:$PATH"'


def _arguments(given: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="cluster.py", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    start = commands.add_parser("up", help="have a cluster: yours, kind, or one on this machine")
    start.add_argument("--images", action="store_true", help="and our images in it")
    commands.add_parser("down", help="leave the machine as it was")
    commands.add_parser("status", help="what runs; exit code 0 when healthy")
    commands.add_parser("binaries", help="build Kubernetes, etcd and helm, once per machine")
    commands.add_parser("images", help="build what changed and bring it to the cluster")
    commands.add_parser("kind-image", help="a node image for kind, where no registry is reached")
    commands.add_parser("env", help="lines to eval: KUBECONFIG and PATH")
    return parser.parse_args(given)


def main(given: Sequence[str] | None = None) -> int:
    """Exit code 0; 1 with a sentence; 3 when no cluster is possible on this machine."""
    arguments = _arguments(given)
    settings = ClusterSettings.from_environment()
    try:
        return _dispatch(arguments, settings)
    except LocalClusterError as error:
        print(f"cluster: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return 130


def _dispatch(arguments: argparse.Namespace, settings: ClusterSettings) -> int:
    match arguments.command:
        case "up":
            up(settings, arguments.images)
        case "down":
            down(settings)
        case "status":
            return status(settings)
        case "binaries":
            print(binaries.ensure(settings.paths))
        case "images":
            make_images(settings)
        case "kind-image":
            kind_node.build(settings.paths)
        case "env":
            print(environment(settings))
    return 0
