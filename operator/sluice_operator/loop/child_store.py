"""What the watches have shown of the children of the objects that are looked after. Pure.

Anybody may give our label to what he makes, as much as he likes of it: what is no child of such an
object is not kept, nor is more of a pod than is read.
"""

from collections.abc import Collection
from dataclasses import dataclass, field

from ..children.drift import version
from ..children.manifests import INSTANCE_LABEL
from ..children.runtime import runtime_name
from ..cluster.observed import Object, essence_of
from ..spec.service import MAX_REPLICAS

Key = tuple[str, str]
MAX_PODS = 2 * MAX_REPLICAS
"""Of one object: a rollout has less than twice as many as replicas."""


@dataclass(slots=True)
class _Children:
    """Of one object: those with names by kind, pods by uid. `gone`: pods that went while the
    present ones are asked for, None once these are known."""

    named: dict[str, Object] = field(default_factory=dict)
    pods: dict[str, Object] = field(default_factory=dict)
    gone: set[str] | None = field(default_factory=set)


class Seen:
    """By object, from when it is looked after until it is not."""

    def __init__(self) -> None:
        self._of: dict[Key, _Children] = {}
        self._key_of: dict[str, Key] = {}

    def open(self, key: Key) -> None:
        """The object is looked after."""
        self._of.setdefault(key, _Children())

    def close(self, key: Key) -> None:
        """It is not any more."""
        for uid in self._of.pop(key, _Children()).pods:
            del self._key_of[uid]

    def of(self, kind: str, namespace: str, name: str) -> Collection[Object]:
        """The object's children of one kind."""
        found = self._of.get((namespace, name), _Children())
        if kind == "Pod":
            return found.pods.values()
        return [found.named[kind]] if kind in found.named else ()

    def show(self, kind: str, body: Object) -> set[Key]:
        """A child is there or has changed; whose it is, and was."""
        key = _owner_of(kind, body)
        found = self._of.get(key)
        if kind == "Pod":
            return self._show_pod(key, found, body)
        if found is None:
            return set()
        found.named[kind] = _newer(found.named.get(kind), body)
        return {key}

    def _show_pod(self, key: Key, found: _Children | None, body: Object) -> set[Key]:
        uid = body["metadata"]["uid"]
        former = self._key_of.get(uid, key)
        if former != key:  # its label was edited
            self.lose_pod(uid)
        if found is None or (uid not in found.pods and len(found.pods) >= MAX_PODS):
            return {former} - {key}
        found.pods[uid] = _newer(found.pods.get(uid), essence_of(body))
        self._key_of[uid] = key
        return {former, key}

    def lose(self, kind: str, body: Object) -> set[Key]:
        """A child is gone, at least from the watch; whose it was."""
        key, uid = _owner_of(kind, body), body["metadata"]["uid"]
        if kind == "Pod":
            key = self._key_of.get(uid, key)
            self.lose_pod(uid)
        found = self._of.get(key)
        if found is None:
            return set()
        if kind == "Pod" and found.gone is not None:
            found.gone.add(uid)
        if kind in found.named and found.named[kind]["metadata"]["uid"] == uid:
            del found.named[kind]
        return {key}

    def lose_pod(self, uid: str) -> None:
        """That pod is gone, or another object's."""
        if key := self._key_of.pop(uid, None):
            del self._of[key].pods[uid]

    def list_pod(self, key: Key, body: Object) -> None:
        """A pod of the object as it was a moment ago, which the watch may be yet to show."""
        found, uid = self._of.get(key), body["metadata"]["uid"]
        if found and uid not in (found.gone or ()):
            self._show_pod(key, found, body)

    def end_list(self, key: Key) -> None:
        """All pods that were there have been listed."""
        if found := self._of.get(key):
            found.gone = None


def _newer(before: Object | None, body: Object) -> Object:
    """A list of a moment ago may say less than the watch has shown."""
    return before if before and version(before) > version(body) else body


def _owner_of(kind: str, body: Object) -> Key:
    """Whose child it would be: of pods their label tells, of others their name, which nobody
    edits."""
    meta = body["metadata"]
    name: str = meta["name"]
    if kind == "Pod":
        name = str((meta.get("labels") or {}).get(INSTANCE_LABEL, ""))
    elif kind == "ConfigMap":
        name = name.removesuffix(runtime_name("")) if name.endswith(runtime_name("")) else ""
    return str(meta["namespace"]), name
