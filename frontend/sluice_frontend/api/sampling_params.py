"""Sampling and the end of the text: the fields that all completions share. Pure.

`SamplingFields` are the JSON fields, inherited by each body. `SamplingParams` is their meaning,
checked; `for_engine` is the part of it that travels to the engine process. Names, ranges and
meanings are vLLM's.
"""

import sys
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct, structs
from sluice_core.errors import CheckpointError, RequestError
from sluice_core.work import GREEDY_BELOW, Sampling

MAX_SEQUENCES = 1024
"""Sequences of one request (prompts x n): bounded before anything is allocated for them."""
MAX_TEXT_CHARS = 1 << 14
"""Limit of all stop strings together, and of all bad words. Text is held back up to the longest
stop string, and a search through this much takes 20 ms."""
MAX_BAD_WORDS = 256
"""Each is compared with the end of the text before every token; vLLM allows half as many."""
MAX_TOKEN_IDS = 4096
"""Entries of one list of ids or biases; the engine holds them for each sequence."""
MAX_LOGPROBS = 20
"""OpenAI's limit of top_logprobs, and the default of vLLM's --max-logprobs."""
MAX_PROMPT_LOGPROBS = 1 << 18
"""Log-probabilities of one request's prompts: they are kept until the reply, then sent at once."""
MAX_OUTPUT_LOGPROBS = 1 << 19
LOGPROB_BYTES = 1 << 12
"""Log-probabilities of one request's output, and the memory that a pod has for each."""

TokenId = Annotated[int, Meta(ge=0, le=2**31 - 1)]
Temperature = Annotated[float, Meta(ge=0, le=100)]
TopK = Annotated[int, Meta(ge=-1, le=2**31 - 1)]
TopP = Annotated[float, Meta(gt=0, le=1)]
MinP = Annotated[float, Meta(ge=0, le=1)]
Seed = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
Repetition = Annotated[float, Meta(ge=0.01, le=100)]
TokenIds = Annotated[list[TokenId], Meta(max_length=MAX_TOKEN_IDS)]
Text = Annotated[str, Meta(min_length=1)]
Bias = Annotated[float, Meta(ge=-100, le=100)]
NumLogprobs = Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)]


class DefaultedFields(Struct, frozen=True, kw_only=True):
    """The sampling fields that a checkpoint may set; None is OpenAI's default."""

    temperature: Temperature | None = None
    top_k: TopK | None = None
    top_p: TopP | None = None
    min_p: MinP | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: Repetition | None = None


class SamplingFields(DefaultedFields, frozen=True, kw_only=True):
    """The sampling fields of a body; null is the default. Inherit, and add what is yours.

    Not here: what differs between the bodies, `max_tokens` and `logprobs`.
    """

    logit_bias: Annotated[dict[TokenId, Bias], Meta(max_length=MAX_TOKEN_IDS)] | None = None
    allowed_token_ids: Annotated[TokenIds, Meta(min_length=1)] | None = None
    bad_words: Annotated[list[Text], Meta(max_length=MAX_BAD_WORDS)] | None = None
    seed: Seed | None = None
    n: Annotated[int, Meta(ge=1, le=MAX_SEQUENCES)] | None = None
    stop: Text | list[Text] | None = None
    include_stop_str_in_output: bool | None = None
    stop_token_ids: TokenIds | None = None
    ignore_eos: bool | None = None
    min_tokens: Annotated[int, Meta(ge=0, le=2**31 - 1)] | None = None
    prompt_logprobs: NumLogprobs | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    truncate_prompt_tokens: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = None


class Defaults(DefaultedFields, frozen=True, kw_only=True):
    """A checkpoint's generation_config.json, for fields that a request leaves out.

    The fields are those that vLLM takes from it; None: OpenAI's default. `max_new_tokens`: for
    chats, as all others have a default length of their own.
    """

    max_new_tokens: Annotated[int, Meta(ge=1, le=2**31 - 1)] | None = None


OPENAI = Defaults()


