"""Container images: a base from Debian, ours from the Dockerfiles that everybody uses."""

import os
import shutil
import tempfile
import urllib.error
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from sluice_cluster import debian, docker, kind
from sluice_cluster.content import key_of, key_of_files
from sluice_cluster.settings import REGISTRY, LocalClusterError, Paths
from sluice_cluster.shell import Word, locked, run, run_visibly, say, succeeds, wait_until
from sluice_cluster.state import State

BASE_PACKAGES = "python3,python3-venv,ca-certificates"
CERTIFICATES = Path("/etc/ssl/certs")
BUNDLE = CERTIFICATES / "ca-certificates.crt"
PAUSE_FILE = 'FROM scratch\nCOPY pause /pause\nUSER 65535:65535\nENTRYPOINT ["/pause"]\n'


@dataclass(frozen=True, slots=True)
class Image:
    """An image and what it is made of; `inputs` are globs below `context`, else the repository."""

    name: str
    dockerfile: str
    inputs: tuple[str, ...]
    context: Path | None = None


COMMON = ("pyproject.toml", "constraints.txt", ".dockerignore", "core")
MODELS = ("examples/model/*.json", "examples/model/*.safetensors", "examples/models")
IMAGES = (
    Image(
        "operator",
        "operator/Dockerfile",
        (*COMMON, *MODELS, "frontend", "gate", "operator", "cli"),
    ),
    Image(
        "worker",
        "worker/Dockerfile",
        (*COMMON, *MODELS, "frontend", "worker", "kernels"),
    ),
)


def pause_reference(binary: Path) -> str:
    """The pause image's name in the loopback registry."""
    return f"{REGISTRY}/sluice/pause:{key_of(binary.read_bytes(), PAUSE_FILE)}"


def push_pause(paths: Paths, binary: Path) -> None:
    """Build the pause image from its binary, unless the registry has it."""
    wait_until("the image registry to answer", _registry_answers, 20.0)
    name = pause_reference(binary)
    if is_pushed(name):
        return
    context = paths.build / "pause"
    context.mkdir(parents=True, exist_ok=True)
    shutil.copy(binary, context / "pause")
    (context / "Dockerfile").write_text(PAUSE_FILE)
    run([*_buildah(paths), "bud", "-q", "-t", name, context], env=_environment())
    push(paths, "pause", name)


def _buildah(paths: Paths) -> list[Word]:
    """buildah with a store of our own: the machine's own images are left alone."""
    return ["buildah", f"--root={paths.cache / 'buildah'}", f"--runroot={paths.build_run}"]


def _environment() -> dict[str, str]:
    return {**os.environ, "BUILDAH_ISOLATION": "chroot"}


def _ctr(paths: Paths) -> list[Word]:
    return ["ctr", f"--address={paths.run / 'containerd.sock'}", "--namespace=k8s.io"]


def _registry_answers() -> bool:
    return _status(f"http://{REGISTRY}/v2/") == 200


def is_pushed(reference: str) -> bool:
    """True if the loopback registry holds the manifest of `reference`."""
    name, _, tag = reference.removeprefix(f"{REGISTRY}/").rpartition(":")
    return _status(f"http://{REGISTRY}/v2/{name}/manifests/{tag}") == 200


def _status(url: str) -> int:
    accept = "application/vnd.oci.image.manifest.v1+json"
    request = urllib.request.Request(url, method="HEAD", headers={"Accept": accept})  # noqa: S310
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(request, timeout=5) as response:
            return int(response.status)
    except urllib.error.HTTPError as error:
        return error.code
    except OSError:
        return 0


def push(paths: Paths, what: str, name: str) -> None:
    """Push to the registry in `name`; only the loopback one may speak plain HTTP."""
    options = ["--tls-verify=false"] if name.startswith(f"{REGISTRY}/") else []
    command: list[Word] = [*_buildah(paths), "push", *options, name, f"docker://{name}"]
    run_visibly(f"{what} push", command, paths.logs / f"push-{what}.log")


def _fetch(paths: Paths, what: str, name: str) -> None:
    """Bring an image to the node now: the first pod would wait a minute for it."""
    registries = paths.run / "config" / "registries"
    command = [*_ctr(paths), "images", "pull", f"--hosts-dir={registries}", name]
    log = paths.logs / f"pull-{what}.log"
    run_visibly(f"{what} pull", command, log, describe=lambda lines: "unpacking")


def _forget_older(paths: Paths, name: str) -> None:
    """Remove earlier builds of `name` from the place of the build and from the node: 6 GB each.

    Pods that run them go on, and the registry still has them.
    """
    own = f"{name.rpartition(':')[0]}:"
    built = run([*_buildah(paths), "images", "--format={{.Name}}:{{.Tag}}"], env=_environment())
    for older in {line for line in built.split() if line.startswith(own)} - {name}:
        run([*_buildah(paths), "rmi", "--force", older], env=_environment())
    listed = run([*_ctr(paths), "images", "list"]).splitlines()[1:]
    digests = {reference: digest for reference, _, digest, *_ in map(str.split, listed)}
    # The kubelet's side of containerd has a second name for each image, by its digest.
    old = {digests[line] for line in digests if line.startswith(own) and line != name}
    for older in [line for line, digest in digests.items() if digest in old]:
        run([*_ctr(paths), "images", "remove", older])


