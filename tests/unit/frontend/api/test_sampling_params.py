"""What the sampling fields of a body mean, and which of their values are refused by name."""

import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sluice_core.errors import CheckpointError, RequestError
from sluice_core.work import Sampling
from sluice_frontend.api.chat import parse_chat
from sluice_frontend.api.generate import Completion, parse_completion, parse_generate
from sluice_frontend.api.sampling_params import (
    MAX_OUTPUT_LOGPROBS,
    MAX_PROMPT_LOGPROBS,
    MAX_TEXT_CHARS,
    SamplingFields,
    SamplingParams,
    check_logprobs,
    check_prompt_logprobs,
    check_something_left,
    check_vocabulary,
    defaults_of,
    for_engine,
    longest_scored,
)


def params(**fields: Any) -> SamplingParams:
    return parse_completion(json.dumps({"prompt": "x", **fields}).encode()).sampling


def letters(text: str) -> list[int]:
    """A tokenizer of letters."""
    return [ord(letter) for letter in text]


def test_defaults_and_nulls_change_nothing() -> None:
    nulls = {name: None for name in SamplingFields.__struct_fields__}
    assert params() == params(**nulls) == SamplingParams()
    assert for_engine(SamplingParams(), letters) == Sampling()
    assert for_engine(SamplingParams(), letters).is_plain
    assert not Sampling().edits_logits


FIELDS: dict[str, Any] = {
    "top_k": 3,
    "top_p": 0.5,
    "min_p": 0.1,
    "presence_penalty": -1,
    "frequency_penalty": 2,
    "repetition_penalty": 1.5,
    "logit_bias": {"5": 1},
    "allowed_token_ids": [9, 5, 9],
    "bad_words": ["x"],
    "logprobs": 0,
    "prompt_logprobs": 0,
}


@pytest.mark.parametrize("name", FIELDS)
def test_each_field_reaches_the_engine(name: str) -> None:
    sampling = for_engine(params(**{name: FIELDS[name]}), letters)
    assert not sampling.is_plain
    for field in Sampling.__struct_fields__:
        assert (getattr(sampling, field) != getattr(Sampling(), field)) == (field == name)


def test_the_checkpoints_defaults_hold_where_a_request_says_nothing() -> None:
    """As generation_config.json of Qwen3 has them; what is not of sampling is left alone."""
    own = {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95, "eos_token_id": [1]}
    defaults = defaults_of(own | {"min_p": None})
    silent = parse_completion(b'{"prompt": "x"}', defaults).sampling
    assert (silent.temperature, silent.engine) == (0.6, Sampling(top_k=20, top_p=0.95))
    asked = parse_completion(b'{"prompt": "x", "temperature": 1, "top_k": -1}', defaults).sampling
    assert (asked.temperature, asked.engine) == (1.0, Sampling(top_p=0.95))
    for body, temperature in (
        (b'{"prompt": "x"}', 0.0),
        (b'{"prompt": "x", "do_sample": true}', 0.6),
    ):
        assert parse_generate(body, defaults).sampling.temperature == temperature


def test_a_checkpoints_penalties_hold_where_a_request_names_none() -> None:
    defaults = defaults_of({"presence_penalty": 1.5, "frequency_penalty": 0.5})
    silent = parse_completion(b'{"prompt": "x"}', defaults).sampling.engine
    assert silent == Sampling(presence_penalty=1.5, frequency_penalty=0.5)
    asked = parse_completion(b'{"prompt": "x", "presence_penalty": 0}', defaults).sampling.engine
    assert asked == Sampling(frequency_penalty=0.5)


@pytest.mark.parametrize("wrong", [{"temperature": -1}, {"top_p": "0.9"}, {"top_k": 1.5}])
def test_a_checkpoints_default_that_makes_no_sense_is_named(wrong: dict[str, object]) -> None:
    with pytest.raises(CheckpointError, match=f"generation_config.*{next(iter(wrong))}"):
        defaults_of(wrong)


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("top_k", [-2, 1.5, "3", True]),
        ("top_p", [0, -0.1, 1.1]),
        ("min_p", [-0.1, 1.1]),
        ("presence_penalty", [-2.1, 2.1]),
        ("frequency_penalty", [-2.1, 2.1]),
        ("repetition_penalty", [0, -1, 1e30]),
        (
            "logit_bias",
            [{"a": 1}, {"-1": 1}, {"1": 101}, {"1": None}, [1], {str(n): 1 for n in range(5000)}],
        ),  # fmt: skip
        ("allowed_token_ids", [[], [-1], ["a"], list(range(5000))]),
        ("bad_words", [[""], [1], "a", ["a"] * 1000]),
        ("stop_token_ids", [[-1], ["a"], list(range(5000))]),
        ("logprobs", [-1, 21, True, "1"]),
        ("prompt_logprobs", [-1, 21]),
        ("truncate_prompt_tokens", [0, -2]),
        ("n", [0, 1025]),
        ("stop", ["", [""], ["a", 1], 1]),
        ("echo", [1, "yes"]),
    ],
)
def test_values_out_of_range_are_refused_by_name(name: str, values: list[Any]) -> None:
    for value in values:
        with pytest.raises(RequestError) as refused:
            params(**{name: value})
        assert (refused.value.param, name in refused.value.message) == (name, True)


