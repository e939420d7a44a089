"""Any bytes give a request or a 4xx that names the field; never anything else."""

import json
from array import array
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from sluice_core.errors import RequestError, UnsupportedParameter
from sluice_frontend.api.generate import (
    NEUTRAL,
    CompletionBody,
    parse_completion,
    parse_generate,
)
from sluice_frontend.api.json_body import MAX_CONTAINERS, parse_object
from sluice_frontend.api.sampling_params import MAX_SEQUENCES


def refusal(parse: Callable[[bytes], object], body: bytes) -> RequestError | None:
    """Why `parse` refuses `body`, or None. Any other exception passes through."""
    try:
        parse(body)
    except RequestError as error:
        return error
    return None


def body_of(**fields: Any) -> bytes:
    """A completions body with a prompt, and `fields`."""
    return json.dumps({"prompt": "x", **fields}).encode()


@settings(max_examples=300)
@given(st.binary(max_size=200))
@example(b'{"prompt": "x"}')
@example(b"[" * 50_000)
@example(b'{"a":' * 50_000)
@example(b'{"prompt": ' + b"9" * 6000 + b"}")
@example(b'{"n": "1", "prompt": ' + b"[" * 990 + b"]" * 990 + b"}")
def test_any_bytes_are_a_request_or_a_named_refusal(body: bytes) -> None:
    for parse in (parse_completion, parse_generate):
        refused = refusal(parse, body)
        assert refused is None or (400 <= refused.http_status < 500 and refused.message)


ANY = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=6,
)
FIELDS = sorted(
    [*NEUTRAL, *CompletionBody.__struct_fields__],
)


@settings(max_examples=300)
@given(st.sampled_from(FIELDS), ANY)
def test_any_value_of_a_known_field_is_honoured_or_refused_by_its_name(
    name: str, value: Any
) -> None:
    refused = refusal(parse_completion, json.dumps({"prompt": "x", name: value}).encode())
    assert refused is None or refused.param == name


@settings(max_examples=200)
@given(st.dictionaries(st.text(max_size=8), ANY, max_size=6))
def test_what_json_means_is_kept(fields: dict[str, Any]) -> None:
    body = json.dumps(fields).encode()
    refused = refusal(parse_object, body)
    if refused is None:
        assert parse_object(body) == json.loads(body)
    else:
        assert any(word in refused.message for word in ("finite", "surrogate"))


@pytest.mark.parametrize("name", sorted(NEUTRAL))
def test_a_neutral_value_is_accepted_and_any_other_is_refused_by_name(name: str) -> None:
    for value in NEUTRAL[name]:
        assert parse_completion(body_of(**{name: value})).prompts == ("x",)
    with pytest.raises(UnsupportedParameter) as refused:
        parse_completion(body_of(**{name: "surely not neutral"}))
    assert refused.value.param == name


def test_what_vllm_would_honour_is_not_taken_for_unknown() -> None:
    """Fields of vLLM's CompletionRequest that ask for what is not built."""
    asked: dict[str, Any] = {
        "repetition_detection": {"max_pattern_size": 8},
        "max_repetition_pattern_size": 8,
        "truncation_side": "right",
        "logprob_token_ids": [1],
        "vllm_xargs": {"a": 1},
        "watermarking": True,
        "thinking_token_budget": 5,
    }
    for name, value in asked.items():
        with pytest.raises(UnsupportedParameter):
            parse_completion(body_of(**{name: value}))


@pytest.mark.parametrize(
    ("prompt", "parsed"),
    [
        ("a", ("a",)),
        (["a", "b"], ("a", "b")),
        ([1, 2], (array("i", [1, 2]),)),
        ([[1, 2], [3]], (array("i", [1, 2]), array("i", [3]))),
    ],
)
def test_the_four_forms_of_a_prompt_are_read(prompt: Any, parsed: tuple[Any, ...]) -> None:
    assert parse_completion(body_of(prompt=prompt)).prompts == parsed


