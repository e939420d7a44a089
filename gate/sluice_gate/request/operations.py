"""How a request to an engine is counted, by its path. Pure."""

from collections.abc import Mapping

from sluice_frontend.api.operations import Counting, all_operations

COUNTED: Mapping[str, Counting] = {
    operation.path: operation.counting for operation in all_operations() if operation.counting
}
_UNKNOWN = Counting(
    prompts=tuple(dict.fromkeys(name for each in COUNTED.values() for name in each.prompts)),
    has_n=True,
)
READING = ("GET", "HEAD", "OPTIONS")
"""Methods that bring the engine's batch no work."""


def counting_of(path: str) -> Counting:
    """Return the counting of a path, or the one that counts all that any row counts."""
    return COUNTED.get(path, _UNKNOWN)


def takes_place(method: str, path: str) -> bool:
    """Return True if a request takes places in the engine."""
    return method not in READING and counting_of(path).takes_place
