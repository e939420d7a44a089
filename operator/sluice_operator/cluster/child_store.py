"""The children of all objects that are looked after, as far as known. Pure.

A child is as a watch, a read or our own write has shown it, whichever has the highest
resourceVersion: a pass sees what the last one wrote, also before the watch does. A child of no such
object is not kept, nor is more of a pod than is read: anybody may give our label to what they make.
"""

from collections.abc import Collection
from dataclasses import dataclass, field

from ..spec.service import MAX_REPLICAS
from .observed import Object, controller_of, essence_of, version

Key = tuple[str, str]
"""Namespace and name of an object."""
MAX_PODS = 2 * MAX_REPLICAS
"""Of one object: a rollout has less than twice as many as replicas."""


@dataclass(slots=True)
class _Children:
    """One object's. `named`: by kind; `lost`: by kind, the last one that has gone; `pods`: by
    uid."""

    named: dict[str, Object] = field(default_factory=dict)
    lost: dict[str, Object] = field(default_factory=dict)
    pods: dict[str, Object] = field(default_factory=dict)


class ChildStore:
    """Holds the children of an object from `open` to `close`."""

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

    def child(self, key: Key, kind: str) -> Object | None:
        """The object's child of a kind that is no pod."""
        return self._of[key].named.get(kind)

    def pods(self, key: Key) -> Collection[Object]:
        """The object's pods."""
        return self._of[key].pods.values()

    def lost(self, key: Key, uid: str) -> frozenset[str]:
        """Kinds of which the last child to go was controlled by the object with `uid`."""
        lost = self._of[key].lost.items()
        return frozenset(kind for kind, body in lost if controller_of(body) == uid)

    def show(self, key: Key, kind: str, body: Object) -> set[Key]:
        """The watch shows a child of `key`. Returns the keys that have changed."""
        children = self._of.get(key)
        if kind == "Pod":
            return self._show_pod(key, children, body)
        if children is None:
            return set()
        if _uid(children.lost.get(kind)) == _uid(body):  # its label was taken away, and put back
            del children.lost[kind]
        self.keep(key, kind, body)
        return {key}

    def _show_pod(self, key: Key, children: _Children | None, body: Object) -> set[Key]:
        uid = _uid(body)
        former = self._key_of.get(uid, key)
        if former != key:  # its label was edited
            self.lose_pod(uid)
        if children is None or (uid not in children.pods and len(children.pods) >= MAX_PODS):
            return {former} - {key}
        children.pods[uid] = _newer(children.pods.get(uid), essence_of(body))
        self._key_of[uid] = key
        return {former, key}

    def keep(self, key: Key, kind: str, body: Object) -> None:
        """A read or our own write returned a child, which the watch may have shown gone since."""
        children = self._of[key]
        if _uid(children.lost.get(kind)) != _uid(body):
            children.named[kind] = _newer(children.named.get(kind), body)

    def drop(self, key: Key, kind: str) -> None:
        """Forget a child that is out of date."""
        self._of[key].named.pop(kind, None)

    def lose(self, key: Key, kind: str, body: Object) -> set[Key]:
        """A child is gone, at least from the watch. Returns the keys that have changed."""
        uid = _uid(body)
        if kind == "Pod":
            key = self._key_of.get(uid, key)
            self.lose_pod(uid)
        children = self._of.get(key)
        if children is None:
            return set()
        if kind != "Pod":
            children.lost[kind] = body
            if _uid(children.named.get(kind)) == uid:
                del children.named[kind]
        return {key}

    def lose_pod(self, uid: str) -> None:
        """That pod is gone, or another object's."""
        if key := self._key_of.pop(uid, None):
            del self._of[key].pods[uid]


def _newer(before: Object | None, body: Object) -> Object:
    return before if before and version(before) > version(body) else body


def _uid(body: Object | None) -> str:
    return str(body["metadata"]["uid"]) if body else ""