@pytest.mark.parametrize("prompt", [["a", 1], [1, "a"], [[1], 2], [True], [1.5], [-1], [2**31]])
def test_mixed_and_impossible_prompts_are_refused(prompt: Any) -> None:
    with pytest.raises(RequestError) as refused:
        parse_completion(body_of(prompt=prompt))
    assert refused.value.param == "prompt"


@pytest.mark.parametrize("unit", [b"[]", b"{}"])
def test_a_body_of_nothing_but_brackets_is_refused_unparsed(
    unit: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    def body(num: int) -> bytes:
        return b'{"x":[' + b",".join([unit] * num) + b"]}"

    assert parse_object(body(MAX_CONTAINERS - 2))
    monkeypatch.setattr(json, "loads", None)
    with pytest.raises(RequestError, match="more than 262,144 lists and objects"):
        parse_object(body(MAX_CONTAINERS - 1))


def test_128_prompts_of_a_whole_window_are_no_large_body() -> None:
    ids = ",".join(["1"] * 16384)
    body = f'{{"prompt":[{",".join([f"[{ids}]"] * 128)}]}}'.encode()
    assert len(parse_completion(body).prompts) == 128


def test_too_many_sequences_are_refused_before_any_is_made() -> None:
    with pytest.raises(RequestError) as refused:
        parse_completion(body_of(prompt=["x"] * MAX_SEQUENCES, n=2))
    assert str(MAX_SEQUENCES) in refused.value.message


@pytest.mark.parametrize(
    "fields",
    [
        {"min_tokens": 9, "max_tokens": 8},
        {"stream_options": {"include_usage": True}},
        {"best_of": 4, "n": 2},
        {"stop": [""]},
        {"stop": ["x"] * 100_000},
        {"max_tokens": 0},
        {"max_tokens": -1},
        {"max_tokens": 2**63},
        {"n": 10**6},
        {"seed": 2**64},
        {"request_id": "a\nb"},
        {"request_id": "x" * 129},
    ],
)
def test_impossible_values_are_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(RequestError) as refused:
        parse_completion(body_of(**fields))
    assert refused.value.param == next(iter(fields))


@pytest.mark.parametrize(
    "fields",
    [
        {
            "max_tokens": 3.0,
            "n": 2.0,
            "seed": -4.0,
            "top_k": 5.0,
            "min_tokens": 0.0,
            "logprobs": 1.0,
        },
        {"prompt": [1.0, 2]},
        {"prompt": [[1.0], [2, 3.0]]},
        {"stop_token_ids": [5.0], "allowed_token_ids": [7.0, 8], "logit_bias": {"5": 1.0}},
    ],
)
def test_an_integer_may_be_written_with_a_point(fields: dict[str, Any]) -> None:
    plain = json.dumps(fields).replace(".0", "").encode()
    assert b"." not in plain
    assert parse_completion(body_of(**fields)) == parse_completion(body_of(**json.loads(plain)))


@pytest.mark.parametrize(
    "fields",
    [
        {"max_tokens": 3.5},
        {"max_tokens": "3"},
        {"max_tokens": True},
        {"max_tokens": 1e300},
        {"stream": 1.0},
        {"temperature": "0.5"},
        {"temperature": "nan"},
    ],
)
def test_what_the_document_calls_no_number_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(RequestError) as refused:
        parse_completion(body_of(**fields))
    assert refused.value.param == next(iter(fields))


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (None, (False, False)),
        ({}, (False, False)),
        ({"include_usage": None}, (False, False)),
        ({"include_usage": True, "continuous_usage_stats": None}, (True, False)),
        ({"include_usage": True, "continuous_usage_stats": True}, (True, True)),
        ({"include_usage": None, "continuous_usage_stats": True}, (False, False)),
    ],
)
def test_null_in_stream_options_is_the_default(options: Any, told: tuple[bool, bool]) -> None:
    request = parse_completion(body_of(stream=True, stream_options=options))
    assert (request.include_usage, request.continuous_usage) == told


