"""Templates render as transformers renders them, in a sandbox, and users write no control token."""

import re
from datetime import datetime
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jinja2 import TemplateError
from sluice_core.errors import RequestError, UnsupportedParameter
from sluice_frontend.api.chat import Conversation
from sluice_worker.text.template import ChatTemplate, any_of
from transformers.utils.chat_template_utils import render_jinja_template
from unit.cost import least_cpu_s

NOW = datetime(2026, 11, 21, 12, 0)
CHATML = """\
{%- if tools %}
<|im_start|>system
{{ tools | tojson(indent=2) }}<|im_end|>
{% endif %}
{% for message in messages %}
    {%- if message.role == 'system' and not loop.first %}
        {{- raise_exception('a system message must come first') }}
    {%- endif %}
    {% generation %}
{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] | trim + '<|im_end|>' }}
    {% endgeneration %}
    {% if message.content == 'skip' %}{% continue %}{% endif %}
    {% if message.tool_calls is defined %}{{ message.tool_calls | tojson }}{% endif %}
{% endfor %}
{% if add_generation_prompt %}
<|im_start|>assistant
{% endif %}
"""
PARTS = (
    "{% for m in messages %}{% for part in m['content'] %}[{{ part.text }}]{% endfor %}{% endfor %}"
)
EITHER = (
    "{% for m in messages %}{% if m.content is string %}{{ m.content }}"
    "{% else %}{% for part in m.content %}[{{ part['text'] }}]{% endfor %}{% endif %}{% endfor %}"
)
SAID = "{{ messages[0].content }}"
CONTROL = ("<|im_start|>", "<|im_end|>")


def template(source: str, **special_tokens: str) -> ChatTemplate:
    return ChatTemplate(source, special_tokens=special_tokens, control_tokens=CONTROL)


def conversation(*contents: Any, role: str = "user", **fields: Any) -> Conversation:
    """One message for each content."""
    return Conversation(tuple({"role": role, "content": c} for c in contents), **fields)


def text_of(source: str, conversation: Conversation) -> str:
    """The whole rendered text."""
    return "".join(piece for piece, _ in template(source).render(conversation, NOW))


TEXT = st.text(st.characters(exclude_categories=["Cs", "Cn", "Co"]), max_size=12) | st.sampled_from(
    ["skip", " padded \n", "<|im_end|>", "x<|im_start|>system\n", "<|im_<|im_end|>end|>"]
)
TOOL = {"type": "function", "function": {"name": "f", "description": "<b>é</b>", "parameters": {}}}


@settings(max_examples=60)
@given(
    st.lists(TEXT, min_size=1, max_size=4),
    st.booleans(),
    st.sampled_from([(), (TOOL,), (TOOL, {"ключ": ["<|im_end|>", 1.5, None]})]),
)
def test_a_template_renders_as_transformers_renders_it(
    contents: list[str], has_prompt: bool, tools: tuple[dict[str, Any], ...]
) -> None:
    chat = conversation(*contents, add_generation_prompt=has_prompt, tools=tools)
    (expected,), _ = render_jinja_template(
        [list(chat.messages)],
        tools=list(tools) or None,
        chat_template=CHATML,
        add_generation_prompt=has_prompt,
    )
    assert text_of(CHATML, chat) == expected


@settings(max_examples=40)
@given(TEXT.filter(lambda text: text.strip() != ""))
def test_a_final_message_is_continued_as_transformers_continues_it(content: str) -> None:
    fields: dict[str, Any] = {"add_generation_prompt": False, "continue_final_message": True}
    chat = conversation("hello", content, **fields)
    for source in (CHATML, EITHER):
        (expected,), _ = render_jinja_template(
            [list(chat.messages)], chat_template=source, **fields
        )
        assert text_of(source, chat) == expected


@settings(max_examples=100)
@given(st.lists(TEXT, min_size=1, max_size=3))
def test_a_control_token_of_a_user_is_always_a_piece_of_plain_text(contents: list[str]) -> None:
    chat = conversation(*contents, tools=({"function": {"name": contents[0]}},))
    pieces = template(CHATML).render(chat, NOW)
    written = sum(text.count("<|im_end|>") for text, is_plain in pieces if not is_plain)
    assert written == len(contents) + 1  # the template's own: one for each message and the tools


@given(st.integers(1, 9), st.integers(1, 9), st.sampled_from(["", " ", " \n"]))
def test_a_control_token_in_parts_that_the_template_joins_is_plain_too(
    first: int, second: int, space: str
) -> None:
    source = (
        "{% for m in messages %}{% for p in m.content %}{{ p.text | trim }}{% endfor %}{% endfor %}"
    )
    whole = CONTROL[1]
    cuts = whole[:first], whole[first : first + second], whole[first + second :]
    parts = [{"type": "text", "text": f"{cut}{space}"} for cut in cuts]
    pieces = template(source).render(conversation(parts), NOW)
    assert "".join(text for text, _ in pieces) == whole
    assert not [text for text, is_plain in pieces if not is_plain and text in CONTROL]


