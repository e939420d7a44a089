"""Log-probabilities as clients see them: of completions, of chats and of prompts. Pure.

They stay packed until the reply, and become JSON token by token. As objects, the scores of one
reply would take ten times its size.
"""

from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice, repeat
from typing import Any

from msgspec import Raw, json
from sluice_core.port import Scores

TextOf = Callable[[int], str]
"""A token id's name in a reply."""
BytesOf = Callable[[int], bytes]
"""A token id's own bytes; some are only part of a character."""

_encoder = json.Encoder()
LOWEST = -9999.0
"""Stands for minus infinity, which JSON does not have (OpenAI's and vLLM's choice)."""


@dataclass(frozen=True, slots=True)
class Scored:
    """One token with its log-probability and the likeliest in its place, in order.

    `logprob` None: a prompt's first token. `rank`: 1 for the likeliest.
    `offset`: the character of the choice's text at which it begins.
    """

    token_id: int
    logprob: float | None
    rank: int
    likeliest: tuple[tuple[int, float], ...]
    offset: int


class PackedScores:
    """Scores of successive tokens, all of one width, each with its place in the text."""

    def __init__(self) -> None:
        self._width = 1
        self._ids, self._logprobs = array("i"), array("f")
        self._ranks, self._offsets = array("i"), array("i")

    def add(self, scores: Scores, offsets: Iterable[int]) -> None:
        self._width = scores.width
        self._ids.frombytes(scores.token_ids)
        self._logprobs.frombytes(scores.logprobs)
        self._ranks.frombytes(scores.ranks)
        self._offsets.extend(offsets)

    @property
    def labels(self) -> dict[int, float]:
        """The log-probabilities of one token's `label_ids`."""
        return dict(zip(self._ids, self._logprobs, strict=True))

    def tokens(self, start: int = 0) -> Iterator[Scored]:
        """From the `start`-th on."""
        width = self._width
        for i in range(start, len(self._ranks)):
            own, end = i * width, (i + 1) * width
            ids = self._ids[own:end]
            logprobs = [max(value, LOWEST) for value in self._logprobs[own:end]]
            likeliest = tuple(zip(ids[1:], logprobs[1:], strict=True))
            yield Scored(ids[0], logprobs[0], self._ranks[i], likeliest, self._offsets[i])


def prompt_tokens(
    parts: Iterable[Scores], token_ids: Sequence[int], places: Iterable[int]
) -> Iterator[Scored]:
    """A whole prompt's tokens. `places`: the offset of each; empty if not requested."""
    offsets = chain(places, repeat(0))
    yield Scored(token_ids[0], None, 0, (), next(offsets))
    for part in parts:
        scores = PackedScores()
        scores.add(part, islice(offsets, len(part.ranks) // array("i").itemsize))
        yield from scores.tokens()


def as_token_id(token_id: int) -> str:
    """A token's name under return_tokens_as_token_ids."""
    return f"token_id:{token_id}"


def of_completion(tokens: Iterable[Scored], num: int, text_of: TextOf) -> dict[str, Any]:
    """`logprobs` of a completion's choice: the token itself and the `num` likeliest of each."""
    offsets, logprobs, names = array("i"), list[float | None](), list[str]()

    def likeliest() -> Iterator[dict[str, float] | None]:
        for token in tokens:
            offsets.append(token.offset)
            logprobs.append(token.logprob)
            names.append(text_of(token.token_id))
            yield _by_name(token, num, text_of)

    top_logprobs = _array(likeliest())
    return {
        "text_offset": _array(offsets),
        "token_logprobs": logprobs,
        "tokens": names,
        "top_logprobs": top_logprobs,
    }


def _by_name(token: Scored, num: int, text_of: TextOf) -> dict[str, float] | None:
    if token.logprob is None:
        return None
    named = {text_of(token.token_id): token.logprob}
    for token_id, logprob in token.likeliest[:num]:
        named.setdefault(text_of(token_id), logprob)  # two parts of characters may read the same
    return named


def of_chat(
    tokens: Iterable[Scored], num: int, text_of: TextOf, bytes_of: BytesOf
) -> dict[str, Any]:
    """`logprobs` of a chat's choice: each token with the `num` likeliest in its place."""

    def entry(token_id: int, logprob: float | None) -> dict[str, Any]:
        name, own = text_of(token_id), bytes_of(token_id)
        return {"token": name, "logprob": logprob, "bytes": list(own)}

    content = (
        {
            **entry(token.token_id, token.logprob),
            "top_logprobs": [entry(*pair) for pair in token.likeliest[:num]],
        }
        for token in tokens
    )
    return {"content": _array(content)}


def of_prompt(tokens: Iterable[Scored], num: int, text_of: TextOf) -> Raw:
    """vLLM's `prompt_logprobs`: each token with the `num` likeliest in its place."""
    return _array(
        None if token.logprob is None else _by_id(token, token.logprob, num, text_of)
        for token in tokens
    )


def _by_id(token: Scored, own: float, num: int, text_of: TextOf) -> dict[str, dict[str, Any]]:
    ranked = [(token.token_id, own, token.rank)]
    ranked += [(i, logprob, at + 1) for at, (i, logprob) in enumerate(token.likeliest[:num])]
    told: dict[str, dict[str, Any]] = {}
    for token_id, logprob, rank in ranked:
        value = {"logprob": logprob, "rank": rank, "decoded_token": text_of(token_id)}
        told.setdefault(str(token_id), value)
    return told


def _array(items: Iterable[object]) -> Raw:
    """A JSON array of `items`, which are made one after the other."""
    written = bytearray(b"[")
    for item in items:
        _encoder.encode_into(item, written, -1)
        written += b","
    written[max(len(written) - 1, 1) :] = b"]"  # in the place of the last comma
    return Raw(written)
