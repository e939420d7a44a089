"""Any bytes are a chat or a 4xx that names the field; what is sent is what a template sees."""

import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sluice_core.errors import RequestError, UnsupportedParameter
from sluice_frontend.api.chat import CHAT_FIELDS, CHAT_NEUTRAL, MAX_ITEMS, parse_chat
from sluice_frontend.api.generate import parse_completion
from sluice_frontend.api.sampling_params import defaults_of

HELLO = {"role": "user", "content": "hello"}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"x": 1}}}


def body_of(**fields: Any) -> bytes:
    """A chat's body with one message, and `fields`."""
    return json.dumps({"messages": [HELLO], **fields}).encode()


ANY = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=6,
)


@settings(max_examples=300)
@given(st.sampled_from(sorted({*CHAT_FIELDS, *CHAT_NEUTRAL})), ANY)
def test_any_value_of_a_known_field_is_honoured_or_refused_by_its_name(
    name: str, value: Any
) -> None:
    try:
        parse_chat(body_of(**{name: value}))
    except RequestError as refused:
        assert refused.param == name  # noqa: PT017 - either outcome is right


@pytest.mark.parametrize("name", sorted(CHAT_NEUTRAL.keys() - CHAT_FIELDS))
def test_a_neutral_value_is_accepted_and_any_other_is_refused_by_name(name: str) -> None:
    for value in CHAT_NEUTRAL[name]:
        parse_chat(body_of(**{name: value}))
    with pytest.raises(UnsupportedParameter) as refused:
        parse_chat(body_of(**{name: "surely not neutral"}))
    assert refused.value.param == name


@pytest.mark.parametrize(
    "message",
    [
        {"role": "stranger", "content": "x"},
        {"content": "x"},
        {"role": "user", "content": 1},
        {"role": "user", "content": [1]},
        {"role": "user", "content": [{"type": "refusal"}]},
        {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]},
        {"role": "user", "content": [{"type": "text"}]},
        {"role": "assistant", "tool_calls": [{}]},
        {"role": "assistant", "audio": {"id": "x"}},
        "x",
        None,
    ],
)
def test_a_message_that_is_none_is_refused(message: Any) -> None:
    with pytest.raises(RequestError) as refused:
        parse_chat(body_of(messages=[message]))
    assert refused.value.param == "messages"


@pytest.mark.parametrize(
    ("arguments", "found"),
    [
        ('{"x": 1}', {"x": 1}),
        ({"x": 1}, {"x": 1}),
        *((odd, {}) for odd in ("", None, "no json", "[1]", "7", "null", "[" * 100_000)),
    ],
)
def test_nulls_are_left_out_and_arguments_become_objects(arguments: Any, found: Any) -> None:
    """As vLLM's _postprocess_messages has it, for templates loop over an object's items."""
    call = {"id": "1", "function": {"name": "f", "arguments": arguments}}
    sent = {"role": "assistant", "content": None, "refusal": None, "tool_calls": [call]}
    (message,) = parse_chat(body_of(messages=[sent])).conversation.messages
    assert message == {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            {"type": "function", "id": "1", "function": {"name": "f", "arguments": found}},
        ],
    }


def test_arguments_that_are_left_out_are_an_empty_object() -> None:
    sent = {"role": "assistant", "tool_calls": [{"function": {"name": "f"}}]}
    (message,) = parse_chat(body_of(messages=[sent])).conversation.messages
    assert message["tool_calls"][0]["function"] == {"name": "f", "arguments": {}}


@pytest.mark.parametrize(
    ("sent", "found"),
    [
        ({"reasoning": "a"}, "a"),
        ({"reasoning_content": "a"}, "a"),
        ({"reasoning_content": "b", "reasoning": "a"}, "a"),
        ({"reasoning_content": "a", "reasoning": None}, "a"),
    ],
)
def test_what_an_assistant_thought_has_both_names(sent: dict[str, Any], found: str) -> None:
    (message,) = parse_chat(body_of(messages=[{"role": "assistant", **sent}])).conversation.messages
    assert (message["reasoning"], message["reasoning_content"]) == (found, found)


