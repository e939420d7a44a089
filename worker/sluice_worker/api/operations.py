"""Requests and answers of the API port's routes: the table behind the OpenAPI document. Pure."""

from sluice_frontend.openai import response_types
from sluice_frontend.openai.chat import CHAT_NEUTRAL, ChatFields, ConversationFields
from sluice_frontend.openai.protocol import NEUTRAL, CompletionBody, GenerateBody, InputsBody
from sluice_frontend.openai.tokenize import DetokenizeBody, TokenizeFields, TokenizeTextBody

from .openapi import JSON, WORK_ERRORS, Operation

_MESSAGES = [{"role": "user", "content": "def add(a, b):"}]
_INPUTS = {"inputs": "def add(a, b):", "parameters": {"max_new_tokens": 8}}
_TEXT = "text/plain"

OPERATIONS = (
    Operation(
        "post",
        "/v1/completions",
        "Text that follows a prompt.",
        response_types.CompletionReply,
        bodies=((CompletionBody,),),
        neutral=NEUTRAL,
        event=response_types.CompletionChunk,
        errors=WORK_ERRORS,
        example={"prompt": "def add(a, b):", "max_tokens": 8},
    ),
    Operation(
        "post",
        "/v1/chat/completions",
        "The next message of a conversation.",
        response_types.ChatReply,
        bodies=((ConversationFields, ChatFields),),
        neutral=CHAT_NEUTRAL,
        event=response_types.ChatChunk,
        errors=WORK_ERRORS,
        example={"messages": _MESSAGES, "max_completion_tokens": 8},
    ),
    Operation(
        "post",
        "/generate",
        "Text that follows one prompt; greedy if nothing else is asked for.",
        response_types.GenerateReply,
        bodies=((GenerateBody,), (InputsBody,)),
        neutral=NEUTRAL,
        event=response_types.GenerateChunk,
        errors=WORK_ERRORS,
        example=_INPUTS,
    ),
    Operation(
        "post",
        "/generate_stream",
        "As /generate, streamed.",
        None,
        bodies=((GenerateBody,), (InputsBody,)),
        neutral=NEUTRAL,
        event=response_types.GenerateChunk,
        errors=WORK_ERRORS,
        example=_INPUTS,
    ),
    Operation(
        "post",
        "/tokenize",
        "The token ids of a text, or of a conversation as the chat template writes it.",
        response_types.TokenizeReply,
        bodies=((TokenizeTextBody,), (ConversationFields, TokenizeFields)),
        errors=WORK_ERRORS,
        example={"prompt": "def add(a, b):"},
    ),
    Operation(
        "post",
        "/detokenize",
        "The text of token ids.",
        response_types.DetokenizeReply,
        bodies=((DetokenizeBody,),),
        errors=WORK_ERRORS,
        example={"tokens": [1, 2, 3]},
    ),
    Operation("get", "/v1/models", "The one model that is served.", response_types.ModelList),
    Operation(
        "get", "/v1/models/{model}", "The same by name.", response_types.ModelCard, errors=(404,)
    ),
    Operation("get", "/load", "How many sequences are open.", response_types.Load),
    Operation("get", "/version", "Sluice's version.", response_types.Version),
    Operation("get", "/health", "Is the engine up?", response_types.Health, answers=(200, 503)),
    Operation(
        "get", "/healthz", "Would a restart help?", response_types.Health, answers=(200, 503)
    ),
    Operation("get", "/readyz", "Is new work taken?", response_types.Readiness, answers=(200, 503)),
    Operation("get", "/metrics", "Prometheus metrics.", None, media_type=_TEXT),
    Operation("get", "/openapi.json", "This document.", None, media_type=JSON),
)

GENERATING_PATHS = tuple(found.path for found in OPERATIONS if found.event)
"""Routes that bring work for the engine."""
