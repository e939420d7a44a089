"""The known children of all objects that the operator manages. Pure.

A watch, a read and our own writes all show a child; the highest resourceVersion counts. So a pass
sees what the last one wrote, even before the watch does. Children of other objects are dropped, and
of a pod only the fields that are read are kept. Anybody may give our label to what they make.
"""

from collections.abc import Collection
from dataclasses import dataclass, field

from ..spec.service import MAX_REPLICAS
from .observed import Object, controller_of, essence_of, uid_of, version

Key = tuple[str, str]
"""Namespace and name of an object."""
MAX_PODS = 2 * MAX_REPLICAS
"""Most pods kept of one object: a rollout has less than twice as many as replicas."""


@dataclass(slots=True)
class _Children:
    """Children of one object. `named`: by kind; `lost`: the last one gone, by kind; `pods`: by
    uid; `num_gone`: pods that have gone."""

    named: dict[str, Object] = field(default_factory=dict)
    lost: dict[str, Object] = field(default_factory=dict)
    pods: dict[str, Object] = field(default_factory=dict)
    num_gone: int = 0


class ChildStore:
    """Holds the children of an object from `open` to `close`."""

    def __init__(self) -> None:
        self._of: dict[Key, _Children] = {}
        self._key_of: dict[str, Key] = {}

    def open(self, key: Key) -> None:
        """Start to hold children of the object."""
        self._of.setdefault(key, _Children())

    def close(self, key: Key) -> None:
        """Stop, and forget its children."""
        for uid in self._of.pop(key, _Children()).pods:
            del self._key_of[uid]

    def child(self, key: Key, kind: str) -> Object | None:
        """The object's child of a kind other than Pod."""
        return self._of[key].named.get(kind)

    def __len__(self) -> int:
        """The number of objects."""
        return len(self._of)

    def num_gone(self, key: Key) -> int:
        """Pods of the object that have gone so far. One that fails is gone from the watch, too."""
        return self._of[key].num_gone

    def pods(self, key: Key) -> Collection[Object]:
        """The object's pods."""
        return self._of[key].pods.values()

    def lost(self, key: Key, uid: str) -> frozenset[str]:
        """Kinds whose last deleted child was controlled by the object with `uid`."""
        lost = self._of[key].lost.items()
        return frozenset(kind for kind, body in lost if controller_of(body) == uid)

    def show(self, key: Key, kind: str, body: Object) -> set[Key]:
        """The watch shows a child of `key`. Returns the keys that have changed."""
        children = self._of.get(key)
        if kind == "Pod":
            return self._show_pod(key, children, body)
        if children is None:
            return set()
        if uid_of(children.lost.get(kind)) == uid_of(body):  # its label was removed and restored
            del children.lost[kind]
        self.keep(key, kind, body)
        return {key}

    def _show_pod(self, key: Key, children: _Children | None, body: Object) -> set[Key]:
        uid = uid_of(body)
        former = self._key_of.get(uid, key)
        if former != key:  # its label was edited
            self.lose_pod(uid)
        if children is None or (uid not in children.pods and len(children.pods) >= MAX_PODS):
            return {former} - {key}
        children.pods[uid] = _newer(children.pods.get(uid), essence_of(body))
        self._key_of[uid] = key
        return {former, key}

    def keep(self, key: Key, kind: str, body: Object) -> None:
        """Keep a child from a read or our own write; the watch may have shown it gone since."""
        children = self._of[key]
        if uid_of(children.lost.get(kind)) != uid_of(body):
            children.named[kind] = _newer(children.named.get(kind), body)

    def drop(self, key: Key, kind: str) -> None:
        """Forget a child that is out of date."""
        self._of[key].named.pop(kind, None)

    def lose(self, key: Key, kind: str, body: Object) -> set[Key]:
        """A child is gone, at least from the watch. Returns the keys that have changed."""
        uid = uid_of(body)
        if kind == "Pod":
            key = self._key_of.get(uid, key)
            self.lose_pod(uid)
        children = self._of.get(key)
        if children is None:
            return set()
        if kind != "Pod":
            children.lost[kind] = body
            if uid_of(children.named.get(kind)) == uid:
                del children.named[kind]
        return {key}

    def lose_pod(self, uid: str) -> None:
        """That pod is gone, or belongs to another object now."""
        if key := self._key_of.pop(uid, None):
            del self._of[key].pods[uid]
            self._of[key].num_gone += 1


def _newer(before: Object | None, body: Object) -> Object:
    return before if before and version(before) > version(body) else body