def test_an_empty_name_is_none() -> None:
    for name in ("", "Ann", "x" * 300):
        sent = {**HELLO, "name": name}
        (message,) = parse_chat(body_of(messages=[sent])).conversation.messages
        assert message == (sent if name else HELLO)


def test_a_field_of_a_message_that_is_not_known_reaches_the_template() -> None:
    sent = {**HELLO, "weight": 3}
    assert parse_chat(body_of(messages=[sent])).conversation.messages == (sent,)


@pytest.mark.parametrize(
    ("fields", "max_tokens"),
    [
        ({}, None),
        ({"max_tokens": 3}, 3),
        ({"max_completion_tokens": 3}, 3),
        ({"max_completion_tokens": 3, "max_tokens": 4}, 3),
        ({"max_completion_tokens": None, "max_tokens": 4}, 4),
    ],
)
def test_both_names_of_the_length_are_read(fields: dict[str, int], max_tokens: int | None) -> None:
    assert parse_chat(body_of(**fields)).completion.max_tokens == max_tokens


def test_a_checkpoints_length_is_that_of_chats_that_name_none() -> None:
    """As in vLLM, where `--generation-config auto` caps no length that is named."""
    defaults = defaults_of({"max_new_tokens": 5})
    for fields, length in (({}, (5, True)), ({"max_tokens": 9}, (9, False))):
        found = parse_chat(body_of(**fields), defaults).completion
        assert (found.max_tokens, found.has_default_length) == length
    assert parse_completion(b'{"prompt": "x"}', defaults).max_tokens == 16
    with pytest.raises(RequestError, match="min_tokens 6 is over the 5 tokens"):
        parse_chat(body_of(min_tokens=6), defaults)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"top_logprobs": 1}, "top_logprobs"),
        ({"add_generation_prompt": True, "continue_final_message": True}, "continue_final_message"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"eos_token": "x"}}, "chat_template_kwargs"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
    ],
)
def test_impossible_values_are_refused(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestError) as refused:
        parse_chat(body_of(**fields))
    assert refused.value.param == param


def test_continuing_a_message_begins_no_new_one() -> None:
    assert parse_chat(body_of()).conversation.add_generation_prompt
    continued = parse_chat(body_of(continue_final_message=True)).conversation
    assert not continued.add_generation_prompt


def test_what_a_template_reads_keeps_its_numbers() -> None:
    chat = parse_chat(body_of(max_tokens=3.0, chat_template_kwargs={"share": 1.0, "all": [2.0]}))
    assert chat.completion.max_tokens == 3
    assert repr(dict(chat.conversation.variables)) == "{'share': 1.0, 'all': [2.0]}"


def test_tools_are_hidden_when_none_may_be_called() -> None:
    assert parse_chat(body_of(tools=[TOOL])).conversation.tools == (TOOL,)
    assert parse_chat(body_of(tools=[TOOL], tool_choice="none")).conversation.tools == ()


def test_log_probabilities_are_asked_for_in_two_fields() -> None:
    asked: list[dict[str, Any]] = [
        {},
        {"top_logprobs": 0},
        {"logprobs": True},
        {"logprobs": True, "top_logprobs": 3},
    ]
    found = [parse_chat(body_of(**fields)).completion.sampling.engine.logprobs for fields in asked]
    assert found == [None, None, 0, 3]


def test_a_lone_surrogate_is_refused_however_deep_it_is() -> None:
    with pytest.raises(RequestError, match="surrogate"):
        parse_chat(body_of(messages=[{**HELLO, "x": [[["\ud800"]]]}]))
    with pytest.raises(RequestError, match="messages holds a lone surrogate"):
        parse_chat(body_of(messages=[{**HELLO, "\ud800": 1}]))


@pytest.mark.parametrize("value", [None, True, False])
def test_at_most_one_call_may_be_asked_for(value: bool | None) -> None:
    parse_chat(body_of(tools=[TOOL], parallel_tool_calls=value))


def test_what_a_provider_sells_is_accepted_and_asks_for_nothing() -> None:
    plain = parse_chat(body_of())
    for tier in ("auto", "flex", "priority", None):
        assert parse_chat(body_of(service_tier=tier, verbosity="medium", store=True)) == plain
    with pytest.raises(UnsupportedParameter):
        parse_chat(body_of(verbosity="low"))


