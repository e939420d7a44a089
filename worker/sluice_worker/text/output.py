"""From token ids to the text that a client sees: stop strings, and text held back for them."""

from bisect import bisect_right
from collections.abc import Sequence
from typing import Protocol


class TextDecoder(Protocol):
    """Incremental text of one sequence: whole characters only, special tokens left out."""

    def push(self, token_id: int) -> str:
        """The text that `token_id` adds; empty while a character is incomplete."""

    def place(self) -> int:
        """The character of the text at which the last token begins."""

    def flush(self) -> str:
        """The rest of the text at the end; an incomplete character becomes U+FFFD."""


class StopStrings:
    """The stop strings of one request, shared by its answers.

    Whatever their number, a character costs two lookups, and more only where one begins or ends.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._order = {stop: at for at, stop in reversed([*enumerate(stops)])}
        self._sorted = sorted(self._order)
        self._firsts = {stop[0] for stop in self._order}
        self.longest = max(map(len, stops), default=0)
        lengths: dict[str, set[int]] = {}
        for stop in self._order:
            lengths.setdefault(stop[-1], set()).add(len(stop))
        self._lengths = {end: sorted(each) for end, each in lengths.items()}

    def __bool__(self) -> bool:
        return bool(self._order)

    def find(self, text: str, num_new: int) -> tuple[int, str] | None:
        """Start and text of the stop string that ends first in the last `num_new` characters. If
        several end together, the first named one wins (as in vLLM)."""
        for end in range(len(text) - num_new + 1, len(text) + 1):
            if (lengths := self._lengths.get(text[end - 1])) is None:
                continue
            parts = (text[max(end - length, 0) : end] for length in lengths)
            if hits := [part for part in parts if part in self._order]:
                stop = min(hits, key=self._order.__getitem__)
                return end - len(stop), stop
        return None

    def num_open_ended(self, text: str) -> int:
        """Length of the longest end of `text` that is a proper beginning of a stop string."""
        for length in range(min(len(text), self.longest - 1), 0, -1):
            if text[-length] not in self._firsts:
                continue
            end = text[-length:]
            behind = bisect_right(self._sorted, end)
            if behind < len(self._sorted) and self._sorted[behind].startswith(end):
                return length
        return 0


class StopFinder:
    """Finds the first complete stop string in a text that comes in pieces.

    The end of a piece is held back if it may begin a stop string, so no part of one is ever sent.
    With `include` the stop string is sent too, as the end of the text.
    """

    def __init__(self, stops: StopStrings, *, include: bool = False) -> None:
        self._stops = stops
        self._include = include
        self._held = ""
        self._seen = ""  # sent already, but a stop string may begin in it

    def push(self, piece: str, *, may_end: bool = True) -> tuple[str, str | None]:
        """The text that may be sent, and the stop string that ends it, if one was found.

        Only stop strings that end in `piece` count: earlier ones were found, or ended in a piece
        with `may_end` False. A stop string may begin in such a piece but not end in it.
        """
        if not self._stops:
            return piece, None
        text = self._seen + self._held + piece
        hit = self._stops.find(text, len(piece)) if may_end else None
        num_sent = len(self._seen)
        if hit is not None:
            at, stop = hit
            self._held = self._seen = ""
            return text[num_sent : at + len(stop) if self._include else at], stop
        if self._include:
            self._seen = text[max(len(text) - self._stops.longest + 1, 0) :]
            return piece, None
        num_held = self._stops.num_open_ended(text)
        self._held = text[len(text) - num_held :]
        return text[: len(text) - num_held], None

    def flush(self) -> str:
        """The held back text, at the end of the output."""
        held, self._held, self._seen = self._held, "", ""
        return held


class OutputText:
    """The text of one sequence as its tokens arrive."""

    def __init__(
        self,
        detokenizer: TextDecoder,
        *,
        stops: StopStrings,
        stop_token_ids: frozenset[int],
        min_tokens: int,
        include_stop: bool = False,
    ) -> None:
        self.token_ids: list[int] = []
        self.stop_reason: str | int | None = None
        self._num_chars = 0  # of all tokens so far, sent or held back
        self._is_text = True  # the last token
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
        # A stop token is counted only (as in vLLM).
        self._is_text = self._include_stop or not by_token
        piece = self._detokenizer.push(token_id) if self._is_text else ""
        if is_last:
            piece += self._detokenizer.flush()
        self._num_chars += len(piece)
        may_end = self._is_text and len(self.token_ids) > self._min_tokens
        text, stop = self._finder.push(piece, may_end=may_end)
        if stop is not None:
            self.stop_reason = stop
        elif is_last:
            text += self._finder.flush()
        return text

    def place(self) -> int:
        """The character at which the last token begins, in the text before stop strings cut it.

        So a token that is cut off lies behind the end. Call it for every token or for none.
        """
        return self._detokenizer.place() if self._is_text else self._num_chars
