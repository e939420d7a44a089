"""docs/slo.md prints the rules of the code, each with a name and a sentence of its own."""

import pytest
import rules


def test_the_page_prints_the_rules_of_the_code() -> None:
    page = rules.PAGE.read_text()
    assert rules.with_rules(page) == page, "PYTHONPATH=tests python -m rules --write"


@pytest.mark.parametrize("title", rules.LISTS)
def test_each_rule_says_in_one_sentence_when_it_decides_and_where_to(title: str) -> None:
    names, sentences = zip(*rules.LISTS[title], strict=True)
    assert len(set(names)) == len(set(sentences)) == len(names)
    assert all(4 <= len(sentence.split()) <= 26 for sentence in sentences), sentences


def test_a_page_without_markers_is_refused() -> None:
    with pytest.raises(ValueError, match="rules: begin"):
        rules.with_rules("a page")
