"""Drift: compares live objects with wanted ones, to see what to write and what was edited. Pure.

Only our own fields are compared. Defaults of the API server and fields of others are left alone, as
server-side apply leaves them. Another manifest has another hash, also one with a field less.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ..cluster.observed import Object
from .manifests import MANIFEST_ANNOTATION, TARGET_PREFIX, annotation, digest

_ESSENCE = ("labels", "annotations", "ownerReferences")
_WHOLE = frozenset({"spec.selector"})
"""Fields that the API server treats as one value: a key that somebody adds is an edit of ours."""


def changes(wanted: Object, live: Object) -> Iterator[str]:
    """Paths that a write of `wanted` changes in `live`, and targets that it removes."""
    yield from differences(wanted, live)
    for key in (live.get("data") or {}).keys() - wanted.get("data", {}).keys():
        if key.startswith(TARGET_PREFIX):
            yield f"data.{key}"


def differences(wanted: object, live: object, path: str = "") -> Iterator[str]:
    """Paths of the fields of `wanted` that `live` lacks or has with another value."""
    if isinstance(wanted, Mapping) and path not in _WHOLE:
        found = live if isinstance(live, Mapping) else {}
        for key, value in wanted.items():
            yield from differences(value, found.get(key), f"{path}.{key}" if path else str(key))
    elif isinstance(wanted, Sequence) and not isinstance(wanted, str):
        yield from _list_differences(wanted, live if isinstance(live, Sequence) else (), path)
    elif wanted != live:
        yield path


def _list_differences(wanted: Sequence[Any], live: Sequence[Any], path: str) -> Iterator[str]:
    if wanted and all(isinstance(item, Mapping) and "name" in item for item in wanted):
        # Lists with a merge key: a webhook may have put a sidecar or a variable between ours.
        by_name = {item.get("name"): item for item in live if isinstance(item, Mapping)}
        for item in wanted:
            yield from differences(item, by_name.get(item["name"]), f"{path}[{item['name']}]")
    elif len(wanted) != len(live):
        yield path
    else:
        for index, (ours, theirs) in enumerate(zip(wanted, live, strict=True)):
            yield from differences(ours, theirs, f"{path}[{index}]")


def manifest_hash(thing: Object | None) -> str | None:
    """The hash of our manifest, as the manifest and the live object carry it."""
    return annotation(thing, MANIFEST_ANNOTATION)


def acceptance(wanted: Object, live: Object) -> str:
    """Names the pair, so that a write which the API server itself changes is not repeated."""
    meta = live["metadata"]
    body = {key: value for key, value in live.items() if key not in ("metadata", "status")}
    return digest([manifest_hash(wanted), body, [meta.get(key) for key in _ESSENCE]])
