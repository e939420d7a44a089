"""Types of answers, which are encoded and shown in the OpenAPI document.

OpenAI's shapes with vLLM's additions. A field that is UNSET is left out: the request did not ask
for it.
"""

from typing import Literal

from msgspec import UNSET, Struct, UnsetType

FinishReason = Literal["stop", "length"]


class CachedTokens(Struct, frozen=True):
    """Prompt tokens that the prefix cache gave."""

    cached_tokens: int


class Usage(Struct, frozen=True):
    """Token counts of a whole request."""

    prompt_tokens: int
    total_tokens: int
    completion_tokens: int
    prompt_tokens_details: CachedTokens


class ErrorInfo(Struct, frozen=True):
    """`type` and `code` as vLLM has them; `reason` is a stable word for programs."""

    message: str
    type: str
    param: str | None
    code: int
    reason: str


class ErrorReply(Struct, frozen=True):
    """The body of every answer that is not 2xx."""

    error: ErrorInfo


class CompletionLogprobs(Struct, frozen=True):
    """Of a completion: one entry per token in each list."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class TokenLogprob(Struct, frozen=True):
    """One token and its log-probability; `bytes` are its text's in UTF-8."""

    token: str
    logprob: float
    bytes: list[int]


class ChatLogprob(TokenLogprob, frozen=True):
    """The token of one place, and the likeliest there."""

    top_logprobs: list[TokenLogprob]


class ChatLogprobs(Struct, frozen=True):
    """Of a message: one entry per token."""

    content: list[ChatLogprob]


class PromptLogprob(Struct, frozen=True):
    """A token of the prompt, or one that was likely in its place; rank 1 is the likeliest."""

    logprob: float
    rank: int
    decoded_token: str


PromptLogprobs = list[dict[str, PromptLogprob] | None]
"""For each token of a prompt: scores by token id; None for the first."""


class ChoiceChunk(Struct, frozen=True, kw_only=True):
    """What one event adds to one answer."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: FinishReason | None
    stop_reason: str | int | None
    token_ids: list[int] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET


class Choice(ChoiceChunk, frozen=True, kw_only=True):
    """One answer to one prompt."""

    finish_reason: FinishReason
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET


class CompletionReply(Struct, frozen=True):
    """The answer of POST /v1/completions."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[Choice]
    usage: Usage


class CompletionChunk(Struct, frozen=True):
    """One event of a streamed completion; the one with the usage has no choices."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[ChoiceChunk]
    usage: Usage | UnsetType = UNSET


class ReplyMessage(Struct, frozen=True):
    """What the model said. Tool calls are not parsed: they are in the content, as it wrote them."""

    content: str
    role: Literal["assistant"] = "assistant"
    refusal: None = None


class ChatChoice(Struct, frozen=True, kw_only=True):
    """One answer to a conversation."""

    index: int
    message: ReplyMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: FinishReason
    stop_reason: str | int | None
    token_ids: list[int] | UnsetType = UNSET


class ChatReply(Struct, frozen=True):
    """The answer of POST /v1/chat/completions."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET


class Delta(Struct, frozen=True):
    """What one event adds to the message; the first event has the role."""

    content: str
    role: Literal["assistant"] | UnsetType = UNSET


class ChatChoiceChunk(Struct, frozen=True, kw_only=True):
    """What one event adds to one answer."""

    index: int
    delta: Delta
    logprobs: ChatLogprobs | None = None
    finish_reason: FinishReason | None
    stop_reason: str | int | None
    token_ids: list[int] | UnsetType = UNSET


class ChatChunk(Struct, frozen=True):
    """One event of a streamed chat; the one with the usage has no choices."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChatChoiceChunk]
    prompt_token_ids: list[int] | UnsetType = UNSET
    usage: Usage | UnsetType = UNSET


class GeneratedToken(Struct, frozen=True):
    """One token as text-generation-inference tells it; `logprob` only with `details`."""

    id: int
    text: str
    logprob: float | None
    special: bool


TgiReason = Literal["length", "eos_token", "stop_sequence"]


class GenerateDetails(Struct, frozen=True):
    """How a generation ended, in the words of text-generation-inference.

    Of an answer in one piece also its tokens; `prefill` stays empty (decoder_input_details).
    """

    finish_reason: TgiReason
    generated_tokens: int
    seed: int | None
    input_length: int
    prefill: list[None] | UnsetType = UNSET
    tokens: list[GeneratedToken] | UnsetType = UNSET


class GenerateReply(Struct, frozen=True):
    """The answer of POST /generate."""

    id: str
    model: str
    generated_text: str
    finish_reason: FinishReason
    stop_reason: str | int | None
    usage: Usage
    token_ids: list[int] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    details: GenerateDetails | UnsetType = UNSET


class GenerateChunk(Struct, frozen=True):
    """One event of a streamed generation; the last has the whole text and the details."""

    index: int
    token: GeneratedToken
    generated_text: str | None = None
    details: GenerateDetails | None = None
    prompt_token_ids: list[int] | UnsetType = UNSET


class TokenizeReply(Struct, frozen=True):
    """The answer of POST /tokenize. `token_strs`: as the vocabulary spells them, if asked for."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class DetokenizeReply(Struct, frozen=True):
    """The answer of POST /detokenize."""

    prompt: str


class ModelCard(Struct, frozen=True):
    """The model that is served. `max_model_len` is 0 until the engine has started."""

    id: str
    created: int
    root: str
    max_model_len: int
    object: Literal["model"] = "model"
    owned_by: Literal["sluice"] = "sluice"
    parent: None = None
    permission: list[None] = []


class ModelList(Struct, frozen=True):
    """The answer of GET /v1/models."""

    data: list[ModelCard]
    object: Literal["list"] = "list"


class Load(Struct, frozen=True):
    """Sequences that are open: running or waiting."""

    server_load: int


class Version(Struct, frozen=True):
    """Sluice's own version."""

    version: str


class Health(Struct, frozen=True):
    """Whether the engine makes progress, and why not."""

    status: Literal["ok", "failed"]
    reason: str


class Readiness(Struct, frozen=True):
    """Whether new work is taken; while starting, the phase and how far it is."""

    status: Literal["ready", "not ready"]
    reason: str
    phase: str
    percent: int
