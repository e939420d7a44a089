"""The rest of a template as `spec.podTemplate`, and the fields that it may not have. Pure."""

import json
import re
from typing import Any, Final

from .draft import Draft, LineKind, Object

_VOLUMES = {
    "tmp", "admin", "runtime", "keys", "models", "cache", "tmp-gate", "packages", "socket", "ca",
}  # fmt: skip
"""Names of the operator's volumes, and of its containers below."""
_CONTAINERS = {"engine", "gate", "worker", "gate-image", "scheduler", "follower"}
_PORTS = (8000, 8001, 8100)
_SHM = "/dev/shm"  # noqa: S108
_OURS = ("/tmp", "/mnt/cache", "/mnt/models")  # noqa: S108
_PROBES = "the operator probes the engine through the gate"
_ENGINE: Final[dict[str, tuple[LineKind, str]]] = {
    "ports": ("owned", "clients reach the gate, on port 80 of the Service and 8000 of the pods"),
    "livenessProbe": ("owned", _PROBES),
    "readinessProbe": ("owned", _PROBES),
    "startupProbe": ("owned", _PROBES),
    "imagePullPolicy": ("owned", "the installation sets it"),
    "restartPolicy": ("owned", "the operator sets it"),
}
_ELSEWHERE = "mount it elsewhere, or run as root by securityContext"
_SHARED = "not taken: a gate's token could be read from beside it"
_POD: Final[dict[str, tuple[LineKind, str]]] = {
    "restartPolicy": ("owned", "a pod that serves is always restarted"),
    "hostPID": ("lost", _SHARED),
    "shareProcessNamespace": ("lost", _SHARED),
    "ephemeralContainers": ("lost", "no template has any"),
}


def read(draft: Draft) -> Object:
    """Return the overlay's `spec`, from all that no rule took."""
    _shared_memory(draft)
    _mounts(draft)
    _rename_volumes(draft)
    _neighbours(draft)
    for name, (kind, words) in _ENGINE.items():
        draft.own(kind, name, words)
    for name, (kind, words) in _POD.items():
        if draft.pod.pop(name, None):
            draft.say(kind, name, words)
    if draft.pod.get("hostNetwork"):
        draft.say("changed", "hostNetwork", "gate and engine take 8000, 8001 and 8100 of the node")
    _account(draft)
    _rights(draft)
    patch = {**draft.container, **draft.patch}
    if left := {
        key: value for key, value in patch.items() if value not in ([], {}) and key != "name"
    }:
        draft.patch = {"name": "engine", **left}
    sidecars = [_beside(draft, one, "containers") for one in draft.pod.pop("containers")]
    first = [_beside(draft, one, "initContainers") for one in draft.pod.pop("initContainers", [])]
    containers = [*([draft.patch] if left else []), *sidecars]
    lists = {"initContainers": first, "containers": containers}
    rest = {key: value for key, value in draft.pod.items() if value != []}
    return {**rest, **{key: value for key, value in lists.items() if value}}


def _shared_memory(draft: Draft) -> None:
    """Leave /dev/shm to the operator, unless it has a size or the operator mounts none."""
    spread = (draft.get("hardware.gpus") or 1) != 1 or draft.nodes > 1
    mount = next((one for one in draft.container.get("volumeMounts", [])
                  if one["mountPath"].rstrip("/") == _SHM), None)  # fmt: skip
    volume = mount and draft.volume(mount["name"])
    if mount and volume and spread and volume.get("emptyDir") == {"medium": "Memory"}:
        draft.say("owned", f"{draft.where}.volumeMounts[{mount['name']}]",
                  f"the operator mounts an emptyDir of medium Memory at {_SHM}")  # fmt: skip
        draft.unmount(mount)


