"""Log-probabilities as clients see them: of completions, of chats and of prompts. Pure."""

from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from ..wire import Scores

TextOf = Callable[[int], str]
"""A token id's name in a reply."""
BytesOf = Callable[[int], bytes]
"""A token id's own bytes, of which some are no whole character."""

LOWEST = -9999.0
"""Told in place of minus infinity, which JSON does not have (OpenAI's choice, and vLLM's)."""


@dataclass(frozen=True, slots=True)
class Scored:
    """One token with its log-probability and the likeliest in its place, in order.

    `logprob` None: a prompt's first token, of which nothing is known. `rank`: 1 for the likeliest.
    `offset`: characters of the choice's text before it.
    """

    token_id: int
    logprob: float | None
    rank: int
    likeliest: tuple[tuple[int, float], ...]
    offset: int


def unpack(scores: Scores, offsets: Sequence[int]) -> list[Scored]:
    """Tokens of `scores`, each with its place in the text."""
    width = scores.width
    ids, logprobs, ranks = array("i"), array("f"), array("i")
    ids.frombytes(scores.token_ids)
    logprobs.frombytes(scores.logprobs)
    ranks.frombytes(scores.ranks)
    floored = [max(value, LOWEST) for value in logprobs]
    return [
        Scored(
            token_id=ids[at],
            logprob=floored[at],
            rank=rank,
            likeliest=tuple(
                zip(ids[at + 1 : at + width], floored[at + 1 : at + width], strict=True)
            ),
            offset=offset,
        )
        for at, rank, offset in zip(range(0, len(ids), width), ranks, offsets, strict=True)
    ]


def unpack_prompt(
    parts: Iterable[Scores], token_ids: Sequence[int], text_of: TextOf
) -> list[Scored]:
    """A whole prompt's tokens; offsets count the characters of the tokens before, as vLLM does."""
    offsets, offset = [], 0
    for token_id in token_ids:
        offsets.append(offset)
        offset += len(text_of(token_id))
    told = [Scored(token_ids[0], None, 0, (), 0)]
    for part in parts:
        num = len(part.ranks) // array("i").itemsize
        told += unpack(part, offsets[len(told) : len(told) + num])
    return told


def as_token_id(token_id: int) -> str:
    """A token's name under return_tokens_as_token_ids."""
    return f"token_id:{token_id}"


def of_completion(tokens: Sequence[Scored], num: int, text_of: TextOf) -> dict[str, Any]:
    """`logprobs` of a completion's choice: the token itself and the `num` likeliest of each."""
    return {
        "text_offset": [token.offset for token in tokens],
        "token_logprobs": [token.logprob for token in tokens],
        "tokens": [text_of(token.token_id) for token in tokens],
        "top_logprobs": [_by_name(token, num, text_of) for token in tokens],
    }


def _by_name(token: Scored, num: int, text_of: TextOf) -> dict[str, float] | None:
    if token.logprob is None:
        return None
    named = {text_of(token.token_id): token.logprob}
    for token_id, logprob in token.likeliest[:num]:
        named.setdefault(text_of(token_id), logprob)  # two parts of characters may read the same
    return named


def of_chat(
    tokens: Sequence[Scored], num: int, text_of: TextOf, bytes_of: BytesOf
) -> dict[str, Any]:
    """`logprobs` of a chat's choice: each token with the `num` likeliest in its place."""

    def entry(token_id: int, logprob: float | None) -> dict[str, Any]:
        name, own = text_of(token_id), bytes_of(token_id)
        return {"token": name, "logprob": logprob, "bytes": list(own)}

    return {
        "content": [
            {
                **entry(token.token_id, token.logprob),
                "top_logprobs": [entry(*pair) for pair in token.likeliest[:num]],
            }
            for token in tokens
        ]
    }


def of_prompt(
    tokens: Sequence[Scored], num: int, text_of: TextOf
) -> list[dict[str, dict[str, Any]] | None]:
    """vLLM's `prompt_logprobs`: per token what was known of it and of the `num` likeliest."""
    return [
        None if token.logprob is None else _by_id(token, token.logprob, num, text_of)
        for token in tokens
    ]


def _by_id(token: Scored, own: float, num: int, text_of: TextOf) -> dict[str, dict[str, Any]]:
    ranked = [(token.token_id, own, token.rank)]
    ranked += [(i, logprob, at + 1) for at, (i, logprob) in enumerate(token.likeliest[:num])]
    told: dict[str, dict[str, Any]] = {}
    for token_id, logprob, rank in ranked:
        value = {"logprob": logprob, "rank": rank, "decoded_token": text_of(token_id)}
        told.setdefault(str(token_id), value)
    return told
