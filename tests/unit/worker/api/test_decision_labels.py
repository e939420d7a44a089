"""Probabilities of labels, and how a question asks for them."""

from math import log
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sluice_core.errors import RequestError
from sluice_frontend.api.decisions import LETTERS, labels_of, parse_decisions
from sluice_worker.tasks.decisions import Labels

QUESTION = {"type": "predicate", "instructions": "It rains."}


def parsed(given: Any, *questions: Any) -> Any:
    return parse_decisions(msgspec.json.encode({"input": given, "questions": questions}))


def test_both_spellings_of_a_label_count() -> None:
    logprobs = {1: log(0.1), 2: log(0.2), 3: log(0.1), 4: log(0.5)}
    assert Labels(((1, 2), (3,))).probabilities(logprobs) == pytest.approx([0.75, 0.25])


@given(st.lists(st.floats(-400, 0), min_size=2, max_size=9))
def test_probabilities_add_up_to_1(values: list[float]) -> None:
    labels = Labels(tuple((number,) for number in range(len(values))))
    assert sum(labels.probabilities(dict(enumerate(values)))) == pytest.approx(1)


def test_all_questions_begin_with_the_input_and_end_with_their_own() -> None:
    asked = parsed("a text", QUESTION, {**QUESTION, "instructions": "It snows."})
    [first], [second] = (each.messages for each in asked.conversations)
    assert first["content"].startswith("a text\n\nIt rains.")
    assert second["content"].startswith("a text\n\nIt snows.")
    assert first["content"].endswith("Answer with one letter only.\nA. Yes\nB. No")


def test_a_question_behind_an_answer_is_a_message_of_its_own() -> None:
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    [asked] = parsed(messages, QUESTION).conversations
    assert [message["role"] for message in asked.messages] == ["user", "assistant", "user"]


def test_more_choices_than_letters_are_refused() -> None:
    options = [{"value": f"{number}"} for number in range(53)]
    choice = {"type": "choice", "instructions": "Which?", "choices": options}
    with pytest.raises(RequestError, match="53 choices"):
        parsed("a", choice)
    [question] = parsed("a", {**choice, "choices": options[:52]}).questions
    assert labels_of(question) == LETTERS