@pytest.mark.parametrize("parse", [parse_completion, parse_generate])
@pytest.mark.parametrize(
    "stops", [[f"{i}" * 9 for i in range(n)] for n in (17, 24, 64)] + [["x"] * MAX_TEXT_CHARS]
)
def test_stop_strings_are_bounded_by_their_characters_and_not_by_their_number(
    parse: Callable[[bytes], Completion], stops: list[str]
) -> None:
    def asked(stop: object) -> tuple[str, ...]:
        return parse(json.dumps({"prompt": "x", "stop": stop}).encode()).sampling.stop

    assert asked(stops) == tuple(stops)
    assert asked("x" * MAX_TEXT_CHARS) == ("x" * MAX_TEXT_CHARS,)
    for over in ([*stops, "x" * MAX_TEXT_CHARS], "x" * (MAX_TEXT_CHARS + 1)):
        with pytest.raises(RequestError, match=f"over the limit of {MAX_TEXT_CHARS}") as refused:
            asked(over)
        assert refused.value.param == "stop"


def test_lists_may_be_as_long_as_in_vllm() -> None:
    """Its limits, by source: 128 stop token ids and bad words, 1,024 biases, ids and prompts."""
    ids = [*range(1024)]
    assert params(stop_token_ids=ids[:200]).stop_token_ids == frozenset(ids[:200])
    assert len(params(bad_words=["a" * 100] * 128).bad_words) == 128
    assert len(params(logit_bias={str(i): 1 for i in ids}).engine.logit_bias) == 1024
    assert params(allowed_token_ids=ids).engine.allowed_token_ids == tuple(ids)
    assert params(n=1024).n == 1024
    assert len(parse_completion(json.dumps({"prompt": ["x"] * 1024}).encode()).prompts) == 1024


def test_vllms_two_ways_to_turn_top_k_off_are_read() -> None:
    assert params(top_k=-1) == params(top_k=0) == SamplingParams()


def test_max_tokens_0_scores_the_prompt_and_needs_echo() -> None:
    request = parse_completion(b'{"prompt": "x", "max_tokens": 0, "echo": true, "logprobs": 2}')
    assert (request.is_scoring, request.max_tokens) == (True, 1)
    assert (request.sampling.engine.prompt_logprobs, request.prompt_logprobs) == (2, None)
    with pytest.raises(RequestError) as refused:
        parse_completion(b'{"prompt": "x", "max_tokens": 0}')
    assert refused.value.param == "max_tokens"


def test_echo_with_logprobs_and_prompt_logprobs_scores_for_the_larger() -> None:
    body = {"prompt": "x", "echo": True, "logprobs": 2, "prompt_logprobs": 5}
    request = parse_completion(json.dumps(body).encode())
    assert (request.sampling.engine.prompt_logprobs, request.prompt_logprobs) == (5, 5)


def test_prompt_logprobs_of_a_stream_are_refused_if_there_are_any() -> None:
    body: dict[str, Any] = {"prompt": "x", "messages": [{"role": "user", "content": "x"}]}
    for parse in (parse_completion, parse_chat):
        parse(json.dumps(body | {"stream": True, "prompt_logprobs": 0}).encode())
        with pytest.raises(RequestError) as refused:
            parse(json.dumps(body | {"stream": True, "prompt_logprobs": 1}).encode())
        assert refused.value.param == "prompt_logprobs"


def test_generate_takes_the_same_fields() -> None:
    body = b'{"inputs": "x", "parameters": {"top_k": 4, "truncate": 7, "repetition_penalty": 1.1}}'
    sampling = parse_generate(body).sampling
    assert (sampling.engine.top_k, sampling.truncate_prompt_tokens) == (4, 7)
    assert (sampling.engine.repetition_penalty, sampling.temperature) == (1.1, 1)


