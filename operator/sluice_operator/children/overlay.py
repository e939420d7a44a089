"""The user's overlay of a pod's template, `spec.podTemplate`. Pure: equal arguments, equal bytes.

Lists whose items have a name are merged by it, in the user's order; maps are merged by key, and all
else is replaced. What the operator owns is refused with a sentence, as the merge would hide it.
"""

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from ..spec.engine_rules import OWNED_VARIABLES
from ..spec.service import SpecError
from .pod import Manifest

WHERE = "spec.podTemplate"
ENGINE, GATE, WORKER = "engine", "gate", "worker"
_OURS = (ENGINE, GATE, WORKER, "gate-image", "scheduler")
"""Names of our containers, whatever the engine."""
_CONTAINERS = ("initContainers", "containers")
_BY_NAME = ("env", "volumes", "imagePullSecrets", "resourceClaims", "claims")
_BY_PATH = {"volumeMounts": "mountPath", "volumeDevices": "devicePath"}
_APPENDED = ("tolerations", "envFrom")
_POD = {
    "restartPolicy": "a pod that serves is always restarted",
    "terminationGracePeriodSeconds": "spec.drain.timeout sets it",
    "hostPID": "a gate's token would be read from beside it",
    "shareProcessNamespace": "a gate's token would be read from beside it",
    "ephemeralContainers": "no template has any",
}
_ENGINE = {
    "image": "spec.engine.image sets it",
    "command": "spec.engine.command sets it",
    "args": "spec.engine.args sets them",
    "imagePullPolicy": "the installation sets it",
    "ports": "clients reach the gate alone",
    "restartPolicy": "the operator sets it",
    **dict.fromkeys(("livenessProbe", "readinessProbe", "startupProbe"), "the operator sets it"),
}
"""Fields that the object or the operator has, of a pod and of its engine, and why."""
_SIZES = {"cpu": "spec.hardware.cpu sets it", "memory": "spec.hardware sets it"}
"""Limits of an engine that the model is planned into."""


def merged(template: Manifest, overlay: Mapping[str, Any], devices: Collection[str]) -> Manifest:
    """`template` with `overlay` on it. `devices`: resources that `spec.hardware` asks for.

    Raises SpecError where the overlay takes what is ours, or has no such form.
    """
    meta, given = template["metadata"], overlay.get("metadata", {})
    owned = dict.fromkeys(meta["labels"], "the operator sets it")
    _refuse(given.get("labels", {}), owned, "metadata.labels")
    return {
        "metadata": _onto(meta, given, "metadata"),
        "spec": _pod(template["spec"], overlay.get("spec", {}), devices),
    }


def without_gate(overlay: Mapping[str, Any]) -> Manifest:
    """An overlay that `merged` has taken, for pods that have no gate."""
    spec = dict(overlay.get("spec") or {})
    if "containers" in spec:
        spec["containers"] = [one for one in spec["containers"] if one["name"] != GATE]
    return {**overlay, "spec": spec}


def _pod(ours: Manifest, given: Mapping[str, Any], devices: Collection[str]) -> Manifest:
    _refuse(given, _POD, "spec")
    if given.get("automountServiceAccountToken") and not given.get("serviceAccountName"):
        raise _refusal("spec.automountServiceAccountToken", "needs a serviceAccountName")
    volumes = dict.fromkeys(_names(ours["volumes"]), "the operator has that volume")
    _refuse(_names(_items(given, "volumes", "spec")), volumes, "spec.volumes")
    rest = {key: value for key, value in given.items() if key not in _CONTAINERS}
    pod = _onto(ours, rest, "spec")
    added: dict[str, list[Manifest]] = {field: [] for field in _CONTAINERS}
    for field in _CONTAINERS:
        for one in _items(given, field, "spec"):
            where = f"spec.{field}[{one['name']}]"
            mounts = _items(one, "volumeMounts", where, "mountPath")
            _refuse((str(m.get("name")) for m in mounts), volumes, f"{where}.volumeMounts")
            if one["name"] not in _OURS:
                added[field].append(one)
            elif field == "initContainers" or not _patch(pod, one, devices, where):
                raise _refusal(where, "the operator has that name")
    pod["containers"] = [*pod["containers"], *added["containers"]]
    if added["initContainers"]:
        pod["initContainers"] = [*added["initContainers"], *pod.get("initContainers", [])]
    return pod


