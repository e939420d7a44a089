"""What the engine has done of its work, and what it owes. Progress is what the engine sends."""

import math
from collections.abc import Callable, Iterable

from ..engine.patience import Owed, Patience
from .flight import Flight


class Progress:
    """The pieces of answers that came. `flights`: the open ones; `window`: most tokens of a prompt,
    infinite where the engine does not tell them."""

    def __init__(self, flights: Callable[[], Iterable[Flight]]) -> None:
        self.window = math.inf
        self._flights, self._patience = flights, Patience()
        self._num_pieces = 0
        self._piece_s = -math.inf

    def stepped(self, now_s: float) -> None:
        """Count a part of the work as done."""
        self._num_pieces += 1
        self._piece_s = now_s

    def heard(self, flight: Flight, data: bytes, now_s: float) -> None:
        """Take note of a piece of an answer, which goes to its client now: `is_held_up` is true
        until the client has read. A comment (llama.cpp's pings) comes from a timer, also while the
        engine hangs."""
        flight.is_held_up = True
        if data.startswith(b":"):
            return
        if not flight.has_answered:
            began_s = flight.admitted_s or now_s
            self._patience.learn(now_s - max(began_s, self._piece_s), self._unanswered())
            flight.has_answered = True
        self.stepped(now_s)

    def owed(self, *, is_counted: bool) -> Owed:
        """What the engine owes now. Answers in one piece show no progress, unless the engine's own
        counter does (`is_counted`)."""
        is_due = any(
            flight.admitted_s is not None
            and not flight.is_held_up
            and (is_counted or flight.work.is_stream)
            for flight in self._flights()
        )
        return Owed(self._num_pieces, is_due, self._patience.allowance_s(self._unanswered()))

    def _unanswered(self) -> list[int]:
        """Tokens of the prompts that the engine may be computing: estimated, so at most a whole
        window each."""
        return [
            int(min(tokens, self.window))
            for flight in self._flights()
            if flight.admitted_s is not None and not flight.has_answered
            for tokens in flight.work.prompts
        ]
