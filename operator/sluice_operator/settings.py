"""The operator's start-up settings: flags only, read once. One source, so `ps` shows the truth."""

import argparse
import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path
from urllib.parse import urlsplit

FIELD_MANAGER = "sluice-operator"
ALL_OF_IPV4, ALL_OF_IPV6 = "0.0.0.0", "::"  # noqa: S104 - the kubelet probes from outside
DEFAULT_ENDPOINT = "https://huggingface.co"
_DESCRIPTION = (
    "Serves the InferenceServices of a cluster: makes their pods, moves their caps and replicas "
    "by the latencies that it measures. The chart starts it; by hand it takes the cluster of "
    "KUBECONFIG."
)


@dataclass(frozen=True, slots=True)
class Settings:
    """Start-up settings of one operator process.

    `gate_image`: holds `sluice-gate`, for pods of other engines; `engine_images`: default images by
    engine. `instance`: the name of this installation. `hub_endpoint`: the hub of hf:// models, for
    this process and the pods; `hub_proxy`: the HTTP proxy on both ways there. `hub_authorities`:
    ConfigMap and key, in the pods' namespace, with the certificates that pods trust there. This
    process trusts those in SSL_CERT_FILE, as httpx does. `assigned_user`: the platform that admits
    the pods gives them user and groups. `models_dir`: where this process reads
    `file:///models/...`. `namespaces`: those that are served; empty means all. `tick_s`: seconds
    between two looks at the evidence of one object; `resync_s`: seconds between two passes when
    nothing asks for one.
    """

    worker_image: str
    gate_image: str = "sluice-operator"
    engine_images: tuple[tuple[str, str], ...] = ()
    instance: str = FIELD_MANAGER
    image_pull_policy: str = "IfNotPresent"
    hub_endpoint: str = DEFAULT_ENDPOINT
    hub_proxy: str | None = None
    hub_authorities: tuple[str, str] | None = None
    assigned_user: bool = False
    models_dir: Path = Path("/models")
    namespaces: tuple[str, ...] = ()
    address: str = ALL_OF_IPV4
    metrics_port: int = 9090
    liveness_port: int = 8080
    tick_s: float = 2.0
    resync_s: float = 30.0
    log_format: str = "plain"
    verbose: bool = False


def parse(argv: Sequence[str] | None = None) -> Settings:
    """Settings from `argv`; exits with 2 and one sentence if a flag is wrong (argparse)."""
    given = vars(_parser().parse_args(argv))
    listed = {name: tuple(given.get(name, ())) for name in ("namespaces", "engine_images")}
    return Settings(**{**given, **listed})


def _add_images(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--worker-image", required=True, help="worker image for objects that name none")
    add("--gate-image", help="image with sluice-gate, this one's own: for pods of other engines")
    add(
        "--engine-image",
        action="append",
        type=_name_and_image,
        dest="engine_images",
        metavar="ENGINE=IMAGE",
        help="default image of an engine, such as VLLM=vllm/vllm-openai:v0.32.0 (may be repeated)",
    )
    add(
        "--image-pull-policy",
        choices=("Always", "IfNotPresent", "Never"),
        help="of the worker's container",
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "sluice-operator", description=_DESCRIPTION, argument_default=argparse.SUPPRESS
    )
    add = parser.add_argument
    _add_images(parser)
    add(
        "--instance",
        help="name of this installation; of two that watch an object, one cares for it",
    )
    _add_hub(parser)
    add(
        "--assigned-user",
        action="store_true",
        help="leave user and groups of the pods to the cluster (OpenShift) instead of 65532",
    )
    add("--models-dir", type=Path, help="checkpoints of file:// URIs")
    add(
        "--namespace",
        action="append",
        dest="namespaces",
        help="serve only this one (may be repeated)",
    )
    _add_listening(parser)
    add("--tick-seconds", type=_positive, dest="tick_s", help="between two looks at the evidence")
    add("--resync-seconds", type=_positive, dest="resync_s", help="between two passes when idle")
    add("--log-format", choices=("plain", "json"))
    add("--verbose", action="store_true", help="log debug messages")
    return parser


def _add_hub(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--hub-endpoint", type=_url, help="of hf:// models")
    add("--hub-proxy", type=_url, help="HTTP proxy on the way there, of this process and the pods")
    add(
        "--hub-ca-config-map",
        type=_name_and_key,
        dest="hub_authorities",
        metavar="NAME/KEY",
        help="ConfigMap of the pods' namespace with the certificates that pods trust on the way",
    )


def _add_listening(parser: argparse.ArgumentParser) -> None:
    listen = parser.add_mutually_exclusive_group()
    listen.add_argument("--address", help="address to serve metrics and liveness on")
    listen.add_argument(
        "--pod-ip",
        type=_all_of_family,
        dest="address",
        help="the pod's own address: serve them on all addresses of its family",
    )
    parser.add_argument("--metrics-port", type=_port, help="of /metrics")
    parser.add_argument("--liveness-port", type=_port, help="of /healthz")


def _all_of_family(text: str) -> str:
    """The address to listen on: all of the family, as `kubectl port-forward` arrives at loopback.
    Not both families: a node may have IPv6 switched off, and kopf listens on one."""
    try:
        version = ip_address(text).version
    except ValueError as e:
        raise argparse.ArgumentTypeError(f"{text!r} is not an IP address") from e
    return ALL_OF_IPV6 if version == 6 else ALL_OF_IPV4


def _url(text: str) -> str:
    """Refuse credentials: the URL is in flags, manifests and messages, where all tenants see it."""
    if "@" in text:
        raise argparse.ArgumentTypeError("a URL here is seen by all, so it may hold no credentials")
    if not text.startswith(("https://", "http://")):
        raise argparse.ArgumentTypeError(f"{text} does not start with https:// or http://")
    try:
        url = urlsplit(text)
        is_whole = bool(url.hostname) and url.port != 0
    except ValueError:
        is_whole = False
    if not is_whole:
        raise argparse.ArgumentTypeError(f"{text} is no URL of a host and, where need be, a port")
    return text.rstrip("/")


def _name_and_key(text: str) -> tuple[str, str]:
    name, _, key = text.partition("/")
    if name and key and "/" not in key:
        return name, key
    raise argparse.ArgumentTypeError(f"{text} is not NAME/KEY of a ConfigMap")


def _name_and_image(text: str) -> tuple[str, str]:
    name, _, image = text.partition("=")
    if name and image:
        return name, image
    raise argparse.ArgumentTypeError(f"{text} is not ENGINE=IMAGE")


def _positive(text: str) -> float:
    with contextlib.suppress(ValueError):
        if 0 < (value := float(text)) < float("inf"):
            return value
    raise argparse.ArgumentTypeError(f"{text} is not a positive number of seconds")


def _port(text: str) -> int:
    if text.isascii() and text.isdigit() and 0 < int(text) < 65536:
        return int(text)
    raise argparse.ArgumentTypeError(f"{text} is not a port, from 1 to 65535")