PART = {"type": "text", "text": "x"}
CALL = {"function": {"name": "f"}}


@pytest.mark.parametrize(
    ("field", "many"),
    [
        ("messages", lambda num: [HELLO] * num),
        ("tools", lambda num: [TOOL] * num),
        ("documents", lambda num: [{"text": "x"}] * num),
        ("messages", lambda num: [{"role": "user", "content": [PART] * num}]),
        ("messages", lambda num: [{"role": "user", "content": ["x"] * num}]),
        ("messages", lambda num: [{"role": "assistant", "tool_calls": [CALL] * num}]),
    ],
    ids=["messages", "tools", "documents", "parts", "texts", "calls"],
)
def test_what_a_template_loops_over_is_bounded(field: str, many: Callable[[int], Any]) -> None:
    assert parse_chat(body_of(**{field: many(MAX_ITEMS)}))
    with pytest.raises(RequestError, match="4096") as refused:
        parse_chat(body_of(**{field: many(MAX_ITEMS + 1)}))
    assert refused.value.param == field


@pytest.mark.parametrize(
    ("message", "noun"),
    [
        ({"role": "user", "content": ["x"] * MAX_ITEMS}, "parts of contents"),
        ({"role": "assistant", "tool_calls": [CALL] * MAX_ITEMS}, "tool calls"),
    ],
    ids=["parts", "calls"],
)
def test_and_in_all_messages_together(message: dict[str, Any], noun: str) -> None:
    assert parse_chat(body_of(messages=[message] * 4))
    with pytest.raises(RequestError, match=f"{5 * MAX_ITEMS} {noun} are over") as refused:
        parse_chat(body_of(messages=[message] * 5))
    assert refused.value.param == "messages"


@pytest.mark.parametrize(
    ("message", "content"),
    [
        ({"content": []}, ""),
        ({"content": ["a", {"type": "text", "text": "b", "x": 1}]}, ["a", "b"]),
        ({"content": [{"type": "refusal", "refusal": "no"}]}, ["no"]),
        ({"content": [{"type": "input_text", "text": "a"}]}, ["a"]),
        ({"content": [{"type": "output_text", "text": "a", "annotations": []}]}, ["a"]),
        ({"content": [{"type": "thinking", "thinking": "a", "closed": True}]}, ["a"]),
        ({"content": [{"type": "text", "text": None}, "a"]}, ["a"]),
        ({"content": [{"type": "refusal", "refusal": None}]}, ""),
        ({"content": None, "refusal": "no"}, "no"),
        ({"content": "a", "refusal": "no"}, ["a", "no"]),
        ({"content": [{"type": "text", "text": "a"}], "refusal": "no"}, ["a", "no"]),
        ({"content": "a", "refusal": None}, "a"),
    ],
)
def test_texts_and_refusals_are_the_text_of_a_message(message: Any, content: Any) -> None:
    chat = parse_chat(body_of(messages=[{"role": "assistant", **message}]))
    (found,) = chat.conversation.messages
    assert "refusal" not in found
    if isinstance(found["content"], list):
        assert all(part["type"] == "text" for part in found["content"])
        assert [part["text"] for part in found["content"]] == content
    else:
        assert found["content"] == content


@pytest.mark.parametrize("kind", ["image_url", "input_audio", "file", 1, None, ["text"]])
def test_parts_that_are_no_text_are_refused_by_their_kind(kind: Any) -> None:
    part = {"type": kind, "image_url": {"url": "x"}}
    with pytest.raises(UnsupportedParameter, match="only text parts are supported") as refused:
        parse_chat(body_of(messages=[HELLO, {"role": "user", "content": [part]}]))
    assert refused.value.param == "messages"
    assert json.dumps(kind) in refused.value.message


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        (
            {"messages": [HELLO, {"role": "function"}]},
            'may be "assistant" or "developer" or "system" or "tool" or "user"',
        ),
        ({"tools": [{**TOOL, "type": "custom"}]}, 'it may be "function"'),
    ],
)
def test_a_word_that_is_not_known_is_refused_with_those_that_are(
    fields: dict[str, Any], words: str
) -> None:
    with pytest.raises(RequestError) as refused:
        parse_chat(body_of(**fields))
    assert words in refused.value.message
