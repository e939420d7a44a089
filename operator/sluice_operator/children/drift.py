"""What is live against what is wanted: is a write needed, and what was edited. Pure.

Only our own fields are compared: defaults that the API server adds and fields that others own are
left alone, as server-side apply leaves them. Those that we no longer want are ours until we write.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

from ..cluster.observed import Object
from ..settings import FIELD_MANAGER
from .manifests import MANIFEST_ANNOTATION, annotation, digest

_ESSENCE = ("labels", "annotations", "ownerReferences")
_WHOLE = frozenset({"spec.selector"})
"""What is one value to the API server: a key that somebody adds to it is an edit of ours."""


def changes(wanted: Object, live: Object) -> Iterator[str]:
    """Paths of what a write of `wanted` puts into `live`, and takes out of it."""
    return chain(differences(wanted, live), leftovers(wanted, live))


def leftovers(wanted: Object, live: Object) -> Iterator[str]:
    """Paths of the fields of `live` that are of our writes, and that `wanted` has not."""
    for entry in live["metadata"].get("managedFields") or ():
        if entry.get("manager") == FIELD_MANAGER and entry.get("operation") == "Apply":
            yield from _left(entry.get("fieldsV1") or {}, wanted, "")


def _left(owned: Object, wanted: object, path: str) -> Iterator[str]:
    """`owned`: FieldsV1, in which `f:` names a field, `k:` an item by its keys as JSON, `v:` one by
    its value, and `.` the thing itself."""
    for key, below in owned.items():
        kind, _, name = key.partition(":")
        if kind == "f":
            at = f"{path}.{name}" if path else name
            found = [wanted[name]] if isinstance(wanted, Mapping) and name in wanted else []
        elif kind in ("k", "v"):
            at, items = f"{path}[{name}]", wanted if isinstance(wanted, Sequence) else ()
            found = [item for item in items if _is_item(json.loads(name), item)]
        else:
            continue
        if not found:
            yield at
        else:
            yield from _left(below, found[0], at)


def _is_item(known: object, item: object) -> bool:
    if isinstance(known, Mapping) and isinstance(item, Mapping):
        return item.items() >= known.items()
    return item == known


def differences(wanted: object, live: object, path: str = "") -> Iterator[str]:
    """Paths of the fields of `wanted` that `live` lacks or has otherwise."""
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
    """The hash that our manifest carries, in it and on the live object."""
    return annotation(thing, MANIFEST_ANNOTATION)


def acceptance(wanted: Object, live: Object) -> str:
    """Names the pair, so that a write which the API server changes itself is not repeated."""
    meta = live["metadata"]
    body = {key: value for key, value in live.items() if key not in ("metadata", "status")}
    return digest([manifest_hash(wanted), body, [meta.get(key) for key in _ESSENCE]])