def _patch(pod: Manifest, given: Manifest, devices: Collection[str], where: str) -> bool:
    """Patch the engine, wherever it lies, or the gate; False if there is none of that name."""
    name = given["name"]
    if name == GATE:
        others = dict.fromkeys(given.keys() - {"name", "resources"}, "a gate takes resources alone")
        _refuse(given, others, where)
    else:
        _check_engine(given, devices, where)
    for field in _CONTAINERS:
        for index, ours in enumerate(pod.get(field, [])):
            if name == ours["name"] or (name, ours["name"]) == (ENGINE, WORKER):
                changed = _onto(ours, {**given, "name": ours["name"]}, where)
                pod[field] = [*pod[field][:index], changed, *pod[field][index + 1 :]]
                return True
    return False


def _check_engine(given: Manifest, devices: Collection[str], where: str) -> None:
    _refuse(given, _ENGINE, where)
    for name in _names(_items(given, "env", where)):
        if re.fullmatch("|".join(OWNED_VARIABLES), name):
            raise _refusal(f"{where}.env.{name}", "the operator sets it")
    resources = _map(given.get("resources", {}), f"{where}.resources")
    _refuse(_map(resources.get("limits", {}), where), _SIZES, f"{where}.resources.limits")
    for kind in ("limits", "requests"):
        asked = dict.fromkeys(devices, "spec.hardware sets it")
        _refuse(_map(resources.get(kind, {}), where), asked, f"{where}.resources.{kind}")


def _onto(ours: Manifest, given: Mapping[str, Any], where: str) -> Manifest:
    """`given` merged onto `ours`."""
    result = dict(ours)
    for field, value in given.items():
        held, path = result.get(field), f"{where}.{field}"
        if field in _APPENDED:
            result[field] = [*(held or []), *_list(value, path)]
        elif field in _BY_NAME or field in _BY_PATH:
            key = _BY_PATH.get(field, "name")
            added, names = _items(given, field, where, key), _names(held or [], key)
            if field in _BY_PATH:
                _refuse(_names(added, key), dict.fromkeys(names, "the operator mounts it"), path)
            kept = [one for one in held or [] if one[key] not in _names(added, key)]
            result[field] = [*kept, *added]
        elif isinstance(value, Mapping) and isinstance(held, Mapping):
            result[field] = _onto(dict(held), value, path)
        else:
            result[field] = value
    return result


def _items(given: Mapping[str, Any], field: str, where: str, key: str = "name") -> list[Manifest]:
    """The items of a list by name; raises SpecError where one has none, or another's."""
    path = f"{where}.{field}"
    items = [_map(one, f"{path}[{n}]") for n, one in enumerate(_list(given.get(field, []), path))]
    names = [one.get(key) for one in items]
    if not all(isinstance(name, str) for name in names):
        raise _refusal(path, f"each needs a {key}")
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise _refusal(path, f"{twice} is there twice")
    return items


def _names(items: Sequence[Manifest], key: str = "name") -> list[str]:
    return [one[key] for one in items]


def _refuse(given: Iterable[str], owned: Mapping[str, str], where: str) -> None:
    """Raise SpecError for the first of the names `given` that is owned, with its reason."""
    for field in sorted(owned.keys() & set(given)):
        raise _refusal(f"{where}.{field}", owned[field])


def _list(value: object, path: str) -> Sequence[Any]:
    if not isinstance(value, list):
        raise _refusal(path, "must be a list")
    return value


def _map(value: object, path: str) -> Manifest:
    if not isinstance(value, dict):
        raise _refusal(path, "must be a map")
    return value


def _refusal(path: str, why: str) -> SpecError:
    return SpecError(f"{WHERE}.{path}: {why}")
