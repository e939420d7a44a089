"""Bodies to what is left to tokenise. Pure: a large body is read in another process (`beside`)."""

from array import array
from collections.abc import Sequence
from dataclasses import replace

from sluice_core.errors import RequestError
from sluice_frontend.api.chat import Conversation, parse_chat
from sluice_frontend.api.decisions import Decisions, parse_decisions
from sluice_frontend.api.generate import Completion
from sluice_frontend.api.sampling_params import Defaults
from sluice_frontend.api.tokenize import Tokenize, parse_detokenize, parse_tokenize

from ..text.renderer import Templates
from ..text.template import Pieces

MOST_TIMES, LEAST_CHARS = 4, 1 << 18
"""A template may write this many times a body's bytes, or so many characters: it repeats texts, and
prints tools with indentation."""

MOST_DECIDED_CHARS = 1 << 24
"""Characters of all prompts of one request: each question is tokenised with the whole input."""


def read_chat(body: bytes, defaults: Defaults, templates: Templates) -> tuple[Completion, Pieces]:
    """The chat in the body of POST /v1/chat/completions, and its prompt's text."""
    chat = parse_chat(body, defaults)
    return chat.completion, _rendered(chat.conversation, templates, len(body))


def read_decisions(body: bytes, templates: Templates) -> tuple[Decisions, list[Pieces]]:
    """The questions in the body of POST /v1/decisions, without their conversations, and the text
    of each prompt."""
    asked = parse_decisions(body)
    prompts, num = list[Pieces](), 0
    for conversation in asked.conversations:
        prompts.append(_rendered(conversation, templates, len(body)))
        num += num_chars(prompts[-1])
        if num > MOST_DECIDED_CHARS:
            raise RequestError(
                f"the input, repeated for each question, has over {MOST_DECIDED_CHARS:,} "
                "characters; ask fewer questions at once",
                param="questions",
            )
    return replace(asked, conversations=()), prompts


def read_tokenize(body: bytes, templates: Templates) -> tuple[Tokenize, str | Pieces]:
    """The request in the body of POST /tokenize, without its source, and its text."""
    asked = parse_tokenize(body)
    if isinstance(asked.source, str):
        return asked, asked.source
    return replace(asked, source=""), _rendered(asked.source, templates, len(body))


def read_detokenize(body: bytes) -> tuple[str | None, Sequence[int]]:
    """The model and the token ids in the body of POST /detokenize."""
    asked = parse_detokenize(body)
    return asked.model, array("i", asked.tokens)


def _rendered(conversation: Conversation, templates: Templates, num_bytes: int) -> Pieces:
    pieces = templates.render(conversation)
    num, most = num_chars(pieces), MOST_TIMES * num_bytes + LEAST_CHARS
    if num > most:
        raise RequestError(
            f"messages: the chat template makes {num} characters of a body of {num_bytes} "
            f"bytes, over the limit of {most}",
            param="messages",
        )
    return pieces


def num_chars(pieces: Pieces) -> int:
    """Characters of a prompt that a template has written."""
    return sum(len(piece) for piece, _ in pieces)
