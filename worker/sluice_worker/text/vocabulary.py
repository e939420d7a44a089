"""The bytes of a tokenizer.json's tokens, and the longest text of one token. Pure."""

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from tokenizers import Tokenizer, models, pre_tokenizers

_BYTE = re.compile("<0x([0-9A-F]{2})>")
COMPOSED = {"NFC": 4, "NFKC": 4}
"""Most characters that a normaliser composes to one (UAX #15, the longest decompositions)."""
KEEPS_ALL = {"ByteLevel", "Digits", "Lowercase", "Metaspace", "NFD", "NFKD", "Prepend", *COMPOSED}
"""Normalisers and pre-tokenizers that drop no character of a text."""


def longest_token(tokenizer: Tokenizer) -> int | None:
    """The most characters of a text that one token can stand for. None if a text of any length may
    become few tokens, because parts are dropped or joined as unknown."""
    steps = [*_steps(tokenizer.normalizer), *_steps(tokenizer.pre_tokenizer)]
    if not all(map(_keeps_all, steps)) or not isinstance(tokenizer.model, models.BPE):
        return None
    added = tokenizer.get_added_tokens_decoder().values()
    if any(token.lstrip or token.rstrip for token in added):  # they take spaces with them
        return None
    vocabulary = tokenizer.get_vocab()
    letters = [f"<0x{byte:02X}>" for byte in range(256)] if tokenizer.model.byte_fallback else None
    if any(step["type"] == "ByteLevel" for step in steps):
        letters = pre_tokenizers.ByteLevel.alphabet()
    if letters is None or not vocabulary.keys() >= set(letters):
        return None
    return max(map(len, vocabulary)) * max((COMPOSED.get(s["type"], 1) for s in steps), default=1)


def byte_of_letter() -> dict[str, int]:
    """The bytes of byte-level BPE's letters. Printable letters stand for their own byte, those from
    U+0100 on for the other bytes in order (GPT-2's `bytes_to_unicode`)."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    own = {letter: ord(letter) for letter in letters if ord(letter) < 256}
    others = sorted({*range(256)} - {*own.values()})
    return own | dict(zip(letters[len(own) :], others, strict=True))


def bytes_of_spelling(spelling: str, letters: Mapping[str, int]) -> bytes | None:
    """The bytes of a spelling of the vocabulary, of parts of characters too; None if invalid."""
    if found := _BYTE.fullmatch(spelling):
        return bytes.fromhex(found[1])
    known = [letters[letter] for letter in spelling if letter in letters]
    return bytes(known) if len(known) == len(spelling) else None


def _steps(component: Any) -> Iterator[dict[str, Any]]:
    """The steps of a normaliser or pre-tokenizer, with nested sequences flattened."""
    waiting = [] if component is None else [json.loads(component.__getstate__())]
    for step in waiting:
        inner = step.get("normalizers", step.get("pretokenizers"))
        if inner is None:
            yield step
        else:
            waiting += inner


def _keeps_all(step: dict[str, Any]) -> bool:
    match step:
        case {"type": "Replace", "pattern": {"String": str(old)}, "content": str(new)}:
            return len(new) >= len(old)
        case {"type": "Split", "behavior": behavior}:
            return bool(behavior != "Removed")
    return step["type"] in KEEPS_ALL
