"""Tokens that the files beside a tokenizer.json add, and tokens put around a text (BOS, EOS)."""

import json
from typing import Any

from sluice_core.errors import CheckpointError
from tokenizers import AddedToken, Tokenizer
from tokenizers.processors import TemplateProcessing

from .tokenizer_config import Token, TokenizerConfig

_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")


def add_tokens(tokenizer: Tokenizer, config: TokenizerConfig) -> None:
    """Add to `tokenizer` the tokens of the checkpoint's other files. Raises CheckpointError."""
    _add_listed(tokenizer, config)
    _add_special(tokenizer, config)
    _put_around(tokenizer, config)


def _known(tokenizer: Tokenizer) -> dict[str, AddedToken]:
    """Copies of the added tokens, by their texts."""
    added = tokenizer.get_added_tokens_decoder().values()
    return {token.content: token for token in added}


def _add_listed(tokenizer: Tokenizer, config: TokenizerConfig) -> None:
    """Add tokens, and flags of tokens, that only the files beside tokenizer.json hold."""
    own, listed = tokenizer.get_added_tokens_decoder(), config.added_tokens
    if not config.lists_tokens:  # an older file, in place of which tokenizer.json counts
        listed = {token_id: token for token_id, token in listed.items() if token_id not in own}
    tokens = [_added(token) for token in listed.values()]
    tokens += [] if config.lists_tokens else own.values()
    known, named = _known(tokenizer), set(config.special_tokens.values())
    new = {i: t for i, t in listed.items() if tokenizer.token_to_id(t["content"]) is None}
    for token in tokens:  # what the library once took for special stays so
        was_special = token.content in known and known[token.content].special
        token.special = token.special or was_special or token.content in named
    # Adding thousands of existing tokens again would take a while.
    tokenizer.add_tokens([token for token in tokens if token != known.get(token.content)])
    for token_id, entry in new.items():
        _check_id(tokenizer, entry["content"], token_id, config.list_file)


def _check_id(tokenizer: Tokenizer, text: str, token_id: int, file: str) -> None:
    """Refuse a newly added token whose id differs from its listed id."""
    found = tokenizer.token_to_id(text)
    if text and found != token_id:
        raise CheckpointError(
            f"{file}: {text[:64]!r} is listed as token {token_id}, which tokenizer.json lacks; "
            f"the next that is free is {found}."
        )


def _add_special(tokenizer: Tokenizer, config: TokenizerConfig) -> None:
    """Add special tokens of the vocabulary that only those files name. The model may have no row
    for others, to which transformers gives ids too."""
    known = _known(tokenizer)
    named = [*config.named_special.values(), *config.extra_special]
    tokens = [_added({**token, "special": True}) for token in named]
    new = [token for token in tokens if token.content not in known]
    tokenizer.add_special_tokens(
        [token for token in new if tokenizer.token_to_id(token.content) is not None]
    )


def _put_around(tokenizer: Tokenizer, config: TokenizerConfig) -> None:
    """Put BOS and EOS around texts as tokenizer_config.json says, if tokenizer.json does not.

    transformers 5 no longer reads those fields; without them such a checkpoint loses its BOS.
    """
    if config.put_around is None or _tells_around(tokenizer.post_processor):
        return
    before, behind = config.put_around
    ids = {text: tokenizer.token_to_id(text) for text in (before, behind) if text}
    known = {text: token_id for text, token_id in ids.items() if token_id is not None}
    single = [part for part in (before, "$A", behind) if part == "$A" or part in known]
    tokenizer.post_processor = TemplateProcessing(single=single, special_tokens=[*known.items()])


def _added(token: Token) -> AddedToken:
    flags = {name: token[name] for name in _FLAGS if isinstance(token.get(name), bool)}
    try:
        return AddedToken(token["content"], **flags)
    except UnicodeEncodeError as error:
        raise CheckpointError("tokenizer_config.json: a token has a lone surrogate.") from error


def _tells_around(processor: Any) -> bool:
    """True if a post-processor puts anything around a text; one for bytes alone does not."""
    steps = [] if processor is None else [json.loads(processor.__getstate__())]
    for step in steps:
        steps += step.get("processors", ())
    return not {step["type"] for step in steps} <= {"Sequence", "ByteLevel"}
