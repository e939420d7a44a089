"""A long text in pieces, whose tokens join to those of the whole text.

The library takes about 170 bytes of memory for each byte of a text (measured with tokenizers 0.22,
byte-level BPE). So a body of 4 MiB would take 700 MiB at once.
"""

from collections.abc import Callable, Iterator
from typing import Any

import tokenizers
from sluice_core.errors import RequestError

PIECE = 1 << 15
"""Characters of a piece: 6 MiB of memory, and 23 MiB if each takes four bytes."""
OVERLAP = 1 << 10
"""Characters that a piece reads of those around it."""
MOST_BYTES = 1 << 18
"""The longest piece, where the tokens of two pieces do not agree: 45 MiB of memory."""
SHORT = 1024
"""Characters or tokens that may hold the interpreter: a batch releases it, but wakes threads."""
Check = Callable[[int], None]
"""Gets the number of tokens so far; may raise."""


def any_number(num_tokens: int) -> None:
    """Allow all."""


class Piece:
    """Tokens `first` to `end` of a part of a text that begins at its character `start`."""

    def __init__(self, encoding: Any, start: int = 0) -> None:
        self._encoding, self.start = encoding, start
        self._ids: list[int] = encoding.ids
        self.first, self.end = 0, len(self._ids)

    @property
    def ids(self) -> list[int]:
        """Its own tokens."""
        return self._ids[self.first : self.end]

    @property
    def spans(self) -> Iterator[tuple[int, int]]:
        """The first character of each of them in the text, and the one behind its last."""
        for begin, end in self._encoding.offsets[self.first : self.end]:
            yield begin + self.start, end + self.start

    def token_at(self, char: int) -> int | None:
        """The first token that holds the text's character `char`."""
        return self._encoding.char_to_token(char - self.start)  # type: ignore[no-any-return]

    def around(self, char: int) -> tuple[int, list[int], int, int] | None:
        """The token at `char`, and what two pieces must agree on to be cut there: the tokens near
        it, where they begin, and which of them it is."""
        low, high = self.token_at(char - OVERLAP // 2), self.token_at(char + OVERLAP // 2 - 1)
        at = self.token_at(char)
        if low is None or high is None or at is None:
            return None
        start = self._encoding.token_to_chars(low)[0] + self.start
        return at, self._ids[low : high + 1], start, at - low


def pieces(tokenizer: tokenizers.Tokenizer, text: str, *, offsets: bool = False) -> Iterator[Piece]:
    """The tokens of `text`, without those put around it.

    Neighbours are cut where both have the same tokens on both sides, for half of OVERLAP. Tokens
    depend on no character further away than the longest word, so the pieces join to the whole. A
    longer word makes a longer piece; RequestError if it is over MOST_BYTES.
    """
    end = PIECE
    if len(text) <= PIECE + OVERLAP:
        yield Piece(encoded(tokenizer, text, offsets=offsets))
        return
    piece = _read(tokenizer, text, 0, end)
    while end + OVERLAP < len(text):
        following = _read(tokenizer, text, end - OVERLAP, end + PIECE)
        ours, theirs = piece.around(end), following.around(end)
        if ours is not None and theirs is not None and ours[1:] == theirs[1:]:
            piece.end, following.first = ours[0], theirs[0]
            yield piece
        else:
            first, following = piece.first, _read(tokenizer, text, piece.start, end + PIECE)
            following.first = first
        piece, end = following, end + PIECE
    yield piece


def _read(tokenizer: tokenizers.Tokenizer, text: str, start: int, end: int) -> Piece:
    part = text[start : end + OVERLAP]
    if len(part) > 2 * (PIECE + OVERLAP) and len(part.encode()) > MOST_BYTES:
        raise RequestError(
            f"a word of over {MOST_BYTES - (MOST_BYTES >> 2):,} bytes cannot be tokenized here"
        )
    return Piece(encoded(tokenizer, part, offsets=True), start)


def token_ids(tokenizer: tokenizers.Tokenizer, text: str, check: Check = any_number) -> list[int]:
    """The ids of all pieces of `text`; raises what `check` raises."""
    ids: list[int] = []
    for piece in pieces(tokenizer, text):
        ids += piece.ids
        check(len(ids))
    return ids


def encoded(tokenizer: tokenizers.Tokenizer, text: str, *, offsets: bool = False) -> Any:
    """`text` encoded, with nothing around it. A long one goes as a batch: only a batch releases the
    interpreter."""
    if len(text) <= SHORT:
        return tokenizer.encode(text, add_special_tokens=False)
    encode_batch = tokenizer.encode_batch if offsets else tokenizer.encode_batch_fast
    (encoding,) = encode_batch([text], add_special_tokens=False)
    return encoding


def found_in(scanner: tokenizers.Tokenizer, written: str) -> Iterator[tuple[int, int, int]]:
    """Each token of a long text: id, first character, and the one behind it. No token that is
    longer than OVERLAP is found."""
    for begin in range(0, max(len(written), 1), PIECE):
        low = max(begin - OVERLAP, 0)
        found = encoded(scanner, written[low : begin + PIECE + OVERLAP], offsets=True)
        for token_id, (start, stop) in zip(found.ids, found.offsets, strict=True):
            if begin <= low + start < begin + PIECE:
                yield token_id, low + start, low + stop
