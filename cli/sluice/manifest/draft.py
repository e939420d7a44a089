"""A workload on its way to an object: the unread rest of it, and the lines about it. Pure."""

import json
from dataclasses import dataclass, field
from typing import Any, Literal

from sluice_core.words import clean

Object = dict[str, Any]
LineKind = Literal["owned", "missing", "changed", "lost"]


class Unreadable(ValueError):
    """The file is no manifest of an engine; the message is the sentence for its user."""


class NoEngine(Unreadable):
    """No container of a workload runs an engine that is known."""


@dataclass(frozen=True, slots=True)
class Line:
    """A sentence on one field of the manifest.

    owned: the operator does it itself, or it stays as it is. missing: no manifest says it, so
    choose a value. changed: the object says it in another way, which may matter. lost: the object
    cannot say it.
    """

    kind: LineKind
    path: str
    words: str

    def __str__(self) -> str:
        return clean(f"{self.kind}: {self.path}: {self.words}")


@dataclass(slots=True)
class Draft:
    """`name`: of the object. `nodes`: pods that serve as one. `pod`, `container`: what is left of
    the template's spec and of the engine's container. `engine`: its kind. `spec`: of the object;
    `patch`: of the engine's container in its overlay."""

    name: str
    nodes: int
    pod: Object
    container: Object
    engine: str
    spec: Object = field(default_factory=dict)
    patch: Object = field(default_factory=dict)
    args: list[str] = field(default_factory=list)
    lines: list[Line] = field(default_factory=list)

    @property
    def where(self) -> str:
        """Return the path of the engine's container."""
        return f"containers[{self.container.get('name')}]"

    def put(self, path: str, value: Any) -> None:
        """Set the field of the object's spec at dotted `path`."""
        *parents, last = path.split(".")
        at = self.spec
        for part in parents:
            at = at.setdefault(part, {})
        at[last] = value

    def get(self, path: str) -> Any:
        """Return the field of the object's spec at dotted `path`, or None."""
        at: Any = self.spec
        for part in path.split("."):
            at = at.get(part, {})
        return at or None

    def volume(self, name: str) -> Object | None:
        """Return the pod's volume of that name, or None."""
        volumes: list[Object] = self.pod.get("volumes", [])
        return next((one for one in volumes if one["name"] == name), None)

    def unmount(self, mount: Object) -> None:
        """Take a mount out of the engine, and its volume away where nobody else mounts it."""
        self.container["volumeMounts"].remove(mount)
        others = [*self.pod.get("containers", []), *self.pod.get("initContainers", [])]
        users = json.dumps([self.container, *others])
        volume = self.volume(mount["name"])
        if volume is not None and f'"name": {json.dumps(mount["name"])}' not in users:
            self.pod["volumes"].remove(volume)

    def say(self, kind: LineKind, path: str, words: str) -> None:
        """Add a line."""
        self.lines.append(Line(kind, path, words))

    def own(self, kind: LineKind, field: str, words: str) -> None:
        """Take a field out of the engine's container, with a line if it is there."""
        if field in self.container:
            self.say(kind, f"{self.where}.{field}", words)
            del self.container[field]
