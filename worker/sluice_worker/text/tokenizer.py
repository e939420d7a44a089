"""Text to token ids and back, one token at a time. No torch: this runs in the API process."""

import re
from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import tokenizers
from sluice_core.errors import CheckpointError
from sluice_core.model.files import MAX_JSON_BYTES, Directory, is_there, read_bytes
from tokenizers.models import BPE, WordLevel

from .added_tokens import add_tokens
from .pieces import SHORT, Check, any_number, found_in, pieces, token_ids
from .tokenizer_config import TOKENIZER, TokenizerConfig
from .vocabulary import byte_of_letter, bytes_of_spelling, longest_token

REPLACEMENT = "\ufffd"
BYTES_OF_A_CHARACTER = 4
MAX_PENDING = 16
"""Pending tokens without a whole character, more than any character has; then parts are output."""
SLACK = 4096
"""Characters before a cut text's last tokens: these equal the whole text's if no word is longer."""
_DELIMITER = re.compile("<[|\uff5c].*[|\uff5c]>")
"""The spelling of control tokens; tags such as <think> are none: users may write of them."""
_BLANK = "\ufdd0"
"""A noncharacter that is part of no control token."""


class Around(NamedTuple):
    """Tokens in front of a text and behind it; in front of a pair of texts, between them, and
    behind them. `tells_pairs`: the model is told which tokens are the second text's."""

    before: list[int]
    behind: list[int]
    before_pair: list[int]
    between: list[int]
    behind_pair: list[int]
    tells_pairs: bool