def defaults_of(generation_config: Mapping[str, object]) -> Defaults:
    """The defaults in a generation_config.json; raises CheckpointError naming the field."""
    try:
        return msgspec.convert(generation_config, type=Defaults)
    except msgspec.ValidationError as error:
        raise CheckpointError(f"generation_config.json: {error}.") from error


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """One request's sampling, checked. The defaults change nothing but draw at temperature 1.

    `engine`: the engine process's part, without `bad_words`, which a tokenizer spells.
    `truncate_prompt_tokens`: last tokens of the prompt that are kept, -1 for as many as fit the
    window, None for all.
    """

    engine: Sampling = Sampling()
    temperature: float = 1.0
    bad_words: tuple[str, ...] = ()
    seed: int | None = None
    n: int = 1
    stop: tuple[str, ...] = ()
    include_stop: bool = False
    stop_token_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False
    min_tokens: int = 0
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    tokens_as_ids: bool = False
    truncate_prompt_tokens: int | None = None


def resolve(
    fields: SamplingFields,
    *,
    max_tokens: int | None,
    logprobs: int | None,
    prompt_logprobs: int | None = None,
    defaults: Defaults = OPENAI,
) -> SamplingParams:
    """The meaning of `fields`, with `defaults` for null; raises RequestError naming the field.

    `prompt_logprobs`: needed by echo with logprobs, if the field does not ask for more.
    """
    min_tokens = fields.min_tokens or 0
    if max_tokens is not None:
        check_min_tokens(min_tokens, max_tokens)
    if fields.truncate_prompt_tokens == 0:
        raise RequestError(
            "truncate_prompt_tokens must be -1 or at least 1", param="truncate_prompt_tokens"
        )
    asked = [n for n in (fields.prompt_logprobs, prompt_logprobs) if n is not None]
    temperature, engine = _draw(fields, defaults)
    engine = structs.replace(engine, logprobs=logprobs, prompt_logprobs=max(asked, default=None))
    return SamplingParams(
        engine=engine,
        temperature=temperature,
        bad_words=_texts(fields.bad_words, "bad_words"),
        seed=None if fields.seed == -1 else fields.seed,
        n=fields.n or 1,
        stop=_texts(fields.stop, "stop"),
        include_stop=bool(fields.include_stop_str_in_output),
        stop_token_ids=frozenset(fields.stop_token_ids or ()),
        ignore_eos=bool(fields.ignore_eos),
        min_tokens=min_tokens,
        skip_special_tokens=fields.skip_special_tokens is not False,
        spaces_between_special_tokens=fields.spaces_between_special_tokens is not False,
        tokens_as_ids=bool(fields.return_tokens_as_token_ids),
        truncate_prompt_tokens=fields.truncate_prompt_tokens,
    )


def _draw(fields: SamplingFields, defaults: Defaults) -> tuple[float, Sampling]:
    """The temperature, and all other changes of the distribution except bad words."""
    values: dict[str, Any] = {}
    for name in Defaults.__struct_fields__[:-1]:  # all but max_new_tokens
        asked = getattr(fields, name)
        if (value := getattr(defaults, name) if asked is None else asked) is not None:
            values[name] = value
    temperature = values.pop("temperature", 1.0)
    values["top_k"] = max(values.get("top_k", 0), 0)
    if temperature < GREEDY_BELOW:  # the likeliest is left whatever is cut
        temperature, values = 0.0, values | {"top_k": 0, "top_p": 1.0, "min_p": 0.0}
    allowed = fields.allowed_token_ids
    return temperature, Sampling(
        **values,
        logit_bias=fields.logit_bias or {},
        allowed_token_ids=None if allowed is None else tuple(sorted(set(allowed))),
    )


def check_min_tokens(min_tokens: int, max_tokens: int) -> None:
    """Raises RequestError if an output of at most `max_tokens` cannot be as long."""
    if min_tokens > max_tokens:
        raise RequestError(
            f"min_tokens {min_tokens} is over the {max_tokens} tokens that the output may have",
            param="min_tokens",
        )


