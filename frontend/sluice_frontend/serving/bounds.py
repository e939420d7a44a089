"""Bounds of a request: its length, the room in the queue, the time it has. Pure."""

from collections.abc import Iterable, Sequence

from sluice_core.contract import SchedulingPolicy
from sluice_core.errors import ContextLengthExceeded, KvCapacityExceeded, RequestError
from sluice_core.port import EngineLoad
from sluice_core.window import over_window, prompt_too_long
from sluice_core.work import Deadlines

from ..openai.protocol import Completion
from .forecast import Forecast


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


def check_priority(priority: int, policy: SchedulingPolicy) -> None:
    """Raise for a priority that would be ignored, as vLLM does."""
    if priority and policy == "fcfs":
        raise RequestError(
            f"priority {priority} would have no effect: the scheduling policy is fcfs",
            param="priority",
        )


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


def num_waiting(num_open: int, cap: int, state: EngineLoad) -> int:
    """Number of waiting sequences, with those that the engine has not reported yet."""
    return max(0, num_open - cap, state.waiting)


def is_full(num_new: int, num_open: int, cap: int, state: EngineLoad, limit: int) -> bool:
    """True if `num_new` sequences would make more than `limit` wait.

    `num_open`: submitted and not ended. Newcomers wait behind those that wait for memory.
    """
    over_cap = num_open + num_new - cap
    return over_cap > limit or (state.waiting > 0 and state.waiting + num_new > limit)


def unreachable(
    deadlines: Deadlines,
    default_ttft_ms: float | None,
    forecast: Forecast,
    num_new: int,
    *,
    age_ms: float,
    prefill_ms: float,
) -> tuple[str, float] | None:
    """Why `num_new` sequences that came `age_ms` ago would be late, and the predicted wait in s.

    `prefill_ms`: time of a first token besides waiting. None: they may be in time. With nothing
    open, a prediction refuses nothing, as only admitted requests can correct it.
    """
    wait_s, is_alone = forecast.wait_s(num_new), forecast.num_open == 0
    first_ms = age_ms + 1e3 * wait_s + prefill_ms
    ttft_ms = deadlines.ttft_ms or default_ttft_ms
    if ttft_ms is not None and (age_ms if is_alone else first_ms) > ttft_ms:
        sentence = (
            f"the first token would come after about {first_ms:.0f} ms, "
            f"the deadline is {ttft_ms:g} ms"
        )
        return sentence, wait_s
    tpot_ms = None if is_alone else forecast.tpot_ms(num_new)
    if deadlines.tpot_ms is not None and tpot_ms is not None and tpot_ms > deadlines.tpot_ms:
        sentence = (
            f"a token takes about {tpot_ms:.1f} ms with those that run now, "
            f"the deadline is {deadlines.tpot_ms:g} ms"
        )
        return sentence, max(wait_s, forecast.service_s or 0.0)
    return None
