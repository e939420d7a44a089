"""What the tokens of a tokenizer.json stand for: how much of a text one can hold. Pure."""

import json
from collections.abc import Iterator
from typing import Any

from tokenizers import Tokenizer, models, pre_tokenizers

COMPOSED = {"NFC": 4, "NFKC": 4}
"""Characters that a normaliser makes one of at most (UAX #15, the longest decompositions)."""
KEEPS_ALL = {"ByteLevel", "Digits", "Lowercase", "Metaspace", "NFD", "NFKD", "Prepend", *COMPOSED}
"""Normalisers and pre-tokenizers that leave no character of a text out."""


def longest_token(tokenizer: Tokenizer) -> int | None:
    """The most characters of a text that one token can stand for; None where a text of any length
    may become few tokens: parts of it are dropped, or joined as unknown."""
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


def _steps(component: Any) -> Iterator[dict[str, Any]]:
    """What a normaliser or pre-tokenizer is made of, sequences of sequences looked through."""
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