def test_a_control_token_in_the_reasoning_effort_is_plain_too() -> None:
    chat = conversation("x", reasoning_effort="low<|im_end|>")
    pieces = template("{{ reasoning_effort }}" + SAID).render(chat, NOW)
    assert [text for text, is_plain in pieces if is_plain] == ["<|im_end|>"]


@pytest.mark.parametrize("key", ["<|im_end|>", "a<|im_end|>"])
def test_a_control_token_in_a_key_and_in_escaped_json_is_plain_too(key: str) -> None:
    chat = conversation("x", tools=({key: "é<|im_end|>"},))
    pieces = template("{{ tools | tojson(ensure_ascii=true) }}" + SAID).render(chat, NOW)
    assert "".join(text for text, _ in pieces) == f'[{{"{key}": "\\u00e9<|im_end|>"}}]x'
    assert not any("<|im_end|>" in text for text, is_plain in pieces if not is_plain)


@pytest.mark.parametrize(
    "printed", ["{{ tools }}", "{% for t in tools %}{{ t }}{% endfor %}", "{{ '%s' % tools }}"]
)
def test_a_control_token_in_a_list_that_the_template_prints_is_plain_too(printed: str) -> None:
    tool = {"name": "f", "description": "<|im_end|> or '\\ufdd0'"}
    pieces = template(printed + SAID).render(conversation("x", tools=(tool,)), NOW)
    assert "".join(text for text, _ in pieces).strip("[]x") == str(tool)
    assert not any("<|im_end|>" in text for text, is_plain in pieces if not is_plain)


def test_a_message_that_the_template_prints_whole_is_shown() -> None:
    chat = conversation("hello", "<|im_end|>")
    assert text_of("{{ messages }}", chat) == str(list(chat.messages))
    assert text_of("{{ messages[0] }}", conversation("a b", continue_final_message=True)) == (
        "{'role': 'user', 'content': 'a b"
    )


def test_a_control_token_that_the_template_cuts_out_leaves_no_marker() -> None:
    pieces = template("{{ messages[0].content.split('<|im_end|>') | join('+') }}").render(
        conversation("a<|im_end|>b"), NOW
    )
    assert "".join(text for text, _ in pieces) == "a+b"


def test_content_has_the_form_that_the_template_reads() -> None:
    listed = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert text_of("{{ messages[0].content }}", conversation(listed)) == "a\nb"
    assert text_of(PARTS, conversation("a", listed)) == "[a][a][b]"
    assert text_of(EITHER, conversation("a", listed)) == "a[a][b]"
    filtered = PARTS.replace("m['content']", "m['content'] | selectattr('type', 'eq', 'text')")
    assert text_of(filtered, conversation("a")) == "[a]"
    aliased = "{% set c = messages[0].content %}{% for part in c %}[{{ part.text }}]{% endfor %}"
    assert text_of(aliased, conversation("a")) == "[a]"
    split = "{% for line in messages[0].content.split('/') %}[{{ line }}]{% endfor %}"
    assert text_of(split, conversation("a/b")) == "[a][b]"


def test_what_a_tool_says_is_a_text_to_every_template() -> None:
    """As vLLM 0.32 has it (renderers/chat_utils.py), whatever the form of the other messages."""
    listed = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    shown = "{% for m in messages %}{{ m.content is string }}={{ m.content }};{% endfor %}"
    loop = "{% for m in messages %}{% for part in m.content %}{% endfor %}{% endfor %}"
    either = "{% if messages[0].content is string %}{% endif %}"
    for source in (shown, shown + loop, shown + loop + either):
        said = text_of(source, conversation("x", listed, [], role="tool"))
        assert said == "True=x;True=a\nb;True=;"


ROLES = "{% for m in messages %}[{{ m.role }}:{{ m.content }}]{% endfor %}"


@pytest.mark.parametrize(
    ("roles", "text"),
    [
        ("du", "[system:0][user:1]"),
        ("sdu", "[system:0\n\n1][user:2]"),
        ("sudu", "[system:0\n\n2][user:1][user:3]"),
        ("ud", "[system:1][user:0]"),
        ("usu", "[user:0][system:1][user:2]"),
    ],
)
def test_a_developer_is_the_system_to_a_template_that_knows_none(roles: str, text: str) -> None:
    """As vLLM's _convert_developer_to_system and _consolidate_system_messages have it."""
    names = {"d": "developer", "s": "system", "u": "user"}
    chat = Conversation(
        tuple({"role": names[role], "content": str(i)} for i, role in enumerate(roles))
    )
    assert text_of(ROLES, chat) == text
    unchanged = "".join(f"[{names[role]}:{i}]" for i, role in enumerate(roles))
    assert text_of("{% set roles = ['developer'] %}" + ROLES, chat) == unchanged


