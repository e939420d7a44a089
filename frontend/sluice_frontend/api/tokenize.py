"""The bodies of POST /tokenize and /detokenize, parsed. Pure."""

from dataclasses import dataclass

from msgspec import Struct
from sluice_core.errors import RequestError

from . import response_types
from .chat import CHAT_NEUTRAL, Conversation, ConversationFields, parse_conversation
from .generate import ModelName, refuse_unsupported
from .json_body import convert, parse_object
from .operations import NO_WORK, WORK_ERRORS, Operation
from .sampling_params import TokenId


class TokenizeFields(Struct, frozen=True, kw_only=True):
    """What both forms of POST /tokenize honour; a chat is ConversationFields beside it."""

    model: ModelName | None = None
    return_token_strs: bool | None = False


class TokenizeTextBody(TokenizeFields, frozen=True, kw_only=True):
    """The fields of POST /tokenize with a text."""

    prompt: str
    add_special_tokens: bool | None = True
    parse_special: bool | None = None


class DetokenizeBody(Struct, frozen=True, kw_only=True):
    """The fields of POST /detokenize."""

    tokens: list[TokenId]
    model: ModelName | None = None


_CHAT_FIELDS = frozenset(ConversationFields.__struct_fields__ + TokenizeFields.__struct_fields__)


@dataclass(frozen=True, slots=True)
class Tokenize:
    """A text to tokenise, or a conversation as its template writes it.

    `parse_special`: as in `Completion`.
    """

    source: str | Conversation
    model: str | None
    add_special_tokens: bool
    parse_special: bool | None
    return_token_strs: bool


def parse_tokenize(body: bytes) -> Tokenize:
    """The request in the body of POST /tokenize; raises RequestError naming the field."""
    fields = parse_object(body)
    if "messages" not in fields:
        refuse_unsupported(fields, TokenizeTextBody.__struct_fields__)
        text = convert(fields, TokenizeTextBody)
        return Tokenize(
            text.prompt,
            text.model,
            text.add_special_tokens is not False,
            text.parse_special,
            bool(text.return_token_strs),
        )
    if "prompt" in fields:
        raise RequestError("prompt and messages exclude each other", param="prompt")
    refuse_unsupported(fields, _CHAT_FIELDS, CHAT_NEUTRAL)
    chat, conversation = convert(fields, TokenizeFields), parse_conversation(fields)
    return Tokenize(conversation, chat.model, False, None, bool(chat.return_token_strs))


def parse_detokenize(body: bytes) -> DetokenizeBody:
    """The request in the body of POST /detokenize; raises RequestError naming the field."""
    return convert(parse_object(body), DetokenizeBody)


TOKENIZE = Operation(
    "POST",
    "/tokenize",
    "The token ids of a text, or of a conversation as the chat template writes it.",
    response_types.TokenizeReply,
    bodies=((TokenizeTextBody,), (ConversationFields, TokenizeFields)),
    errors=WORK_ERRORS,
    example={"prompt": "def add(a, b):"},
    counting=NO_WORK,
)
DETOKENIZE = Operation(
    "POST",
    "/detokenize",
    "The text of token ids.",
    response_types.DetokenizeReply,
    bodies=((DetokenizeBody,),),
    errors=WORK_ERRORS,
    example={"tokens": [1, 2, 3]},
    counting=NO_WORK,
)
OPERATIONS = (TOKENIZE, DETOKENIZE)