def check_vocabulary(params: SamplingParams, vocab_size: int) -> None:
    """Raises RequestError if `params` name a token id that the model does not have."""
    named = {
        "allowed_token_ids": params.engine.allowed_token_ids or (),
        "logit_bias": params.engine.logit_bias,
        "stop_token_ids": params.stop_token_ids,
    }
    for name, tokens in named.items():
        highest = max(tokens, default=0)
        if highest >= vocab_size:
            raise RequestError(
                f"{name}: token id {highest} is outside the vocabulary of {vocab_size}", param=name
            )


def check_something_left(
    params: SamplingParams, sampling: Sampling, eos_token_ids: Set[int]
) -> None:
    """Raises RequestError if no token can ever come first."""
    if sampling.allowed_token_ids is None:
        return
    excluded = {word[0] for word in sampling.bad_words if len(word) == 1}
    if params.min_tokens:
        excluded |= {*eos_token_ids, *params.stop_token_ids}
    if excluded.issuperset(sampling.allowed_token_ids):
        raise RequestError(
            "allowed_token_ids holds no token that bad_words and min_tokens leave",
            param="allowed_token_ids",
        )


def check_logprobs(params: SamplingParams, num_output: int, most: int) -> None:
    """Raises RequestError if `num_output` tokens of all choices give more than `most` scores."""
    beside, remedy = f"up to {num_output} tokens", "; ask for fewer tokens (max_tokens, n)"
    _check_held("logprobs", params.engine.logprobs, num_output, most, beside, remedy)


def longest_scored(params: SamplingParams, num_sequences: int, most: int) -> int:
    """The most tokens, at least 1, that each of `num_sequences` may have by `check_logprobs`."""
    logprobs = params.engine.logprobs
    if logprobs is None:
        return sys.maxsize
    return max(1, most // ((logprobs + 1) * num_sequences))


def check_prompt_logprobs(params: SamplingParams, num_prompt: int) -> None:
    """Raises RequestError if `num_prompt` tokens of all choices give too many scores."""
    beside = f"{num_prompt} prompt tokens"
    asked = params.engine.prompt_logprobs
    _check_held("prompt_logprobs", asked, num_prompt, MAX_PROMPT_LOGPROBS, beside)


def _check_held(
    param: str, each: int | None, num_tokens: int, most: int, beside: str, remedy: str = ""
) -> None:
    if each is not None and num_tokens * (each + 1) > most:
        raise RequestError(
            f"{each} log-probabilities beside each of {beside} are over the limit of {most} for a "
            f"request{remedy}",
            param=param,
        )


Encode = Callable[[str], Sequence[int]]
"""Text -> token ids, without BOS or EOS."""


def for_engine(params: SamplingParams, encode: Encode) -> Sampling:
    """The part of `params` for the engine; bad words become token ids."""
    spellings = (spelling for word in params.bad_words for spelling in _spellings(word, encode))
    return structs.replace(params.engine, bad_words=tuple(spellings))


def _spellings(word: str, encode: Encode) -> list[tuple[int, ...]]:
    """A bad word as it begins a text and as it follows a space, as vLLM spells them.

    The second is left out if the space is a token of its own.
    """
    bare = tuple(encode(word.lstrip()))
    spaced = tuple(encode(" " + word.lstrip()))
    if not bare:
        return [spaced] if spaced else []
    if len(spaced) == len(bare) and spaced[0] != bare[0]:
        return [bare, spaced]
    return [bare]


def _texts(value: str | list[str] | None, param: str) -> tuple[str, ...]:
    """The texts of one field; raises RequestError for too many characters."""
    texts = (value,) if isinstance(value, str) else tuple(value or ())
    num_chars = sum(map(len, texts))
    if num_chars > MAX_TEXT_CHARS:
        raise RequestError(
            f"{param}: {num_chars} characters, all entries together, are over the limit of "
            f"{MAX_TEXT_CHARS}",
            param=param,
        )
    return texts
