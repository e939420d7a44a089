"""An attack as a row: its input, what is wanted, and what came. Pure but for `stage` and `came`."""

from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from msgspec import Struct
from strangers.client import Reply
from strangers.engine import Answer, Seen
from strangers.stage import MadeUp, Watched, key_file, made_up_engine, running_gate

KINDS = {
    "A": "What is checked is what is sent",
    "B": "One client never holds up the others",
    "C": "Words and numbers of others are hostile",
    "D": "Nothing of a client's contract is lost behind the gate",
}
MAX_HELD_MS = 100.0
"""Of the loop, at most, under any input (a probe of a kubelet waits for 1 s, a token for 20 ms)."""


class Came(Struct):
    """What an attack brought. `figures`: by name, of the gate's process."""

    text: str
    ok: bool
    figures: dict[str, float] = {}


@dataclass(frozen=True, slots=True)
class Attack:
    """One row. `run` gets an empty folder. `is_long`: it mostly waits, so it runs beside others."""

    name: str
    kind: str
    input: str
    wanted: str
    run: Callable[[Path], Awaitable[Came]]
    is_long: bool = False


def attack(
    kind: str, name: str, input: str, wanted: str, *, is_long: bool = False
) -> Callable[[Callable[[Path], Awaitable[Came]]], Attack]:
    """Makes an `Attack` of the function that runs it."""
    return lambda run: Attack(name, kind, input, wanted, run, is_long)


def attacks_of(modules: Iterable[ModuleType]) -> list[Attack]:
    """Those that the modules define, in their order."""
    return [
        value for module in modules for value in vars(module).values() if isinstance(value, Attack)
    ]


@dataclass(frozen=True, slots=True)
class Stage:
    """The engine, and the gate in front of it."""

    engine: MadeUp
    gate: Watched

    def reached(self) -> list[Seen]:
        """The requests at the engine that a client sent."""
        return [seen for seen in self.engine.record().requests if not seen.is_look]


@contextmanager
def stage(
    directory: Path, *flags: str, keys: Sequence[str] = (), answers: Sequence[Answer] = ()
) -> Iterator[Stage]:
    """A fresh engine with these answers, and a fresh gate with these flags."""
    directory.mkdir(parents=True, exist_ok=True)
    with made_up_engine() as engine:
        engine.answers(*answers)
        with running_gate(directory, engine, *flags, *key_file(directory, keys)) as gate:
            yield Stage(engine, gate)


def came(gate: Watched, ok: bool, text: str, **figures: float) -> Came:
    """What came, with what was seen of the gate. A gate that has ended, or has logged a traceback,
    is never right."""
    code, tracebacks = gate.exit_code(), gate.log().count("Traceback (most recent")
    if code is not None:
        text += f"; the gate ended with exit code {code}"
    if tracebacks:
        text += f"; {tracebacks} tracebacks"
    sight = gate.end_watch()
    seen = {
        "loop_worst_ms": sight.worst_ms,
        "loop_p99_ms": sight.p99_ms,
        "held_worst_ms": sight.held_worst_ms,
        "held_p99_ms": sight.held_p99_ms,
        "probes_failed": sight.num_failed,
        "most_mib": round(sight.most_mib, 1),
        "most_files": sight.most_files,
        "cpu_s": round(sight.cpu_s, 2),
    }
    return Came(text, ok and code is None and not tracebacks, seen | figures)


def statuses(replies: Sequence[Reply]) -> str:
    """`400, 200` or `400 (6 times)`; 0 is a connection that was closed without an answer."""
    counts: dict[int, int] = {}
    for reply in replies:
        counts[reply.status] = counts.get(reply.status, 0) + 1
    shown = [f"{status} ({n} times)" if n > 1 else str(status) for status, n in counts.items()]
    return ", ".join(shown) or "nothing"


def lag(gate: Watched) -> str:
    """How long the gate's loop was held, in words."""
    sight = gate.end_watch()
    return f"loop held {sight.held_worst_ms:.0f} ms, a probe waited {sight.worst_ms:.0f} ms"
