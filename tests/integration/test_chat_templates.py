"""Templates in the styles of models' own, through the openai client and a real worker."""

from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from integration.worker_process import Worker, running_worker
from openai import OpenAI

DEEPSEEK = """\
{%- for message in messages %}
    {%- if message['role'] == 'user' %}{{ '<U>' + message['content'] }}{% endif %}
    {%- if message['role'] == 'assistant' and message['tool_calls'] is defined %}
        {%- for tool in message['tool_calls'] %}
            {{- '<C>' + tool['type'] + '<S>' + tool['function']['name'] + '\\n```json\\n' }}
            {{- tool['function']['arguments'] + '\\n```' }}
        {%- endfor %}
    {%- elif message['role'] == 'assistant' %}{{ '<A>' + message['content'] }}
    {%- endif %}
    {%- if message['role'] == 'tool' %}{{ '<T>' + message['content'] }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<A>{% endif %}"""
PARTS = """\
{%- macro written(given) %}
    {%- for part in given %}{% if part.type == 'text' %}{{ part.text }}{% endif %}{% endfor %}
{%- endmacro %}
{%- for message in messages if message.role in ('user', 'assistant') %}
    {{- '<' ~ message.role ~ '>' ~ written(message.content) }}
    {%- for call in message.tool_calls or [] %}
        {%- if call.function.arguments is string %}{{ call.function.arguments }}{% endif %}
    {%- endfor %}
{%- endfor %}
{%- if add_generation_prompt %}<assistant>{% endif %}"""
FLAGS = ("--max-num-seqs", "2", "--num-gpu-blocks-override", "64", "--max-model-len", "512")


@pytest.fixture(scope="module", params=[DEEPSEEK, PARTS], ids=["deepseek", "parts"])
def worker(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Worker]:
    directory = tmp_path_factory.mktemp("templates")
    (directory / "model").mkdir()
    (directory / "model" / "chat_template.jinja").write_text(request.param)
    with running_worker(directory, *FLAGS) as worker:
        yield worker


def prompt(worker: Worker, messages: list[Any]) -> str:
    """What the model was asked, in text."""
    with OpenAI(base_url=worker.url + "/v1", api_key="none", max_retries=0) as client:
        reply = client.chat.completions.create(
            model="tiny", messages=messages, max_tokens=1, extra_body={"return_token_ids": True}
        )
    tokens = (reply.model_extra or {})["prompt_token_ids"]
    answer = httpx.post(worker.url + "/detokenize", json={"tokens": tokens})
    return str(answer.raise_for_status().json()["prompt"])


def turn(arguments: str) -> list[Any]:
    """A question, a call, what the tool said, and the next question."""
    function = {"name": "weather", "arguments": arguments}
    call = {"id": "1", "type": "function", "function": function}
    return [
        {"role": "user", "content": "sun?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "rain"},
        {"role": "user", "content": "sure?"},
    ]


@pytest.mark.parametrize("worker", [DEEPSEEK], indirect=True, ids=["deepseek"])
def test_a_template_that_joins_arguments_goes_on_after_a_call(worker: Worker) -> None:
    asked = prompt(worker, turn('{"city":  "Bern"}'))
    called = '<C>function<S>weather\n```json\n{"city":  "Bern"}\n```'
    assert asked == f"<U>sun?{called}<T>rain<U>sure?<A>"


@pytest.mark.parametrize("worker", [PARTS], indirect=True, ids=["parts"])
def test_a_template_that_loops_over_parts_shows_a_text_and_refuses_what_it_drops(
    worker: Worker,
) -> None:
    for content in ("hello there", [{"type": "text", "text": "hello there"}]):
        assert prompt(worker, [{"role": "user", "content": content}]) == (
            "<user>hello there<assistant>"
        )
    with pytest.raises(openai.BadRequestError, match="content does not appear in the") as refused:
        prompt(worker, turn("{}"))
    assert refused.value.param == "messages"
    assert "messages[2].content" in refused.value.message
