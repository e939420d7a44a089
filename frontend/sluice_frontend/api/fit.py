"""A generation request against a model's lengths and an answer's bounds. Pure but for the reading.

What admission must know of it comes out as `Work`.
"""

from collections.abc import Iterable, Sequence
from typing import Protocol

from sluice_core.errors import ContextLengthExceeded, KvCapacityExceeded, RequestError
from sluice_core.port import EngineFacts
from sluice_core.window import over_window, prompt_too_long
from sluice_core.work import Work

from .generate import Completion
from .sampling_params import (
    check_logprobs,
    check_min_tokens,
    check_prompt_logprobs,
    longest_scored,
)


class Reading(Protocol):
    """The work on one request that needs a tokenizer."""

    async def check_sampling(self) -> None:
        """Raise RequestError for parameters that no token of this model satisfies."""

    def fewest(self, num_chars: int) -> int:
        """The least number of tokens of a text of `num_chars` characters."""

    async def prompts(self, keep: int | None) -> Sequence[Sequence[int]]:
        """Token ids of each prompt, the last `keep` of them. Raises RequestError."""

    def echoes(self) -> Iterable[str]:
        """The prompts' texts, if the reply begins with them; known after `prompts`."""


async def fit(
    request: Completion, reading: Reading, facts: EngineFacts, max_logprobs: int
) -> tuple[Work, list[int]]:
    """Return what the engine has to do, and the max_tokens of each prompt's sequences.

    `max_logprobs`: the most of one answer. Raises RequestError. Too long texts are refused before
    they are tokenised.
    """
    sampling, window = request.sampling, facts.max_model_len
    await reading.check_sampling()
    keep = prompt_limit(request, window)
    for prompt in request.prompts:
        if keep is None and isinstance(prompt, str):
            check_length(reading.fewest(len(prompt)), window, request.prompt_field)
    prompts = await reading.prompts(keep)
    work = Work(
        prompts=tuple(map(len, prompts)),
        n=sampling.n,
        is_stream=request.stream,
        deadlines=request.deadlines,
        priority=request.priority,
        client=request.client,
        is_background=request.is_background,
    )
    pool = facts.num_blocks * facts.block_size
    budgets = [token_budget(num, request, window=window, pool=pool) for num in work.prompts]
    check_repeated(request, prompts, reading.echoes())
    check_prompt_logprobs(sampling, work.num_tokens)
    if request.has_default_length:  # it is ours to choose
        longest = longest_scored(sampling, work.num_sequences, max_logprobs)
        budgets = [min(num, longest) for num in budgets]
    check_logprobs(sampling, sampling.n * sum(budgets), max_logprobs)
    check_min_tokens(sampling.min_tokens, min(budgets))
    return work, budgets


def prompt_limit(request: Completion, window: int) -> int | None:
    """The last tokens of each prompt that are kept; None for all. Raises RequestError."""
    keep = request.sampling.truncate_prompt_tokens
    if keep is None:
        return None
    if keep > window:
        raise RequestError(
            f"truncate_prompt_tokens {keep} is over the model's window of {window} tokens",
            param="truncate_prompt_tokens",
        )
    return keep if keep > 0 else max(window - (request.max_tokens or 1), 1)


def check_length(num_at_least: int, window: int, field: str) -> None:
    """Raise before tokenising for a text that is too long with any tokens."""
    if num_at_least >= window:
        sentence = prompt_too_long(f"at least {num_at_least}", window)
        raise ContextLengthExceeded(sentence, param=field)


def token_budget(num_prompt: int, request: Completion, *, window: int, pool: int) -> int:
    """The max_tokens of a sequence with a prompt of `num_prompt` tokens, cut to the room behind it.

    `window`: tokens of the longest sequence; `pool`: tokens of KV cache. Raises RequestError if the
    prompt leaves no room, and for more tokens than the window.
    """
    if num_prompt == 0:
        raise RequestError("the prompt holds no token", param=request.prompt_field)
    asked = request.max_tokens or window
    least = asked if asked > window and not request.has_default_length else 1
    if sentence := over_window(num_prompt, least, window):
        field = request.prompt_field if num_prompt >= window else request.length_field
        raise ContextLengthExceeded(sentence, param=field)
    if num_prompt >= pool:
        raise KvCapacityExceeded(
            f"the prompt's {num_prompt} tokens leave no room in the KV pool of {pool} tokens",
            param=request.prompt_field,
        )
    return min(asked, window - num_prompt, pool - num_prompt)


MAX_REPEATED_IDS = 1 << 20
MAX_REPEATED_CHARS = 1 << 22
"""Most prompt characters that one reply repeats: each of a hundred answers repeats all."""


def check_repeated(
    request: Completion, prompts: Sequence[Sequence[int]], echoes: Iterable[str]
) -> None:
    """Raise for a reply that would repeat too much of its prompts. `echoes`: the prompts' texts, if
    the reply begins with them."""
    is_told_once = request.prompt_field == "messages" and not request.stream
    num_ids = sum(map(len, prompts)) if request.return_token_ids else 0
    for field, num, noun, most in (
        ("return_token_ids", num_ids, "token ids", MAX_REPEATED_IDS),
        ("echo", sum(map(len, echoes)), "characters", MAX_REPEATED_CHARS),
    ):
        told = num * (1 if is_told_once else request.sampling.n)
        if told > most:
            raise RequestError(
                f"the reply would repeat {told} {noun} of its prompts, all choices together, over "
                f"the limit of {most}; send fewer prompts or a smaller n",
                param=field,
            )