def _context(paths: Paths, image: Image) -> Path:
    return image.context or paths.repository


def image_key(paths: Paths, image: Image) -> str:
    """The key of everything that goes into `image`: it is the image's tag."""
    return key_of_files(_context(paths, image), (image.dockerfile, *image.inputs), BASE_PACKAGES)


def reference(paths: Paths, image: Image, registry: str | None) -> str:
    """The image reference in a pod's template."""
    prefix = f"{registry}/" if registry else ""
    return f"{prefix}sluice/{image.name}:{image_key(paths, image)}"


def base_reference() -> str:
    """The base image's name in buildah's store; a new package list makes a new base."""
    return f"localhost/sluice-base:{key_of(debian.suite(), BASE_PACKAGES)}"


def prepare(paths: Paths) -> None:
    """Build in advance the images that the local cluster's registry takes once it is up."""
    debian.install_missing(paths)
    for image in IMAGES:
        name = reference(paths, image, REGISTRY)
        if not is_pushed(name):
            build(paths, image, name)


def deliver(paths: Paths, state: State, images: Sequence[Image] = IMAGES) -> dict[str, str]:
    """Build images whose inputs changed, and bring them to the cluster: {name: reference}."""
    if state.kind == "existing" and state.registry is None:
        raise LocalClusterError(
            "the cluster that SLUICE_KUBECONFIG names needs a registry to pull our images "
            "from: name one that it and this machine can reach in SLUICE_REGISTRY"
        )
    references = {image.name: reference(paths, image, state.registry) for image in images}
    for image in images:
        name = references[image.name]
        if state.kind == "local":
            _deliver_locally(paths, image, name)
        else:
            _deliver_with_docker(paths, state, image, name)
    return references


def _deliver_locally(paths: Paths, image: Image, name: str) -> None:
    if is_pushed(name):
        say(f"{image.name}: unchanged ({name})")
        return
    build(paths, image, name)
    push(paths, image.name, name)
    _fetch(paths, image.name, name)
    _forget_older(paths, name)


def _deliver_with_docker(paths: Paths, state: State, image: Image, name: str) -> None:
    if not docker.answers():
        debian.install_missing(paths)
        build(paths, image, name)
        push(paths, image.name, name)
        return
    if state.kind == "kind" and kind.has_own_node(paths):
        _load_into_kind(paths, image, name)
        return
    docker.build(paths, image.name, image.dockerfile, name, _context(paths, image))
    if state.kind == "kind":
        kind.load(paths, image.name, name)
    else:
        docker.push(paths, image.name, name)


def _load_into_kind(paths: Paths, image: Image, name: str) -> None:
    """From buildah: `docker build` would ask a registry for the Dockerfile's base."""
    if kind.has(name):
        say(f"{image.name}: unchanged ({name})")
        return
    build(paths, image, name)
    with tempfile.TemporaryDirectory(dir=paths.cache) as folder:
        archive = Path(folder) / "image.tar"
        command: list[Word] = [*_buildah(paths), "push", name, f"docker-archive:{archive}:{name}"]
        run_visibly(f"{image.name} archive", command, paths.logs / f"archive-{image.name}.log")
        kind.load_archive(paths, image.name, archive)


def ensure_base(paths: Paths) -> str:
    """Build a base image like python:3-slim from Debian packages; returns its name."""
    name = base_reference()
    buildah = _buildah(paths)
    if succeeds([*buildah, "inspect", "--type=image", name]):
        return name
    with locked(paths.cache / "base.lock"), tempfile.TemporaryDirectory(dir=paths.cache) as root:
        command = [
            "debootstrap",
            "--variant=minbase",
            f"--include={BASE_PACKAGES}",
            debian.suite(),
            root,
        ]
        run_visibly("base image", command, paths.logs / "debootstrap.log")
        container = run([*buildah, "from", "scratch"], env=_environment()).strip()
        run([*buildah, "copy", "-q", container, root, "/"], env=_environment())
        run([*buildah, "commit", "-q", "--rm", container, name], env=_environment())
    return name


def build(paths: Paths, image: Image, name: str) -> None:
    """Build one image with buildah; unchanged layers come from its cache."""
    with locked(paths.cache / "images.lock"):
        if succeeds([*_buildah(paths), "inspect", "--type=image", name]):
            return
        base = ensure_base(paths)
        command = [*_buildah(paths), "bud", "--layers", "--force-rm", "--network=host"]
        command += _from_host()
        command += ["--build-arg", f"BASE={base}", "-t", name, "-f", image.dockerfile, "."]
        run_visibly(
            f"{image.name} image",
            command,
            paths.logs / f"image-{image.name}.log",
            env=_environment(),
            cwd=_context(paths, image),
        )


def _from_host() -> list[str]:
    """The host's certificates and package caches, so that a build trusts what the host trusts."""
    options: list[str] = []
    if BUNDLE.exists():
        options += [f"--volume={CERTIFICATES}:{CERTIFICATES}:ro"]
        options += ["--build-arg", f"SSL_CERT_FILE={BUNDLE}"]
    for file in (Path("/etc/pip.conf"), Path("/etc/uv/uv.toml")):
        if file.exists():
            options.append(f"--volume={file}:{file}:ro")
    cache = Path.home() / ".cache" / "uv"
    cache.mkdir(parents=True, exist_ok=True)
    return [*options, f"--volume={cache}:/root/.cache/uv"]
