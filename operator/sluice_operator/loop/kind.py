"""What is peculiar to one kind of object: how it is parsed, observed, planned and carried out."""

from collections.abc import Awaitable, Callable, Iterable
from typing import Any, Protocol, TypeVar

from ..cluster.client import Ref
from ..cluster.observed import Object
from ..reasons import Reason
from ..status.events import Notice
from .children import Children

ParsedT = TypeVar("ParsedT", bound="Parsed")
SeenT = TypeVar("SeenT")
PlanT = TypeVar("PlanT", bound="Planned")
Tell = Callable[[Iterable[Notice]], Awaitable[None]]
"""Makes events of what is to be reported."""


class Parsed(Protocol):
    """An object as its definition reads it. `unknown`: fields that it leaves out."""

    @property
    def unknown(self) -> Any: ...

    @property
    def generation(self) -> int: ...


class Planned(Protocol):
    """What one pass decided. `requeue_s`: seconds until the next one."""

    @property
    def status(self) -> dict[str, object]: ...

    @property
    def requeue_s(self) -> float: ...


class Kind(Protocol[ParsedT, SeenT, PlanT]):
    """One object of one kind. A reconciler calls these in this order, in each pass.

    `name`: the kind's.
    """

    name: str

    @property
    def owned(self) -> Ref:
        """The child that says whose the object is."""

    @property
    def children(self) -> Children:
        """Those of the object."""

    def serves(self, now: float) -> bool:
        """True if pods serve, so that passes must not be far apart."""

    def disown(self) -> None:
        """Forget what was decided: the object is another installation's."""

    def parse(self, body: Object) -> ParsedT:
        """Raises SpecError."""

    async def observe(self, parsed: ParsedT, uid: str, previous: Object, now: float) -> SeenT:
        """Raises ClusterError."""

    def plan(self, parsed: ParsedT, observed: SeenT, now: float) -> PlanT:
        """Pure."""

    async def execute(self, planned: PlanT, tell: Tell) -> None:
        """Raises ClusterError."""

    def fail(
        self, status: dict[str, Any], previous: Object, reason: Reason, message: str, now: float
    ) -> dict[str, Any]:
        """`status` of a pass that could not read or write."""

    def stop(self) -> None:
        """End what runs beside the passes."""