def _mounts(draft: Draft) -> None:
    """Take out mounts where the operator has one; add a line where its user cannot go."""
    user = {**draft.pod.get("securityContext", {}), **draft.container.get("securityContext", {})}
    for mount in list(draft.container.get("volumeMounts", [])):
        path = f"{draft.where}.volumeMounts[{mount['name']}]"
        top, volume = mount["mountPath"].rstrip("/"), draft.volume(mount["name"])
        if top in _OURS:
            empty = volume is not None and volume.get("emptyDir") == {}
            draft.say("owned" if empty else "lost", path, f"the operator has a volume at {top}")
            draft.unmount(mount)
        elif top.startswith("/root") and user.get("runAsUser") != 0:
            draft.say("changed", path, f"user 65532 may not enter {top}: {_ELSEWHERE}")
        elif any(line.path == path for line in draft.lines):
            continue
        elif volume and "hostPath" in volume and user.get("runAsUser") != 0:
            draft.say("changed", path, "user 65532 must be able to read this path of the node")


def _rename_volumes(draft: Draft) -> None:
    """Give volumes with a name of the operator's another one, also in their mounts."""
    for volume in draft.pod.get("volumes", []):
        name = volume["name"]
        if name in _VOLUMES:
            volume["name"] = f"own-{name}"
            draft.say("owned", f"volumes[{name}]", f"is own-{name}, as the operator has that name")
            for one in _all(draft):
                for mount in [*one.get("volumeMounts", []), *one.get("volumeDevices", [])]:
                    if isinstance(mount, dict) and mount.get("name") == name:
                        mount["name"] = f"own-{name}"


def _neighbours(draft: Draft) -> None:
    """Add a line for each port at which another container, or a hook, asks the engine."""
    ports = {str(port.get("containerPort")) for port in draft.container.get("ports", [])}
    others = [draft.pod.get("containers"), draft.container.get("lifecycle")]
    for port in re.findall(r"(?:localhost|127\.0\.0\.1):(\d+)", json.dumps(others)):
        if port in ports - {"8000"}:
            draft.say(
                "changed", f"localhost:{port}", "the gate, and so the engine, is at port 8000"
            )


def _account(draft: Draft) -> None:
    """Ask for the token of an account that is named: the operator's pods have none unasked."""
    if old := draft.pod.pop("serviceAccount", None):
        draft.pod.setdefault("serviceAccountName", old)
    if "serviceAccountName" in draft.pod:
        draft.pod.setdefault("automountServiceAccountToken", True)
    elif draft.pod.get("automountServiceAccountToken"):
        draft.pod["serviceAccountName"] = "default"


def _rights(draft: Draft) -> None:
    """Take back what the operator's own securityContext would forbid of the manifest's."""
    for holder in (draft.pod, draft.container):
        context = holder.get("securityContext", {})
        if context.get("runAsUser") == 0:
            context.setdefault("runAsNonRoot", False)
    context = draft.container.get("securityContext", {})
    capabilities = context.get("capabilities")
    added = capabilities.get("add") if isinstance(capabilities, dict) else None
    is_admin = isinstance(added, list) and bool(
        {"SYS_ADMIN", "CAP_SYS_ADMIN", "ALL"} & {*map(str, added)}
    )
    if context.get("privileged") or is_admin:
        context.setdefault("allowPrivilegeEscalation", True)


def _beside(draft: Draft, one: Object, field: str) -> Object:
    """Return another container, under a name that is not the operator's."""
    where = f"{field}[{one['name']}]"
    ports = [port.get("containerPort") for port in one.get("ports", [])]
    if taken := [port for port in ports if port in _PORTS]:
        draft.say("changed", f"{where}.ports", f"{taken[0]} is the operator's; take another one")
    if one["name"] in _CONTAINERS:
        draft.say("owned", where, f"is own-{one['name']}, as the operator has that name")
        return {**one, "name": f"own-{one['name']}"}
    return one


def _all(draft: Draft) -> list[Object]:
    others: list[Any] = [*draft.pod.get("containers", []), *draft.pod.get("initContainers", [])]
    return [draft.container, *others]
