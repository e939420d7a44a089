"""What a route is: written once, read by routers, the OpenAPI document, admission and gates. Pure.

Each module of this folder, and of those in it, may have a tuple `OPERATIONS`. Who serves an
operation binds a handler to it. A gate needs no handler: it reads how many sequences a body brings.
"""

import importlib
import pkgutil
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from msgspec import Struct
from starlette.requests import Request
from starlette.responses import Response

JSON, TEXT = "application/json", "text/plain"
WORK_ERRORS = (400, 404, 408, 413, 429, 500, 503)
Kinds = tuple[type[Struct], ...]
Handler = Callable[[Request], Awaitable[Response]]


class Counting(NamedTuple):
    """How a gate counts the sequences in a body.

    `prompts`: fields with a prompt or a list of them; `chat`: the field of a conversation, which is
    one prompt, or of a list of conversations. `has_n`: there may be several answers to a prompt.
    `is_stream`: what a body that does not say gets. `takes_place`: False if it brings the engine's
    batch no work.
    """

    prompts: tuple[str, ...] = ()
    chat: str = "messages"
    has_n: bool = False
    is_stream: bool = False
    takes_place: bool = True


NO_WORK = Counting(takes_place=False)


@dataclass(frozen=True, slots=True, eq=False)
class Operation:
    """A route.

    `reply`: a Struct, or a type of JSON; None: text. `bodies`: forms of the request's body, each
    all of some types. `neutral`: parameters that are accepted only at these values. `event`: of a
    stream. `answers`: statuses whose body is `reply`; `errors`: those whose body is an ErrorReply.
    `counting`: of a route that brings an engine work, or might. `accepts`: media type of `bodies`.
    """

    method: str
    path: str
    summary: str
    reply: Any = None
    media_type: str = JSON
    bodies: tuple[Kinds, ...] = ()
    neutral: Mapping[str, tuple[object, ...]] = field(default_factory=dict)
    event: type[Struct] | None = None
    answers: tuple[int, ...] = (200,)
    errors: tuple[int, ...] = ()
    example: object = None
    counting: Counting | None = None
    accepts: str = JSON

    @property
    def has_work(self) -> bool:
        """True if it brings the engine's batch work."""
        return self.counting is not None and self.counting.takes_place


class BoundOperation(NamedTuple):
    """A route and who answers it."""

    operation: Operation
    handler: Handler


def all_operations() -> list[Operation]:
    """Collect the operations of all modules of this folder."""
    package = importlib.import_module(__package__)
    names = (each.name for each in pkgutil.walk_packages(package.__path__, f"{__package__}."))
    modules = (importlib.import_module(name) for name in names)
    return [each for module in modules for each in getattr(module, "OPERATIONS", ())]
