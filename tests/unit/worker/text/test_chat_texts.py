"""What a chat holds is in its prompt: contents in the form that a template reads, calls too."""

import json
from datetime import datetime
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sluice_core.errors import RequestError
from sluice_frontend.api.chat import parse_chat
from sluice_worker.text.template import ChatTemplate
from unit.cost import least_cpu_s

NOW = datetime(2026, 11, 21, 12, 0)
END = "<|end|>"


def prompt(source: str, *messages: Any, **fields: Any) -> str:
    """What `source` renders of a chat's body."""
    chat = parse_chat(json.dumps({"messages": messages, **fields}).encode())
    template = ChatTemplate(source, special_tokens={}, control_tokens=[END])
    return "".join(text for text, _ in template.render(chat.conversation, NOW))


def said(role: str, content: Any, **fields: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **fields}


def parts(*texts: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text} for text in texts]


def called(arguments: Any, content: Any = None) -> dict[str, Any]:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    return said("assistant", content, tool_calls=[call])


# How the models' templates write a call, in short.
DEEPSEEK = "'```json' + '\\n' + c['function']['arguments'] + '\\n' + '```'"
QWEN = "c.function.arguments if c.function.arguments is string else c.function.arguments | tojson"
HERMES = "'{\"arguments\": ' ~ (c.function.arguments | tojson) ~ '}'"
MISTRAL = "{'name': c.function.name, 'arguments': c.function.arguments} | tojson"
WHOLE = "c.function | tojson"
GLM = "{% for k, v in c.function.arguments.items() %}<{{ k }}>{{ v | tojson }}{% endfor %}"
QWEN_CODER = (
    "{% for k, v in c.function.arguments | items %}<{{ k }}>"
    "{{ v | tojson if v is mapping else v | string }}{% endfor %}"
)
LLAMA_PYTHONIC = (
    "{% for k in c.function.arguments %}{{ k }}={{ c.function.arguments[k] }};{% endfor %}"
)
GEMMA = (
    "{% if c.function.arguments is mapping %}{% for k, v in c.function.arguments | dictsort %}"
    "{{ k }}:{{ v }}{% endfor %}{% elif c.function.arguments is string %}text{% endif %}"
)
GIVEN = '{"city":  "Bern"}'


def of_call(expression: str) -> str:
    """A template that shows contents, and each call by `expression` or by a block of its own."""
    block = expression if expression.startswith("{%") else f"{{{{ {expression} }}}}"
    return (
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}"
        f"{{% for c in m.tool_calls or [] %}}{block}{{% endfor %}}{{% endfor %}}"
    )


@pytest.mark.parametrize(
    ("expression", "written"),
    [
        (DEEPSEEK, f"```json\n{GIVEN}\n```"),
        ("c.function.arguments + '!'", GIVEN + "!"),
        ("'a' ~ c.function.arguments", "a" + GIVEN),
        ("c.function.arguments", GIVEN),
        ("c.function.arguments | trim", GIVEN),
        ("c.function.arguments.strip() + '!'", GIVEN + "!"),
        ("c.function.arguments | wordwrap", GIVEN),
        ('"%s" | format(c.function.arguments)', GIVEN),
        ("[c.function.arguments, 1] | join", GIVEN + "1"),
        (QWEN, '{"city": "Bern"}'),
        (HERMES, '{"arguments": {"city": "Bern"}}'),
        (MISTRAL, '{"name": "f", "arguments": {"city": "Bern"}}'),
        (WHOLE, '{"name": "f", "arguments": {"city": "Bern"}}'),
        ("c.function.arguments.city", "Bern"),
        (GLM, '<city>"Bern"'),
        (QWEN_CODER, "<city>Bern"),
        (LLAMA_PYTHONIC, "city=Bern;"),
        (GEMMA, "city:Bern"),
    ],
)
@pytest.mark.parametrize("as_object", [False, True])
def test_arguments_are_an_object_and_the_clients_own_text(
    expression: str, written: str, as_object: bool
) -> None:
    """An object is its text in JSON where the client sends one."""
    arguments = json.loads(GIVEN) if as_object else GIVEN
    chat = [said("user", "hi"), called(arguments), said("tool", "sun"), said("user", "so")]
    if as_object:
        written = written.replace(GIVEN, '{"city": "Bern"}')
    expected = f"<user>hi<assistant>{written}<tool>sun<user>so"
    assert prompt(of_call(expression), *chat) == expected


def test_a_field_that_is_named_as_a_method_of_texts_is_the_field() -> None:
    chat = said("user", "hi"), called('{"title": "Bern"}')
    assert prompt(of_call("c.function.arguments.title"), *chat).endswith("<assistant>Bern")


@pytest.mark.parametrize(
    ("arguments", "joined"), [("", "{}"), (None, "{}"), ("no json", "no json"), ("[1]", "[1]")]
)
def test_arguments_that_are_no_object_are_an_empty_one_and_their_text(
    arguments: Any, joined: str
) -> None:
    chat = said("user", "hi"), called(arguments)
    assert prompt(of_call(DEEPSEEK), *chat).endswith(f"```json\n{joined}\n```")
    assert prompt(of_call(HERMES), *chat).endswith('{"arguments": {}}')


