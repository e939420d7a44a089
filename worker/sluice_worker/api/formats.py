"""The form of each route's reply: one body, or one event for each token."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import Any

from msgspec import UNSET, Struct, UnsetType
from msgspec.structs import replace
from sluice_core.port import FinishReason
from sluice_frontend.api import response_types
from sluice_frontend.api.generate import Completion
from sluice_frontend.api.logprobs import (
    Scored,
    as_token_id,
    of_chat,
    of_completion,
    of_prompt,
    prompt_tokens,
)
from sluice_frontend.api.response_types import Usage
from sluice_frontend.api.sse import DONE, encode, event

from ..text.tokenizer import Tokenizer
from .generation import Arrived, Generation, OpenChoice

SCORE_BYTES = 80
"""About the size of one log-probability of a chat's reply, which tells the token's bytes too."""
ID_BYTES = 8
"""Size of a token id in a reply; a token of text takes no more."""


class Format(ABC):
    """One request's answer as bytes."""

    def __init__(self, generation: Generation, model: str, tokenizer: Tokenizer) -> None:
        self.generation = generation
        self._model = model
        self._told = TokenLogprobs(generation.request, tokenizer)
        of_id = ID_BYTES if generation.request.return_token_ids else 0
        sampling = generation.request.sampling.engine
        self._token_bytes = ID_BYTES + of_id + _scores_bytes(sampling.logprobs)
        self._prompt_token_bytes = of_id + _scores_bytes(sampling.prompt_logprobs)

    @abstractmethod
    def event(self, item: Arrived) -> bytes:
        """Take in one token; the event that tells it."""

    def tail(self) -> bytes:
        """The events after the last token."""
        return DONE

    @abstractmethod
    def body(self, texts: Sequence[str]) -> bytes:
        """The answer in one piece, after all tokens; `texts`: of all choices."""

    def num_bytes(self, prompts: Iterable[OpenChoice], num_tokens: int) -> int:
        """Approximate bytes of the reply for these prompts and `num_tokens` of output."""
        of_prompts = (
            len(picked.echo.text) + picked.timer.num_prompt_tokens * self._prompt_token_bytes
            for picked in prompts
        )
        return sum(of_prompts) + num_tokens * self._token_bytes

    def _ids(self, picked: OpenChoice, known: int = 0) -> list[int] | UnsetType:
        """Ids of the output's tokens, from the `known`-th on."""
        asked = self.generation.request.return_token_ids
        return picked.output_text.token_ids[known:] if asked else UNSET

    def _prompt_ids(self, picked: OpenChoice, is_first: bool = True) -> list[int] | UnsetType:
        asked = self.generation.request.return_token_ids and is_first
        return picked.prompt_token_ids if asked else UNSET

    def _all_prompt_ids(self) -> list[list[int] | UnsetType]:
        """A list for each choice; answers to one prompt share it, as there may be a hundred."""
        found: dict[bytes, list[int] | UnsetType] = {}
        for picked in self.generation.choices:
            if picked.prompt not in found:
                found[picked.prompt] = self._prompt_ids(picked)
        return [found[picked.prompt] for picked in self.generation.choices]


class _OpenAiFormat(Format):
    """Common parts of completions and chats."""

    @abstractmethod
    def _chunk(self, choices: list[Any], usage: Usage | UnsetType) -> Struct:
        """The body of an event."""

    def tail(self) -> bytes:
        """The usage if it was asked for, and the end."""
        if not self.generation.request.include_usage:
            return DONE
        return event(encode(self._chunk([], self.generation.counts()))) + DONE

    def _usage(self, picked: OpenChoice) -> Usage | UnsetType:
        """Counts of the chunk's choice, which vLLM sends with each chunk."""
        return picked.counts() if self.generation.request.continuous_usage else UNSET


