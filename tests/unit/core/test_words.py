"""Texts of others: whatever they hold, one printable line comes out."""

import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sluice_core.errors import ConfigError, RequestError, told
from sluice_core.hub.site import Transient
from sluice_core.model.sizing import SizingError
from sluice_core.words import clean, clean_all

HOSTILE = [
    *(chr(code) for code in (*range(0x20), *range(0x7F, 0xA0))),
    *"\u00ad\u061c\u200b\u200c\u200d\u200e\u200f\u2028\u2029\u202a\u202b\u202c\u202d\u202e",
    *"\u2060\u2066\u2067\u2068\u2069\ufeff\ud800\udfff\U000e0001\U000e0041\U000e007f",
]
TEXTS = st.text(st.characters(codec=None, exclude_categories=()), max_size=80)


@pytest.mark.parametrize("char", HOSTILE, ids=lambda char: f"U+{ord(char):04X}")
def test_a_character_that_misleads_is_gone_or_shown(char: str) -> None:
    shown = clean(f"a{char}b")
    assert char not in shown
    assert shown.isprintable()
    assert (shown[0], shown[-1]) == ("a", "b")


@given(TEXTS, st.integers(0, 100))
def test_no_control_character_is_ever_left(text: str, most: int) -> None:
    shown = clean(text, most)
    assert len(shown) <= most
    assert not {unicodedata.category(char) for char in shown} & {"Cc", "Cf", "Cs", "Zl", "Zp"}
    assert clean(shown, most) == shown


@given(st.text(st.characters(categories=["L", "N", "P", "S"]), max_size=80))
def test_ordinary_words_of_any_language_stay(text: str) -> None:
    assert clean(text, 80) == text


JSON = st.recursive(TEXTS | st.integers() | st.none(), lambda inner: st.lists(inner, max_size=4)
                    | st.dictionaries(TEXTS, inner, max_size=4), max_leaves=20)  # fmt: skip


@given(JSON)
def test_all_texts_of_a_document_are_cleaned(value: object) -> None:
    def texts(value: object) -> list[str]:
        if isinstance(value, dict):
            return [text for pair in value.items() for each in pair for text in texts(each)]
        if isinstance(value, list):
            return [text for each in value for text in texts(each)]
        return [value] if isinstance(value, str) else []

    assert all(map(str.isprintable, texts(clean_all(value))))


@given(TEXTS)
def test_every_error_of_ours_is_a_clean_sentence(text: str) -> None:
    errors = [RequestError(text, param=text), SizingError(text), Transient(text)]
    assert all(str(error).isprintable() for error in errors)
    assert told(ValueError(text)).isprintable()
    assert str(errors[0].param).isprintable()  # type: ignore[attr-defined]


def test_a_configurations_problems_stay_a_line_each() -> None:
    assert ConfigError(["a\nb", "\x1b[2J"]).message == "a b\n\\x1b[2J"