@pytest.mark.parametrize("name", ["allowed_token_ids", "logit_bias", "stop_token_ids"])
def test_ids_outside_the_vocabulary_are_refused_by_name(name: str) -> None:
    for highest, is_refused in ((99, False), (100, True)):
        value = {str(highest): 1} if name == "logit_bias" else [3, highest]
        checked = params(**{name: value})
        if is_refused:
            with pytest.raises(RequestError) as refused:
                check_vocabulary(checked, 100)
            assert refused.value.param == name
        else:
            check_vocabulary(checked, 100)


def test_a_choice_that_nothing_is_left_of_is_refused() -> None:
    for fields, is_refused in (
        ({"allowed_token_ids": [7]}, False),
        ({"allowed_token_ids": [7], "min_tokens": 1}, True),
        ({"allowed_token_ids": [7, 8], "min_tokens": 1}, False),
        ({"allowed_token_ids": [7, 8], "min_tokens": 1, "stop_token_ids": [8]}, True),
        ({"allowed_token_ids": [97], "bad_words": ["a"]}, True),
        ({"allowed_token_ids": [97], "bad_words": ["ab"]}, False),
    ):
        checked = params(**fields)
        sampling = for_engine(checked, letters)
        if is_refused:
            with pytest.raises(RequestError) as refused:
                check_something_left(checked, sampling, frozenset([7]))
            assert refused.value.param == "allowed_token_ids"
        else:
            check_something_left(checked, sampling, frozenset([7]))


def test_more_prompt_logprobs_than_can_be_held_are_refused() -> None:
    checked = params(prompt_logprobs=7)
    check_prompt_logprobs(checked, MAX_PROMPT_LOGPROBS // 8)
    check_prompt_logprobs(params(), 10**9)
    with pytest.raises(RequestError) as refused:
        check_prompt_logprobs(checked, MAX_PROMPT_LOGPROBS // 8 + 1)
    assert refused.value.param == "prompt_logprobs"


def spellings(word: str, table: dict[str, list[int]]) -> tuple[tuple[int, ...], ...]:
    return for_engine(params(bad_words=[word]), lambda text: table[text]).bad_words


def test_a_bad_word_is_spelled_as_at_a_beginning_and_behind_a_space() -> None:
    assert spellings("cat", {"cat": [1, 2], " cat": [3, 2]}) == ((1, 2), (3, 2))
    assert spellings(" cat", {"cat": [1], " cat": [3]}) == ((1,), (3,))
    # The space as a token of its own: whatever ends with the first spelling is forbidden already.
    assert spellings("cat", {"cat": [1], " cat": [9, 1]}) == ((1,),)
    assert spellings("cat", {"cat": [1], " cat": [1]}) == ((1,),)


def test_more_output_logprobs_than_can_be_held_are_refused() -> None:
    checked = params(logprobs=7, n=2)
    check_logprobs(checked, MAX_OUTPUT_LOGPROBS // 8, MAX_OUTPUT_LOGPROBS)
    check_logprobs(params(), 10**9, MAX_OUTPUT_LOGPROBS)
    with pytest.raises(RequestError, match="ask for fewer tokens"):
        check_logprobs(checked, MAX_OUTPUT_LOGPROBS // 8 + 1, MAX_OUTPUT_LOGPROBS)


@given(st.integers(0, 20), st.integers(1, 4096))
def test_answers_of_no_named_length_are_as_long_as_can_be_held(logprobs: int, num: int) -> None:
    checked = params(logprobs=logprobs)
    longest = longest_scored(checked, num, MAX_OUTPUT_LOGPROBS)
    check_logprobs(checked, longest * num, MAX_OUTPUT_LOGPROBS)
    with pytest.raises(RequestError):
        check_logprobs(checked, (longest + 1) * num, MAX_OUTPUT_LOGPROBS)
    assert longest_scored(params(), num, MAX_OUTPUT_LOGPROBS) > 2**40


def test_a_greedy_request_is_plain_whatever_the_checkpoint_cuts() -> None:
    """Else no draft would be made for it, and a GPU would not run ahead."""
    defaults = defaults_of({"temperature": 0.7, "top_k": 20, "top_p": 0.8, "min_p": 0.1})
    body = b'{"prompt": "x", "temperature": 1e-7}'
    assert for_engine(parse_completion(body, defaults).sampling, letters).is_plain
    drawn = parse_completion(b'{"prompt": "x"}', defaults).sampling
    assert drawn.engine == Sampling(top_k=20, top_p=0.8, min_p=0.1)


def test_a_seed_of_minus_one_is_none() -> None:
    assert params(seed=-1).seed is None
    assert (params(seed=0).seed, params(seed=-2).seed) == (0, -2)
