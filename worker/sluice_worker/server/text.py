"""From token ids to the text that a client sees: stop strings, and what is held back for them."""

from collections.abc import Sequence
from typing import Protocol


class Detokenizer(Protocol):
    """Incremental text of one sequence: whole characters only, special tokens left out."""

    def push(self, token_id: int) -> str:
        """The text that `token_id` adds; empty while a character is incomplete."""

    def flush(self) -> str:
        """What is left at the end; an incomplete character becomes U+FFFD."""


class StopFinder:
    """Finds the first of `stops` in a text that comes in pieces.

    A piece's end that may be the beginning of a stop string is held back, so that no part of a stop
    string is ever sent; with `include` it is text like any other, and ends it.
    """

    def __init__(self, stops: Sequence[str], *, include: bool = False) -> None:
        self._stops = tuple(stops)
        self._include = include
        self._longest = max((len(stop) for stop in stops), default=0)
        self._held = ""
        self._seen = ""  # sent already, but a stop string may begin in it

    def push(self, piece: str) -> tuple[str, str | None]:
        """The text that may be sent, and the stop string that ends it, if one was found."""
        if not self._stops:
            return piece, None
        text = self._seen + self._held + piece
        hits = [(at, stop) for stop in self._stops if (at := text.find(stop)) >= 0]
        num_sent = len(self._seen)
        if hits:
            at, stop = min(hits, key=lambda hit: hit[0])
            self._held = self._seen = ""
            return text[num_sent : at + len(stop) if self._include else at], stop
        if self._include:
            self._seen = text[max(len(text) - self._longest + 1, 0) :]
            return piece, None
        num_held = self._num_open_ended(text)
        self._held = text[len(text) - num_held :]
        return text[: len(text) - num_held], None

    def flush(self) -> str:
        """What was held back; a stop string that begins in it or before counts no more."""
        held, self._held, self._seen = self._held, "", ""
        return held

    def _num_open_ended(self, text: str) -> int:
        """Length of the longest end of `text` that begins a stop string."""
        for length in range(min(len(text), self._longest - 1), 0, -1):
            end = text[-length:]
            if any(stop.startswith(end) for stop in self._stops):
                return length
        return 0


class Transcript:
    """The text of one sequence as its tokens arrive."""

    def __init__(
        self,
        detokenizer: Detokenizer,
        *,
        stops: Sequence[str],
        stop_token_ids: frozenset[int],
        min_tokens: int,
        include_stop: bool = False,
    ) -> None:
        self.token_ids: list[int] = []
        self.stop_reason: str | int | None = None
        self.num_chars = 0
        """Characters of all tokens so far, sent or held back."""
        self._detokenizer = detokenizer
        self._finder = StopFinder(stops, include=include_stop)
        self._stop_token_ids = stop_token_ids
        self._min_tokens = min_tokens
        self._include_stop = include_stop

    def push(self, token_id: int, *, is_last: bool, by_token: bool) -> str:
        """The text to send for this token. `by_token`: the engine stopped because of it.

        After a stop string was found `stop_reason` is set and nothing more should be pushed.
        """
        self.token_ids.append(token_id)
        if by_token and token_id in self._stop_token_ids:
            self.stop_reason = token_id
        if by_token and not self._include_stop:  # it is counted, but is no text (as in vLLM)
            return (
                self._finder.push(self._text(self._detokenizer.flush()))[0] + self._finder.flush()
            )
        piece = self._text(self._detokenizer.push(token_id))
        if is_last:
            piece += self._text(self._detokenizer.flush())
        if len(self.token_ids) <= self._min_tokens and not is_last:
            return self._finder.flush() + piece
        text, stop = self._finder.push(piece)
        if stop is not None:
            self.stop_reason = stop
            return text
        return text + self._finder.flush() if is_last else text

    def _text(self, piece: str) -> str:
        self.num_chars += len(piece)
        return piece