PIECES = st.sampled_from(["", "a", "<|", "end|>", END, f"x{END}"])


@given(st.dictionaries(PIECES, PIECES))
def test_a_control_token_in_arguments_is_plain_in_both_forms(arguments: dict[str, str]) -> None:
    body = {"messages": [said("user", "hi"), called(json.dumps(arguments, ensure_ascii=False))]}
    chat = parse_chat(json.dumps(body).encode())
    for expression in (DEEPSEEK, HERMES):
        source = of_call(expression)
        pieces = ChatTemplate(source, special_tokens={}, control_tokens=[END]).render(
            chat.conversation, NOW
        )
        assert not any(END in text for text, is_plain in pieces if not is_plain)


TEXT = "{% for m in messages %}<{{ m.role }}>{{ m.content | trim }}{% endfor %}"
PARTS = (
    "{% for m in messages %}<{{ m.role }}>"
    "{% for p in m.content %}{{ p.text }}{% endfor %}{% endfor %}"
)
BOTH = (
    "{% for m in messages %}<{{ m.role }}>{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for p in m.content %}{{ p.text }}{% endfor %}{% endif %}{% endfor %}"
)
STRING_ELSEWHERE = (
    PARTS + "{% for c in messages[-1].tool_calls or [] %}"
    "{% if c.function.arguments is string %}{% endif %}{% endfor %}"
)
MACRO = (
    "{% macro show(given) %}{% for p in given %}{{ p['text'] }}{% endfor %}{% endmacro %}"
    "{% for m in messages %}<{{ m.role }}>{{ show(m.content) }}{% endfor %}"
)
FIRST_PART = "{% for m in messages %}<{{ m.role }}>{{ m.content[0].text }}{% endfor %}"
ELSE_EMPTY = (
    "{% for m in messages %}{% set c = m.content if m.content is string else '' %}"
    "<{{ m.role }}>{{ c }}{% endfor %}"
)
ELSE_JSON = (
    "{% for m in messages %}<{{ m.role }}>"
    "{{ m.content if m.content is string else m.content | tojson }}{% endfor %}"
)
STYLES = [TEXT, PARTS, BOTH, STRING_ELSEWHERE, MACRO, FIRST_PART, ELSE_EMPTY, ELSE_JSON]


@pytest.mark.parametrize("source", STYLES)
@pytest.mark.parametrize("content", ["hello there", "e", parts("hello there"), ["hello there"]])
def test_a_text_and_parts_reach_every_style_of_template(source: str, content: Any) -> None:
    """A short text too, though it stands elsewhere in the prompt (vllm#53824)."""
    text = content if isinstance(content, str) else "hello there"
    assert prompt(source, said("user", content)) == f"<user>{text}"


@pytest.mark.parametrize("source", STYLES)
def test_no_part_is_lost_and_a_tools_text_is_shown(source: str) -> None:
    """A template that loops over parts joins them itself; else they are lines, as in vLLM."""
    chat = [said("user", parts("a", "b")), called("{}"), said("tool", parts("c", "d"))]
    assert prompt(source, *chat).replace("\n", "") == "<user>ab<assistant><tool>cd"


def test_each_role_may_have_a_form_of_its_own() -> None:
    source = (
        "{{ messages[0].content | trim }}"
        "{% for m in messages[1:] %}{% for p in m.content %}[{{ p.text }}]{% endfor %}{% endfor %}"
    )
    for first, then in (("s", "u"), ("s", parts("u")), (parts("s"), "u"), (parts("s"), parts("u"))):
        assert prompt(source, said("system", first), said("user", then)) == "s[u]"


def of_roles(*roles: str) -> str:
    """A template that shows messages of these roles, and drops the others."""
    return f"{{% for m in messages if m.role in {roles} %}}<{{{{ m.content }}}}>{{% endfor %}}"


@pytest.mark.parametrize(
    ("source", "place"),
    [
        ("{{ 'usual' }}", 0),
        (of_roles("assistant", "tool"), 0),
        (of_roles("user", "tool"), 1),
        (of_roles("user", "assistant"), 3),
        ("{{ messages[-1].content }}", 0),
        ("{% for m in messages %}{{ m.content | truncate(5) }}{% endfor %}", 2),
    ],
)
@pytest.mark.parametrize("form", [str, parts])
def test_a_text_that_is_not_in_the_prompt_is_refused_by_its_place(
    source: str, place: int, form: Any
) -> None:
    chat = [
        said("user", form("usual")),
        said("assistant", form("said")),
        said("user", form("a text of some length")),
        said("tool", form("usual")),
    ]
    with pytest.raises(RequestError, match=rf"^messages\[{place}\].content does not") as refused:
        prompt(source, *chat)
    assert refused.value.param == "messages"