class CompletionFormat(_OpenAiFormat):
    """POST /v1/completions."""

    def event(self, item: Arrived) -> bytes:
        picked = item.choice
        is_first, known = item.token.first is not None, len(picked.output_text.token_ids)
        choice = response_types.ChoiceChunk(
            index=picked.index,
            text=picked.feed(item.token),
            logprobs=self._told.of_completion(picked, known, with_prompt=is_first),
            finish_reason=picked.finish_reason and _reason(picked),
            stop_reason=picked.output_text.stop_reason,
            token_ids=self._ids(picked, known),
            prompt_token_ids=self._prompt_ids(picked, is_first),
        )
        return event(encode(self._chunk([choice], self._usage(picked))))

    def _chunk(self, choices: list[Any], usage: Usage | UnsetType) -> Struct:
        told, model = self.generation, self._model
        return response_types.CompletionChunk(
            told.reply_id, "text_completion", told.created, model, choices, usage
        )

    def body(self, texts: Sequence[str]) -> bytes:
        generation = self.generation
        choices = [
            response_types.Choice(
                index=picked.index,
                text=text,
                logprobs=self._told.of_completion(picked, 0, with_prompt=True),
                finish_reason=_reason(picked),
                stop_reason=picked.output_text.stop_reason,
                token_ids=self._ids(picked),
                prompt_token_ids=prompt_ids,
                prompt_logprobs=self._told.of_prompt(picked),
            )
            for picked, text, prompt_ids in zip(
                generation.choices, texts, self._all_prompt_ids(), strict=True
            )
        ]
        return encode(
            response_types.CompletionReply(
                id=generation.reply_id,
                object="text_completion",
                created=generation.created,
                model=self._model,
                choices=choices,
                usage=generation.counts(),
            )
        )


class ChatFormat(_OpenAiFormat):
    """POST /v1/chat/completions. The role comes with the first token: one event for each token."""

    def event(self, item: Arrived) -> bytes:
        picked = item.choice
        is_first, known = item.token.first is not None, len(picked.output_text.token_ids)
        choice = response_types.ChatChoiceChunk(
            index=picked.index,
            delta=response_types.Delta(picked.feed(item.token), "assistant" if is_first else UNSET),
            logprobs=self._told.of_chat(picked, known),
            finish_reason=picked.finish_reason and _reason(picked),
            stop_reason=picked.output_text.stop_reason,
            token_ids=self._ids(picked, known),
        )
        prompt_ids = self._prompt_ids(picked, is_first)
        return event(encode(self._chunk([choice], self._usage(picked), prompt_ids)))

    def _chunk(
        self,
        choices: list[Any],
        usage: Usage | UnsetType,
        prompt_ids: list[int] | UnsetType = UNSET,
    ) -> Struct:
        told, model = self.generation, self._model
        return response_types.ChatChunk(
            told.reply_id, "chat.completion.chunk", told.created, model, choices, prompt_ids, usage
        )

    def body(self, texts: Sequence[str]) -> bytes:
        generation, first = self.generation, self.generation.choices[0]
        choices = [
            response_types.ChatChoice(
                index=picked.index,
                message=response_types.ReplyMessage(text),
                logprobs=self._told.of_chat(picked, 0),
                finish_reason=_reason(picked),
                stop_reason=picked.output_text.stop_reason,
                token_ids=self._ids(picked),
            )
            for picked, text in zip(generation.choices, texts, strict=True)
        ]
        return encode(
            response_types.ChatReply(
                id=generation.reply_id,
                object="chat.completion",
                created=generation.created,
                model=self._model,
                choices=choices,
                usage=generation.counts(),
                prompt_token_ids=self._prompt_ids(first),
                prompt_logprobs=self._told.of_prompt(first),
            )
        )