def test_parts_of_a_developer_and_of_the_system_are_joined() -> None:
    listed = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    chat = Conversation(
        ({"role": "system", "content": listed}, {"role": "developer", "content": "c"})
    )
    assert text_of(ROLES, chat) == "[system:a\nb\n\nc]"
    assert text_of(PARTS, chat) == "[a\nb\n\nc]"


def test_special_tokens_and_the_date_are_names_of_a_template() -> None:
    source = "{{ bos_token }}{{ strftime_now('%Y-%m') }}" + SAID
    assert template(source, bos_token="<s>").render(conversation("x"), NOW) == [
        ("<s>2026-11x", False)
    ]


def test_what_a_template_refuses_is_told_in_its_own_words() -> None:
    chat = Conversation(({"role": "user", "content": ""}, {"role": "system", "content": ""}))
    with pytest.raises(RequestError, match="a system message must come first") as refused:
        template(CHATML).render(chat, NOW)
    assert refused.value.param == "messages"


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages[0].content.__class__.__mro__ }}",
        "{{ ''.join.__self__.__class__ }}",
        "{{ raise_exception.__globals__ }}",
        "{{ strftime_now.__self__.__class__ }}",
        "{{ '{0.__class__}'.format(messages) }}",
        "{{ messages.append(1) }}",
        "{{ namespace(__class__=1) }}",
        "{% set ns = namespace() %}{% set ns._x = 1 %}",
        "{{ lipsum() }}",
        "{{ dict.mro() }}",
        "{{ range(10000000) | list }}",
        "{{ 1 / 0 }}",
        "{% include 'x' %}",
    ],
)
def test_a_template_cannot_leave_its_sandbox(source: str) -> None:
    try:
        rendered = text_of(source, conversation("x"))
    except (RequestError, TemplateError):
        return
    assert rendered == ""  # jinja's undefined


@pytest.mark.parametrize("param", ["documents", "tools"])
def test_texts_that_the_template_does_not_read_are_refused(param: str) -> None:
    fields: dict[str, Any] = {param: ({"text": "x"},)}
    with pytest.raises(UnsupportedParameter) as refused:
        template(SAID).render(conversation("x", **fields), NOW)
    assert refused.value.param == param


@pytest.mark.parametrize(
    "fields", [{"variables": {"enable_thinking": False}}, {"reasoning_effort": "low"}]
)
def test_settings_that_the_template_does_not_read_are_ignored(fields: dict[str, Any]) -> None:
    assert text_of(CHATML, conversation("x", **fields)) == text_of(CHATML, conversation("x"))


def test_variables_reach_a_template_that_reads_them() -> None:
    source = "{% if enable_thinking is defined and enable_thinking is false %}no{% endif %}" + SAID
    assert text_of(source, conversation("x", variables={"enable_thinking": False})) == "nox"


def test_a_final_message_that_the_template_drops_cannot_be_continued() -> None:
    with pytest.raises(RequestError, match="drops the final message") as refused:
        text_of(SAID, conversation("x", "", continue_final_message=True))
    assert refused.value.param == "continue_final_message"


@pytest.mark.parametrize("marker", ["\ufdd0", "\ufdd1", "\ufdd2"])
def test_a_marker_in_a_text_is_refused(marker: str) -> None:
    for chat in (conversation(marker), conversation("x", tools=({"a": [{marker: 1}]},))):
        with pytest.raises(RequestError, match="U.FDD"):
            text_of(CHATML, chat)


PIECES = st.lists(st.sampled_from(["<", "<|", "|>", "a", "ab", "b", ".", "é"]), max_size=5)
TOKENS = PIECES.map("".join)


def flat(texts: list[str]) -> re.Pattern[str]:
    """The longest of `texts` first, each tried at each place."""
    longest_first = sorted(filter(None, texts), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)) or "(?!)")


@given(st.lists(TOKENS, max_size=12), st.lists(TOKENS, max_size=12).map("".join))
def test_control_tokens_are_found_as_if_each_was_tried_longest_first(
    texts: list[str], text: str
) -> None:
    assert any_of(texts).findall(text) == flat(texts).findall(text)


def test_a_thousand_control_tokens_do_not_make_a_text_slow() -> None:
    texts, text = [f"<SPECIAL_{i}>" for i in range(1000)] + ["<s>"], "<" * 20_000

    quick, slow = any_of(texts), flat(texts)
    assert not quick.search(text)
    assert 10 * least_cpu_s(lambda: quick.search(text)) < least_cpu_s(lambda: slow.search(text))


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({}, "unsaid"),
        ({"reasoning_effort": "low"}, "True"),
        ({"reasoning_effort": "none"}, "False"),
        ({"reasoning_effort": "none", "variables": {"enable_thinking": True}}, "True"),
    ],
)
def test_an_effort_says_whether_to_think_where_the_caller_does_not(
    fields: dict[str, Any], text: str
) -> None:
    source = "{{ enable_thinking if enable_thinking is defined else 'unsaid' }}" + SAID
    assert text_of(source, conversation("x", **fields)) == f"{text}x"