@pytest.mark.parametrize("options", [{}, {"include_usage": False}, None])
def test_stream_options_that_ask_for_nothing_need_no_stream(options: Any) -> None:
    assert parse_completion(body_of(stream_options=options)) == parse_completion(body_of())


def test_null_is_no_length() -> None:
    assert parse_completion(body_of(max_tokens=None)) == parse_completion(body_of())
    assert parse_completion(body_of()).max_tokens == 16
    for parameters in ({"max_tokens": None}, {"parameters": {"max_new_tokens": None}}):
        assert parse_generate(body_of(**parameters)) == parse_generate(body_of())


@pytest.mark.parametrize("request_id", ["a b", "run/7 [x]", "~" * 128])
def test_any_printable_text_is_the_id_of_a_request(request_id: str) -> None:
    assert parse_completion(body_of(request_id=request_id)).request_id == request_id


def test_unknown_fields_are_ignored() -> None:
    assert parse_completion(body_of(unheard_of=[1])) == parse_completion(body_of())


def test_generate_is_greedy_unless_asked_otherwise() -> None:
    for body, temperature in (
        (b'{"prompt": "x"}', 0),
        (b'{"inputs": "x", "parameters": {"do_sample": true}}', 1),
        (b'{"prompt": "x", "temperature": 0.5}', 0.5),
    ):
        assert parse_generate(body).sampling.temperature == temperature


def test_generate_takes_the_names_of_text_generation_inference() -> None:
    parsed = parse_generate(b'{"inputs": "x", "parameters": {"max_new_tokens": 3}}')
    assert (parsed.prompts, parsed.max_tokens, parsed.has_default_length) == (("x",), 3, False)


@pytest.mark.parametrize(
    "body",
    [
        b'{"inputs": "x", "prompt": "y"}',
        b'{"prompt": "x", "max_tokens": 1, "parameters": {"max_new_tokens": 1}}',
        b'{"prompt": "x", "parameters": []}',
        b'{"prompt": ["x", "y"]}',
        b'{"prompt": "x", "n": 2}',
        b'{"prompt": "x", "echo": true}',
        b'{"prompt": "x", "logprobs": 1}',
        b'{"prompt": "x", "prompt_logprobs": 1}',
        b'{"prompt": "x", "return_tokens_as_token_ids": true}',
        b'{"prompt": "x", "do_sample": false, "temperature": 1}',
    ],
)
def test_generate_refuses_what_it_cannot_mean(body: bytes) -> None:
    with pytest.raises(RequestError):
        parse_generate(body)


@pytest.mark.parametrize(
    ("parameters", "temperature"),
    [({"top_p": 0.9}, 1.0), ({"top_k": 50, "seed": 7}, 1.0), ({"min_p": 0.1}, 1.0),
     ({"top_p": 1.0}, 0.0), ({"top_k": -1}, 0.0), ({"seed": 7}, 0.0),
     ({"top_p": 0.9, "do_sample": False}, 0.0)],
)  # fmt: skip
def test_to_narrow_the_choice_is_to_ask_generate_for_one(
    parameters: dict[str, Any], temperature: float
) -> None:
    body = json.dumps({"inputs": "x", "parameters": parameters}).encode()
    assert parse_generate(body).sampling.temperature == temperature


def test_generate_keeps_the_salt_of_its_prefix_cache() -> None:
    assert parse_generate(b'{"prompt": "x", "cache_salt": "tenant-a"}').cache_salt == "tenant-a"
    assert parse_generate(b'{"prompt": "x"}').cache_salt == ""


def test_one_best_of_no_named_number_is_accepted() -> None:
    assert parse_completion(body_of(best_of=1, n=None)).sampling.n == 1
    with pytest.raises(UnsupportedParameter):
        parse_completion(body_of(best_of=2, n=None))