class GenerateFormat(Format):
    """POST /generate and /generate_stream; events are text-generation-inference's."""

    def __init__(self, generation: Generation, model: str, tokenizer: Tokenizer) -> None:
        super().__init__(generation, model, tokenizer)
        self._control = tokenizer.control_tokens
        self._text_of = tokenizer.token_text
        self._pieces: list[str] = []

    def event(self, item: Arrived) -> bytes:
        """One token; the last one brings the whole text and the details."""
        picked, token_id = item.choice, item.token.token_id
        known = len(picked.output_text.token_ids)
        text = picked.feed(item.token)
        self._pieces.append(text)
        is_last = picked.finish_reason is not None
        logprob = next((scored.logprob for scored in picked.scored.tokens(known)), None)
        chunk = response_types.GenerateChunk(
            index=len(self._pieces),
            token=self._token(token_id, text, logprob),
            generated_text="".join(self._pieces) if is_last else None,
            details=self._details(picked) if is_last else None,
            prompt_token_ids=self._prompt_ids(picked, item.token.first is not None),
        )
        return event(encode(chunk))

    def tail(self) -> bytes:
        """Nothing: the last token's event ends the stream."""
        return b""

    def body(self, texts: Sequence[str]) -> bytes:
        picked = self.generation.choices[0]
        return encode(
            response_types.GenerateReply(
                id=self.generation.reply_id,
                model=self._model,
                generated_text=texts[0],
                finish_reason=_reason(picked),
                stop_reason=picked.output_text.stop_reason,
                usage=self.generation.counts(),
                token_ids=self._ids(picked),
                prompt_token_ids=self._prompt_ids(picked),
                details=self._details_with_tokens(picked),
            )
        )

    def _token(
        self, token_id: int, text: str, logprob: float | None
    ) -> response_types.GeneratedToken:
        return response_types.GeneratedToken(token_id, text, logprob, token_id in self._control)

    def _details_with_tokens(
        self, picked: OpenChoice
    ) -> response_types.GenerateDetails | UnsetType:
        if self.generation.request.sampling.engine.logprobs is None:
            return UNSET
        tokens = [
            self._token(token.token_id, self._text_of(token.token_id), token.logprob)
            for token in picked.scored.tokens()
        ]
        return replace(self._details(picked), prefill=[], tokens=tokens)

    def _details(self, picked: OpenChoice) -> response_types.GenerateDetails:
        has_stop = picked.output_text.stop_reason is not None
        stopped: response_types.TgiReason = "stop_sequence" if has_stop else "eos_token"
        return response_types.GenerateDetails(
            finish_reason=stopped if picked.finish_reason == "stop" else "length",
            generated_tokens=len(picked.output_text.token_ids),
            seed=self.generation.request.sampling.seed,
            input_length=picked.timer.num_prompt_tokens,
        )


class TokenLogprobs:
    """The log-probabilities that one request asked for, in the form of its replies."""

    def __init__(self, request: Completion, tokenizer: Tokenizer) -> None:
        self._request = request
        self._plain, self._bytes_of = tokenizer.token_text, tokenizer.token_bytes
        self._text_of = as_token_id if request.sampling.tokens_as_ids else self._plain

    def of_completion(self, picked: OpenChoice, known: int, *, with_prompt: bool) -> Any:
        """Those of the output's tokens from the `known`-th on, behind an echoed prompt's."""
        num = self._request.sampling.engine.logprobs
        if num is None:
            return None
        prompt = self._prompt(picked) if with_prompt and self._request.echo else ()
        return of_completion(chain(prompt, picked.scored.tokens(known)), num, self._text_of)

    def of_chat(self, picked: OpenChoice, known: int) -> Any:
        """Those of the output's tokens from the `known`-th on."""
        num = self._request.sampling.engine.logprobs
        if num is None:
            return None
        return of_chat(picked.scored.tokens(known), num, self._text_of, self._bytes_of)

    def of_prompt(self, picked: OpenChoice) -> Any:
        """The field `prompt_logprobs`."""
        num = self._request.prompt_logprobs
        return UNSET if num is None else of_prompt(self._prompt(picked), num, self._plain)

    def _prompt(self, picked: OpenChoice) -> Iterator[Scored]:
        return prompt_tokens(picked.prompt_scores, picked.prompt_token_ids, picked.echo.places)


def _scores_bytes(num: int | None) -> int:
    """Approximate bytes of one token's scores with the `num` likeliest."""
    return 0 if num is None else SCORE_BYTES * (num + 1)


def _reason(picked: OpenChoice) -> response_types.FinishReason:
    """The reason of a sequence that neither failed nor was aborted."""
    reason: FinishReason | None = picked.finish_reason
    return "stop" if reason == "stop" else "length"
