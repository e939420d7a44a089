"""Text to token ids and back, one token at a time. No torch: this runs in the API process."""

from collections.abc import Sequence
from pathlib import Path

import tokenizers

from .errors import CheckpointError
from .files import inside

REPLACEMENT = "\ufffd"


class Tokenizer:
    """A tokenizer.json. Special-token strings in a user's text are text, never control tokens."""

    def __init__(self, directory: Path) -> None:
        path = inside(directory, "tokenizer.json")
        try:
            self._tokenizer = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises nothing narrower
            raise CheckpointError("tokenizer.json: not a tokenizer.") from error
        self._tokenizer.encode_special_tokens = True
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()

    @property
    def vocab_size(self) -> int:
        """Tokens that it knows, added ones included."""
        return int(self._tokenizer.get_vocab_size())

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`, with what the tokenizer puts around a text (such as a BOS)."""
        return list(self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of `token_ids`; bytes that are no UTF-8 become U+FFFD."""
        return str(self._tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens))

    def detokenizer(self, *, skip_special_tokens: bool = True) -> "Detokenizer":
        """A fresh incremental decoder for one output."""
        return Detokenizer(self, skip_special_tokens)


class Detokenizer:
    """Text of a growing output: the pieces join to what decoding it whole gives.

    A character split across tokens comes with the token that completes it. Each piece is the
    difference of two decodings from a common start, as some decoders (a leading space, byte
    fallback) depend on what came before.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._ids: list[int] = []
        self._start = 0  # where both decodings begin
        self._shown = 0  # tokens whose text was given out

    def push(self, token_id: int) -> str:
        """The text that this token completes; may be empty."""
        self._ids.append(token_id)
        before, text = self._before(), self._decode(len(self._ids))
        if text.endswith(REPLACEMENT) or len(text) <= len(before):
            return ""
        self._start, self._shown = self._shown, len(self._ids)
        return text[len(before) :]

    def flush(self) -> str:
        """What is left at the end: an unfinished character shows as U+FFFD."""
        before, text = self._before(), self._decode(len(self._ids))
        self._start, self._shown = len(self._ids), len(self._ids)
        return text[len(before) :]

    def _before(self) -> str:
        return self._decode(self._shown)

    def _decode(self, end: int) -> str:
        return self._tokenizer.decode(self._ids[self._start : end], skip_special_tokens=self._skip)
