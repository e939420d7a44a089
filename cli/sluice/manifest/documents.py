"""The YAML documents of a file, and the shape that all rules rely on. Pure."""

from collections.abc import Iterator
from typing import Any, Required, TypedDict

import yaml
from msgspec import convert

from .draft import Object, Unreadable

_MOST_NODES = 100_000
"""Values of a file. Aliases can make any number of a few lines."""
_DEEPEST = 100
TEMPLATES = {"Deployment": "apps/", "StatefulSet": "apps/", "LeaderWorkerSet": "leaderworkerset."}
"""Kinds that make pods, and how their API groups begin."""


class _Variable(TypedDict, total=False):
    name: Required[str]
    value: str
    valueFrom: dict[str, dict[str, Any]]


class _Mount(TypedDict, total=False):
    name: Required[str]
    mountPath: Required[str]
    subPath: str


class _Resources(TypedDict, total=False):
    limits: dict[str, str | int | float]
    requests: dict[str, str | int | float]


class _Container(TypedDict, total=False):
    name: Required[str]
    image: str
    command: list[str]
    args: list[str]
    env: list[_Variable]
    ports: list[dict[str, Any]]
    resources: _Resources
    volumeMounts: list[_Mount]
    securityContext: dict[str, Any]
    lifecycle: dict[str, dict[str, Any]]


class _Named(TypedDict):
    name: str


class _PodSpec(TypedDict, total=False):
    containers: Required[list[_Container]]
    initContainers: list[_Container]
    volumes: list[_Named]
    nodeSelector: dict[str, str]
    tolerations: list[dict[str, Any]]
    resourceClaims: list[_Named]
    securityContext: dict[str, Any]
    affinity: dict[str, Any]
    runtimeClassName: str
    terminationGracePeriodSeconds: int


class _Metadata(TypedDict, total=False):
    name: str
    namespace: str
    labels: dict[str, str]
    annotations: dict[str, str]


class _Template(TypedDict, total=False):
    metadata: _Metadata
    spec: Required[_PodSpec]


class _Group(TypedDict, total=False):
    size: int
    leaderTemplate: _Template
    workerTemplate: Required[_Template]


class _Selector(TypedDict, total=False):
    matchLabels: dict[str, str]


class _Spec(TypedDict, total=False):
    replicas: int
    selector: _Selector
    template: _Template
    leaderWorkerTemplate: _Group
    strategy: dict[str, Any]
    volumeClaimTemplates: list[dict[str, Any]]


class _Workload(TypedDict, total=False):
    metadata: _Metadata
    spec: Required[_Spec]


class _Loader(yaml.SafeLoader):
    """Reads dates as texts, as Kubernetes does."""


_Loader.yaml_implicit_resolvers = {
    first: [(tag, form) for tag, form in forms if not tag.endswith(":timestamp")]
    for first, forms in yaml.SafeLoader.yaml_implicit_resolvers.items()
}


def read(text: str) -> list[Object]:
    """Return the objects of all documents, those in Lists too; raises Unreadable."""
    try:
        documents = list(yaml.load_all(text, Loader=_Loader))
    except (yaml.YAMLError, ValueError, RecursionError) as e:
        reason = " ".join(str(e).split()) or type(e).__name__
        raise Unreadable(f"this is no YAML: {reason}") from e
    left = iter(range(_MOST_NODES))
    found = [_plain(document, left, 0) for document in documents if document is not None]
    return [one for document in found for one in _listed(document)]


def _listed(document: object) -> Iterator[Object]:
    if not isinstance(document, dict):
        raise Unreadable("a document of the file is no Kubernetes object")
    items = document.get("items")
    if str(document.get("kind", "")).endswith("List") and isinstance(items, list):
        for item in items:
            yield from _listed(item)
    else:
        yield document


def _plain(value: Any, left: Iterator[int], depth: int) -> Any:
    """Copy `value` in JSON's types, without the fields that are null."""
    if next(left, None) is None or depth > _DEEPEST:
        raise Unreadable("the file holds too much to be a manifest")
    if isinstance(value, dict):
        pairs = ((str(key), one) for key, one in value.items() if one is not None)
        return {key: _plain(one, left, depth + 1) for key, one in pairs}
    if isinstance(value, list):
        return [_plain(one, left, depth + 1) for one in value]
    if not isinstance(value, str | int | float):
        raise Unreadable(f"a value of the file is a {type(value).__name__}, which JSON has not")
    return value


def is_workload(document: Object) -> bool:
    """Return True for a kind of TEMPLATES, of its own API group."""
    group = TEMPLATES.get(str(document.get("kind")))
    return group is not None and str(document.get("apiVersion", "")).startswith(group)


def check_shape(document: Object) -> None:
    """Raise Unreadable where a workload is not as the API server would take it."""
    try:
        spec = convert(document, _Workload)["spec"]
    except ValueError as e:
        raise Unreadable(f"this is no {document['kind']}: {e}") from e
    if "leaderWorkerTemplate" not in spec and "template" not in spec:
        raise Unreadable(f"this is no {document['kind']}: it has no template of pods")