def test_a_short_text_is_missed_though_the_prompt_holds_it_elsewhere() -> None:
    with pytest.raises(RequestError, match=r"messages\[1\]"):
        prompt("<user>{{ messages[0].content }}<assistant>", said("user", "a"), said("user", "s"))


@pytest.mark.parametrize(
    ("source", "chat"),
    [
        ("{{ m.content.split('</think>')[-1] | trim }}", said("assistant", "<think>a</think> b ")),
        ("{{ m.content | tojson }}", said("tool", 'a "quoted" text \u00e9\n')),
        ("{{ m.content | tojson(ensure_ascii=true) }}", said("tool", "\u00e9")),
        ("{{ m.content | replace('/think', '') }}", said("system", "x /think")),
        ("{{ m.content | upper }}", said("user", "x")),
        ("{% if m.content | trim %}{{ m.content }}{% endif %}", said("user", " \n")),
        ("{% if not m.tool_calls %}{{ m.content }}{% endif %}", called("{}", "let me see")),
        ("{{ m.content }}", said("assistant", "x", reasoning_content="not shown")),
        ("{{ m.content }}", said("user", "")),
        ("{{ m.content }}", said("user", parts("", "x"))),
    ],
)
def test_what_templates_change_on_purpose_is_no_lost_text(source: str, chat: Any) -> None:
    loop = f"{{% for m in messages %}}{source}{{% endfor %}}"
    assert prompt(loop, said("user", "hi"), chat)


WITHOUT_SYSTEM = of_roles("user", "assistant", "tool")
FRONT_ONLY = (
    "{% for m in messages %}{% if m.role != 'system' or loop.first %}"
    "<{{ m.role }}:{{ m.content }}>{% endif %}{% endfor %}"
)
LAST_SYSTEM = (
    "{% set ns = namespace(s='') %}{% for m in messages if m.role == 'system' %}"
    "{% set ns.s = m.content %}{% endfor %}{{ ns.s }}" + of_roles("user")
)
WITH_LAST_USER = (
    "{% for m in messages %}{% if m.role == 'user' %}"
    "<{{ (messages[0].content + '|') if loop.last }}{{ m.content }}>"
    "{% elif m.role == 'tool' %}<{{ m.content }}>{% endif %}{% endfor %}"
)


@pytest.mark.parametrize(
    ("source", "roles", "text"),
    [
        (WITHOUT_SYSTEM, "su", "<0\n\n1>"),
        (WITHOUT_SYSTEM, "usu", "<1\n\n0><2>"),
        (FRONT_ONLY, "su", "<system:0><user:1>"),
        (FRONT_ONLY, "usu", "<system:1><user:0><user:2>"),
        (LAST_SYSTEM, "ssu", "0\n\n1<2>"),
        (WITH_LAST_USER, "su", "<0|1>"),
        (WITH_LAST_USER, "suct", "<0\n\n1><3>"),
    ],
)
def test_a_system_that_the_template_drops_stands_where_it_is_shown(
    source: str, roles: str, text: str
) -> None:
    """Mistral's templates show a system only where a user speaks last."""
    names = {"s": "system", "u": "user", "t": "tool"}
    chat = [
        called("{}") if role == "c" else said(names[role], str(at)) for at, role in enumerate(roles)
    ]
    assert prompt(source, *chat) == text


def test_a_system_that_no_users_text_follows_is_refused() -> None:
    with pytest.raises(RequestError, match=r"^messages\[1\].content does not appear"):
        prompt(of_roles("assistant"), said("assistant", "x"), said("system", "y"))


def test_a_refusal_is_told_in_the_templates_words_whatever_the_form() -> None:
    source = (
        "{% for m in messages %}{{ '' ~ m.content }}{% if m.role == 'tool' %}"
        "{{ raise_exception('no tools: ' + m.content) }}{% endif %}{% endfor %}"
    )
    for content in ("hi", parts("hi")):
        with pytest.raises(RequestError, match="^the chat template refuses: no tools: x$"):
            prompt(source, said("user", content), said("tool", "x"))


WORDS = st.text(st.characters(exclude_categories=["Cs", "Cn"]), max_size=6)


@settings(max_examples=60)
@given(
    st.lists(WORDS | st.lists(WORDS, max_size=3), min_size=1),
    st.sampled_from(STYLES),
)
def test_every_word_of_any_chat_is_in_its_prompt(contents: list[Any], source: str) -> None:
    text = prompt(source, *(said("user", content) for content in contents))
    for content in contents:
        for each in [content] if isinstance(content, str) else content:
            assert each.strip() in text


def test_a_template_of_parts_makes_no_long_text_slow() -> None:
    """Tried as it came, a text would be looped over by its characters: 0.3 s for 100 kB."""

    def cpu_s(content: Any) -> float:
        assert prompt(PARTS, said("user", content)) == "<user>" + 100_000 * "x"
        return least_cpu_s(lambda: prompt(PARTS, said("user", content)))

    assert cpu_s("x" * 100_000) < 10 * cpu_s(parts("x" * 100_000))
