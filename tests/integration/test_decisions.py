"""Decisions under openai's client: probabilities of labels at the next token of a real worker."""

import json
import math
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from integration.test_openai_client import FLAGS, TEMPLATE
from integration.worker_process import Worker, running_worker
from openai import BadRequestError, OpenAI
from sluice_frontend.api.decisions import DIGITS, LETTERS, parse_decisions

TEXT = "The parcel came late, and open. " * 40
PREDICATE = {"type": "predicate", "instructions": "The customer complains.", "name": "complains"}
CHOICE = {
    "type": "choice",
    "instructions": "What is it about?",
    "choices": [
        {"value": "delivery", "description": "how it came"},
        {"value": "price"},
        {"value": True},
    ],
}
SCORE = {
    "type": "score",
    "instructions": "How angry is the customer?",
    "levels": [{"label": "calm"}, {"label": "upset"}, {"label": "furious"}],
}
QUESTIONS: list[Any] = [PREDICATE, CHOICE, SCORE]


@pytest.fixture(scope="module")
def worker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worker]:
    directory = tmp_path_factory.mktemp("decisions")
    (directory / "model").mkdir()
    (directory / "model" / "chat_template.jinja").write_text(TEMPLATE)
    with running_worker(directory, *FLAGS) as worker:
        yield worker


@pytest.fixture(scope="module")
def client(worker: Worker) -> Iterator[OpenAI]:
    with OpenAI(base_url=worker.url + "/v1", api_key="none", max_retries=0) as client:
        yield client


def expected(worker: Worker, given: Any, question: Any, labels: str) -> list[float]:
    """Of the labels, from the log-probabilities of the same prompt's completion."""
    body = json.dumps({"input": given, "questions": [question]}).encode()
    messages = list(parse_decisions(body).conversations[0].messages)
    ids = httpx.post(worker.url + "/tokenize", json={"messages": messages}).json()["tokens"]
    shares = []
    for label in labels:
        found = httpx.post(
            worker.url + "/tokenize", json={"prompt": label, "add_special_tokens": False}
        )
        asked = {"prompt": ids, "max_tokens": 1, "logprobs": 0}
        asked["allowed_token_ids"] = found.json()["tokens"]
        told = httpx.post(worker.url + "/v1/completions", json=asked).raise_for_status().json()
        [logprob] = told["choices"][0]["logprobs"]["token_logprobs"]
        shares.append(math.exp(logprob))
    return [share / sum(shares) for share in shares]


@pytest.mark.parametrize(
    "given",
    [
        TEXT[:64],
        [{"role": "system", "content": "Be fair."}, {"role": "user", "content": TEXT[:64]}],
        [{"role": "assistant", "content": TEXT[:64]}],
        [{"role": "user", "content": [{"type": "input_text", "text": TEXT[:64]}]}],
    ],
)
def test_probabilities_are_those_of_the_next_token(
    worker: Worker, client: OpenAI, given: Any
) -> None:
    reply = client.decisions.create(model="tiny", input=given, questions=QUESTIONS)
    predicate, choice, score = reply.answers
    yes, _ = expected(worker, given, PREDICATE, LETTERS[:2])
    assert predicate.type == "predicate"
    assert predicate.probability == pytest.approx(yes, abs=1e-5)
    assert predicate.name == "complains"
    assert choice.type == "choice"
    shares = expected(worker, given, CHOICE, LETTERS[:3])
    assert [one.probability for one in choice.probabilities] == pytest.approx(shares, abs=1e-5)
    assert [one.value for one in choice.probabilities] == ["delivery", "price", True]
    assert choice.choice == ["delivery", "price", True][shares.index(max(shares))]
    assert choice.confidence == pytest.approx(max(shares), abs=1e-5)
    assert score.type == "score"
    shares = expected(worker, given, SCORE, DIGITS[:3])
    assert [one.probability for one in score.probabilities] == pytest.approx(shares, abs=1e-5)
    assert score.score == pytest.approx(shares[1] + 2 * shares[2], abs=1e-5)


def test_many_questions_cost_one_prefill_of_their_input(worker: Worker, client: OpenAI) -> None:
    asked = [{**PREDICATE, "instructions": f"Statement {i} is true."} for i in range(8)]
    reply = client.decisions.create(model="tiny", input=TEXT, questions=asked)  # type: ignore[arg-type]
    assert len(reply.answers) == reply.usage.output_tokens == 8
    per_question = reply.usage.input_tokens / 8
    assert reply.usage.input_tokens_details.cached_tokens > 7 * 0.8 * per_question


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"questions": []}, "questions"),
        ({"questions": [{"type": "predicate", "instructions": ""}]}, "questions"),
        ({"questions": [{"type": "essay", "instructions": "a"}]}, "questions"),
        (
            {"questions": [{**CHOICE, "choices": [{"value": f"{i}"} for i in range(53)]}]},
            "53 choices; at most 52 have a letter",
        ),
        ({"questions": [{**CHOICE, "choices": [{"value": "a"}] * 2}]}, "two options are the same"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input: only text"),
        ({"input": "word " * 3000}, "maximum context length is 2048"),
    ],
)
def test_a_request_that_cannot_be_right_is_told_so(
    client: OpenAI, change: dict[str, Any], said: str
) -> None:
    fields: dict[str, Any] = {"model": "tiny", "input": "a", "questions": [PREDICATE], **change}
    with pytest.raises(BadRequestError, match=said):
        client.decisions.create(**fields)
