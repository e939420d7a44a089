"""*Rim*: the gate that is fuzzed: a real process, which is started again if it has ended."""

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from strangers.engine import Seen
from strangers.stage import MadeUp, Watched, made_up_engine, running_gate

CAP = 8
MAX_HELD_MS = 100.0
TRACEBACK = "Traceback (most recent"
LATE_S = 3.0
"""A number that was taken in may do its harm at the end of a tick, two seconds later."""


@dataclass(slots=True)
class Front:
    """An engine, and the gate in front of it. `judge` says what no input may bring about."""

    directory: Path
    engine: MadeUp
    flags: tuple[str, ...]
    gates: ExitStack = field(default_factory=ExitStack)
    gate: Watched | None = None
    num_read: int = 0
    num_started: int = 0
    recent: list[tuple[float, object]] = field(default_factory=list)

    def living(self) -> Watched:
        """The gate; a new one if it has ended."""
        if self.gate is None or self.gate.exit_code() is not None:
            self.gates.close()
            self.engine.answers()
            self.num_started, self.num_read = self.num_started + 1, 0
            folder = self.directory / str(self.num_started)
            cap = ("--max-num-seqs", str(CAP))
            running = running_gate(folder, self.engine, *cap, *self.flags)
            self.gate = self.gates.enter_context(running)
        return self.gate

    def judge(self, sent: object) -> None:
        """It lives, and has logged no traceback since the last look. `sent`: the input."""
        assert self.gate is not None
        now_s = time.monotonic()
        self.recent = [each for each in self.recent if each[0] > now_s - LATE_S]
        self.recent.append((now_s, sent))
        log, code = self.gate.log(), self.gate.exit_code()
        more, self.num_read = log[self.num_read :], len(log)
        why = f"{more[-1500:]}\nafter {[each for _, each in self.recent]}"
        assert code is None, f"the gate ended with exit code {code}: {why}"
        assert TRACEBACK not in more, why

    def reached(self) -> list[Seen]:
        """What came to the engine from clients since the last look."""
        seen = [each for each in self.engine.record().requests if not each.is_look]
        self.engine.forget()
        return seen

    def end(self) -> None:
        """Its cap is the one that it began with, and no input has held its loop."""
        gate = self.living()
        time.sleep(LATE_S)
        self.judge("the end")
        cap = gate.worker.metric("sluice_cap")
        assert cap == CAP, f"a stranger has set the cap to {cap:g}"
        held_ms = gate.end_watch().held_worst_ms
        assert held_ms < MAX_HELD_MS, f"the loop was held for {held_ms:.0f} ms"


@contextmanager
def front(directory: Path, *flags: str) -> Iterator[Front]:
    """A fresh engine and gate; without an error at the end, `Front.end` must hold too."""
    with made_up_engine() as engine:
        made = Front(directory, engine, flags)
        with made.gates:
            made.living()
            yield made
            made.end()