class Tokenizer:
    """A tokenizer.json, and the tokens that the files beside it add.

    Special-token strings in a user's text are text, not control tokens. `pad_id`: the token for
    padding, as tokenizer_config.json names it; 0 if it names none.
    """

    def __init__(self, directory: Path, *, is_needed: bool = True) -> None:
        """`is_needed`: False for a model that reads no texts; then it may know no token."""
        self._tokenizer = tokenizers.Tokenizer(BPE())
        if is_needed or is_there(directory, TOKENIZER):
            data = read_bytes(Directory(directory), TOKENIZER, MAX_JSON_BYTES)
            try:
                self._tokenizer = tokenizers.Tokenizer.from_buffer(data)
            except Exception as error:  # the library raises nothing narrower
                raise CheckpointError(f"{TOKENIZER}: not a tokenizer ({error}).") from error
        self._tokenizer.encode_special_tokens = True
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        _place_spaces(self._tokenizer)
        self.config = TokenizerConfig(directory)
        add_tokens(self._tokenizer, self.config)
        padding = self.config.special_tokens.get("pad_token", "")
        self.pad_id: int = self._tokenizer.token_to_id(padding) or 0
        self._letters = byte_of_letter()
        self._longest = longest_token(self._tokenizer)
        self._decoder = self._inner = self._tokenizer
        self._added = {
            token_id: added.content
            for token_id, added in self._tokenizer.get_added_tokens_decoder().items()
        }
        self._anchor = list(self._tokenizer.encode("a", add_special_tokens=False).ids)[-1:]
        # An output is decoded behind this token. Without a decoder, spaces join all tokens anyway.
        self.behind = self._anchor if self._tokenizer.decoder is not None else []
        self._texts: dict[int, str] = {}  # at most one for each token of the vocabulary

    @property
    def vocab_size(self) -> int:
        """Tokens that it knows, added ones included."""
        return int(self._tokenizer.get_vocab_size())

    @cached_property
    def control_tokens(self) -> dict[int, str]:
        """The texts of the special tokens, by id."""
        added = self._decoder.get_added_tokens_decoder()
        return {token_id: token.content for token_id, token in added.items() if token.special}

    def serve_templates(self, templates: Iterable[str]) -> list[str]:
        """The texts that these chat templates write as control tokens.

        Some checkpoints have turn delimiters that they do not mark as special. Decoding treats them
        as not special; in a user's text they stay text, as special ones do.
        """
        whole = "".join(templates)
        others = set(self._added.values()) - set(self.control_tokens.values())
        delimiters = [text for text in others if _DELIMITER.fullmatch(text) and text in whole]
        if whole:
            self._decoder = self._with_control  # made now, so that the first chat does not wait
        self._tokenizer.add_special_tokens(delimiters)
        if whole:
            self._inner = _without_first_space(self._tokenizer)
        return [*self.control_tokens.values(), *delimiters]

    def fewest(self, num_chars: int) -> int:
        """The least number of tokens of a text of `num_chars` characters; 0 if unknown."""
        return -(-num_chars // self._longest) if self._longest else 0

    def encode(
        self,
        text: str,
        *,
        add_special_tokens: bool = True,
        parse_special: bool = False,
        keep: int | None = None,
        check: Check = any_number,
    ) -> list[int]:
        """Token ids of `text`, with the tokens that the tokenizer puts around it (such as a BOS).

        `parse_special`: the texts of special tokens are control tokens. `keep`: the most tokens;
        the first tokens of the text are left out, but none put around it. Raises what `check`
        raises, which gets the number of tokens as it grows; RequestError as `pieces`.
        """
        tokenizer = self._with_control if parse_special else self._tokenizer
        if keep is not None and self._longest:
            text = text[-(keep * self._longest + SLACK) :]
        before, behind, *_ = self.around if add_special_tokens else ([], [])
        ids = token_ids(tokenizer, text, check)
        if not before and not behind:
            return ids if keep is None else ids[-keep:]
        room = len(ids) if keep is None else keep - len(before) - len(behind)
        whole = [*before, *(ids[-room:] if room > 0 else ids), *behind]
        return whole if keep is None else whole[-keep:]

    @cached_property
    def around(self) -> Around:
        """The tokens that the tokenizer puts around texts."""
        encoding = self._tokenizer.encode("a", add_special_tokens=True)
        own = [at for at, around in enumerate(encoding.special_tokens_mask) if not around]
        first, last = (own[0], own[-1] + 1) if own else (len(encoding.ids), len(encoding.ids))
        pair = self._tokenizer.encode("a", "a", add_special_tokens=True)
        one, other = ([at for at, of in enumerate(pair.sequence_ids) if of == n] for n in (0, 1))
        return Around(
            encoding.ids[:first],
            encoding.ids[last:],
            pair.ids[: one[0]] if one else [],
            pair.ids[one[-1] + 1 : other[0]] if one and other else [],
            pair.ids[other[-1] + 1 :] if other else [],
            self.config.tells_pairs and bool(other) and pair.type_ids[other[0]] == 1,
        )

    def places_in_text(
        self, text: str, *, add_special_tokens: bool, parse_special: bool
    ) -> list[int]:
        """The character of `text` at which each token of `encode` begins.

        A token put around the text begins where the one before it ends.
        """
        tokenizer = self._with_control if parse_special else self._tokenizer
        before, behind, *_ = self.around if add_special_tokens else ([], [])
        places, last, end = [0] * len(before), 0, 0
        for piece in pieces(tokenizer, text, offsets=True):
            for span in piece.spans:
                last, end = max(last, span[0]), span[1]
                places.append(last)
        return places + [max(last, end)] * len(behind)

    def decode_placed(
        self, token_ids: Sequence[int], *, skip_special_tokens: bool
    ) -> tuple[str, list[int]]:
        """The text of `token_ids` as an answer has it, and the character at which each begins."""
        output = self.detokenizer(skip_special_tokens=skip_special_tokens)
        parts, places = list[str](), list[int]()
        for token_id in token_ids:
            parts.append(output.push(token_id))
            places.append(output.place())
        text = "".join([*parts, output.flush()])
        whole = self.decode(token_ids, skip_special_tokens=skip_special_tokens)
        dropped = max(_num_first_spaces(text) - _num_first_spaces(whole), 0)
        return text[dropped:], [max(place - dropped, 0) for place in places]

    def token_text(self, token_id: int) -> str:
        """A token's text inside a longer text; an incomplete character is U+FFFD."""
        text = self._texts.get(token_id)
        if text is None:
            # Some decoders drop a text's first space, so decode it behind another token.
            before = self.decode(self._anchor, skip_special_tokens=False)
            whole = self.decode([*self._anchor, token_id], skip_special_tokens=False)
            text = self._texts[token_id] = whole[len(before) :]
        return text

    def token_bytes(self, token_id: int) -> bytes:
        """A token's own bytes, also for a part of a character, so that they join to the text's."""
        text = self.token_text(token_id)
        if REPLACEMENT not in text or token_id in self._added:
            return text.encode()
        (spelling,) = self.token_strs([token_id])
        known = bytes_of_spelling(spelling, self._letters)
        return text.encode() if known is None else known

    def added_text(self, token_id: int) -> str | None:
        """The text of an added token, such as a control token; None for all others."""
        return self._added.get(token_id)

    def encode_rendered(
        self, pieces: Iterable[tuple[str, bool]], check: Check = any_number
    ) -> list[int]:
        """Token ids of a chat template's output; nothing is put around them.

        In a piece with False the texts of special tokens are control tokens; with True they are
        text, as in `encode`. The text between two control tokens is encoded as one, whatever its
        pieces. Raises UnicodeEncodeError for a lone surrogate, and as `encode`.
        """
        pieces = list(pieces)
        whole = "".join(piece for piece, _ in pieces)
        whole.encode()
        if not any(is_plain for _, is_plain in pieces):
            return token_ids(self._with_control, whole, check)
        # The same length, so a control token has the same place here as in the whole.
        written = "".join(len(piece) * _BLANK if plain else piece for piece, plain in pieces)
        ids, end = list[int](), 0
        for scanned, start, stop in found_in(self._scanner, written):
            if (token_id := self._scanned.get(scanned)) is not None:
                ids += self._between(whole[end:start], len(ids), check)
                ids.append(token_id)
                end = stop
        return ids + self._between(whole[end:], len(ids), check)

    def _between(self, text: str, num_before: int, check: Check) -> list[int]:
        """Token ids of a text with control tokens around it, if it is not the first."""
        tokenizer = self._inner if num_before else self._tokenizer
        return token_ids(tokenizer, text, lambda num: check(num_before + num))

    @cached_property
    def _scanner(self) -> tokenizers.Tokenizer:
        """Finds added tokens as the tokenizer does, and knows no others."""
        scanner = tokenizers.Tokenizer(WordLevel({_BLANK: 0}, unk_token=_BLANK))
        scanner.normalizer = self._tokenizer.normalizer
        scanner.add_tokens([*self._tokenizer.get_added_tokens_decoder().values()])
        return scanner

    @cached_property
    def _scanned(self) -> dict[int | None, int]:
        """The control tokens by the scanner's ids."""
        added = self._tokenizer.get_added_tokens_decoder()
        return {self._scanner.token_to_id(a.content): i for i, a in added.items() if a.special}

    @cached_property
    def _with_control(self) -> tokenizers.Tokenizer:
        """A second copy: the switch belongs to the tokenizer, not to the call."""
        copy = tokenizers.Tokenizer.from_str(self._tokenizer.to_str())
        copy.encode_special_tokens = False
        return copy

    def token_strs(self, token_ids: Sequence[int]) -> list[str]:
        """Each token in the vocabulary's spelling; "" for an unknown id."""
        return [self._tokenizer.id_to_token(token_id) or "" for token_id in token_ids]

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of `token_ids`; bytes that are no UTF-8 become U+FFFD."""
        if len(token_ids) <= SHORT:
            return str(self._decoder.decode(token_ids, skip_special_tokens=skip_special_tokens))
        (text,) = self._decoder.decode_batch([token_ids], skip_special_tokens=skip_special_tokens)
        return str(text)

    def detokenizer(
        self, *, skip_special_tokens: bool = True, spaces_between_special_tokens: bool = True
    ) -> "Detokenizer":
        """A fresh incremental decoder for one output."""
        spaced = skip_special_tokens or spaces_between_special_tokens
        return Detokenizer(self, skip_special_tokens, spaced)


def _num_first_spaces(text: str) -> int:
    return len(text) - len(text.lstrip(" "))


def _place_spaces(tokenizer: tokenizers.Tokenizer) -> None:
    """Count a token's spaces as part of it in its character offsets."""
    processor: Any = tokenizer.post_processor
    if processor is not None:
        state = processor.__getstate__()
        processor.__setstate__(state.replace(b'"trim_offsets":true', b'"trim_offsets":false'))
        tokenizer.post_processor = processor


def _without_first_space(tokenizer: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    """`tokenizer`, or a copy without the space that some put before a prompt's first text. A text
    behind a control token is not the first."""
    whole = tokenizer.to_str()
    changed = whole.replace('"prepend_scheme":"first"', '"prepend_scheme":"never"')
    if changed == whole:
        return tokenizer
    copy = tokenizers.Tokenizer.from_str(changed)
    copy.encode_special_tokens = True
    return copy


class Detokenizer:
    """Text of a growing output: the pieces join to its decoding behind another token.

    So a first space is kept, which some decoders drop at the beginning of a text. A character split
    across tokens comes with the token that completes it. Each piece is the difference of two
    decodings from a common start: some decoders (a leading space, byte fallback) depend on earlier
    tokens.
    """

    def __init__(
        self, tokenizer: Tokenizer, skip_special_tokens: bool, spaces_between_special_tokens: bool
    ) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._spaced = spaces_between_special_tokens
        self._after_added = False  # the token before is an added one
        self._ids = list(tokenizer.behind)
        self._start = 0  # where both decodings begin
        self._shown = len(self._ids)  # tokens whose text was output
        self._num_given = 0  # characters that were output
        self._last = (-1, 0, "")  # the last token, the characters before it, and what it adds
        self._place = 0

    def push(self, token_id: int) -> str:
        """The text that this token completes; may be empty."""
        piece, open_text = self._push(token_id)
        if not self._spaced:
            added, follows = self._tokenizer.added_text(token_id), self._after_added
            self._after_added = added is not None
            piece = added if added is not None and follows else piece
        self._last = (token_id, self._num_given, open_text or piece)
        self._num_given += len(piece)
        return piece

    def place(self) -> int:
        """The character of the output at which the last pushed token begins.

        Call it for every token or for none; it never decreases. A part of a character stands at the
        start of the incomplete characters, and a skipped token where it would be.
        """
        token_id, start, text = self._last
        own = self._tokenizer.token_text(token_id)
        if own != REPLACEMENT and text.endswith(own):
            start += len(text) - len(own)
        self._place = max(self._place, start)
        return self._place

    def _push(self, token_id: int) -> tuple[str, str]:
        """The text that is given out, and all that is open if it ends in part of a character."""
        if self._skip and token_id in self._tokenizer.control_tokens:
            return "", ""  # kept, a row of them would end what the next word is decoded behind
        self._ids.append(token_id)
        before, text = self._before(), self._decode(len(self._ids))
        if text.endswith(REPLACEMENT) or len(text) <= len(before):
            settled = self._settled(before, text) if self._num_pending > MAX_PENDING else ""
            return settled, text[len(before) :]
        piece = self._since(before, text)
        self._start, self._shown = self._shown, len(self._ids)
        return piece, ""

    def _since(self, before: str, text: str) -> str:
        """The part of `text` behind `before`. In some decoders one wrong byte makes a whole run
        unreadable, even a part that was output. Then the rest is decoded alone."""
        if text.startswith(before) or REPLACEMENT not in text:
            return text[len(before) :]
        pending = self._ids[self._shown :]
        return self._tokenizer.decode(pending, skip_special_tokens=self._skip)

    @property
    def _num_pending(self) -> int:
        return len(self._ids) - self._shown

    def _settled(self, before: str, text: str) -> str:
        """The text of invalid bytes, however many more follow.

        Only the last character may still become whole. The text is cut before it, at a place where
        the two parts decode to the same as the whole.
        """
        for end in range(len(self._ids) - 1, len(self._ids) - 1 - BYTES_OF_A_CHARACTER, -1):
            head = self._decode(end)
            tail = self._tokenizer.decode(self._ids[end:], skip_special_tokens=self._skip)
            if head + tail == text:
                self._start = self._shown = end
                return head[len(before) :]
        return ""

    def flush(self) -> str:
        """The rest at the end: an unfinished character shows as U+FFFD."""
        piece = self._since(self._before(), self._decode(len(self._ids)))
        self._start, self._shown = len(self._ids), len(self._ids)
        return piece

    def _before(self) -> str:
        return self._decode(self._shown)

    def _decode(self, end: int) -> str:
        return self._tokenizer.decode(self._ids[self._start : end], skip_special_tokens=self._skip)
