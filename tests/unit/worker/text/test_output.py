"""Stop strings: no part of one is ever sent, and all else is."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sluice_worker.text.output import OutputText, StopFinder, StopStrings
from unit.cost import least_cpu_s

PIECES = st.lists(st.text(alphabet="ab\n", max_size=4), max_size=12)
STOPS = st.lists(st.text(alphabet="ab\n", min_size=1, max_size=4), max_size=8)


def first_stop(text: str, stops: list[str]) -> tuple[int, str] | None:
    """The stop string that ends first, and where it begins; the first of those that end together.

    As vLLM's check_stop_strings (0.32, v1/engine/detokenizer.py).
    """
    hits = [(text.find(stop), stop) for stop in stops if stop in text]
    return min(hits, key=lambda hit: hit[0] + len(hit[1]), default=None)


@given(PIECES, STOPS)
def test_what_is_sent_is_the_text_before_the_first_stop(
    pieces: list[str], stops: list[str]
) -> None:
    finder, sent, found = StopFinder(StopStrings(stops)), "", None
    for piece in pieces:
        text, found = finder.push(piece)
        sent += text
        if found is not None:
            break
    else:
        sent += finder.flush()
    whole = "".join(pieces)
    at, stop = first_stop(whole, stops) or (len(whole), None)
    assert (sent, found) == (whole[:at], stop)


@given(PIECES, STOPS)
def test_an_included_stop_ends_the_text_and_nothing_is_held_back(
    pieces: list[str], stops: list[str]
) -> None:
    finder, sent, came, found = StopFinder(StopStrings(stops), include=True), "", "", None
    for piece in pieces:
        came += piece
        text, found = finder.push(piece)
        sent += text
        if found is not None:
            break
        assert sent == came
    assert finder.flush() == ""
    whole = "".join(pieces)
    at, stop = first_stop(whole, stops) or (len(whole), None)
    assert (sent, found) == (whole[: at + len(stop or "")], stop)


@given(PIECES, STOPS, st.integers(0, 8), st.booleans())
def test_a_stop_counts_if_it_ends_after_min_tokens_wherever_it_begins(
    pieces: list[str], stops: list[str], min_tokens: int, include: bool
) -> None:
    """Token n is the n-th piece. The reference searches the whole text after each token."""
    output_text = OutputText(
        Pieces(pieces),
        stops=StopStrings(stops),
        stop_token_ids=frozenset(),
        min_tokens=min_tokens,
        include_stop=include,
    )
    sent, ended_by = "", None
    for num, _ in enumerate(pieces, start=1):
        sent += output_text.push(num - 1, is_last=num == len(pieces), by_token=False)
        before, text = "".join(pieces[: num - 1]), "".join(pieces[:num])
        hits = [
            (at, stop)
            for stop in stops
            for at in range(len(text))
            if text.startswith(stop, at) and at + len(stop) > len(before)
        ]
        if hits and num > min_tokens:
            at, ended_by = min(hits, key=lambda hit: hit[0] + len(hit[1]))
            assert sent == text[: at + len(ended_by) if include else at]
            break
        assert text.startswith(sent)
        assert not include or sent == text
    else:
        assert sent == "".join(pieces)
    assert output_text.stop_reason == ended_by


@pytest.mark.parametrize(
    ("stops", "text", "reason"),
    [(["abc", "b"], "a", "b"), (["bc", "abc"], "a", "bc"), (["abc", "bc"], "", "abc")],
)
def test_of_stops_in_one_piece_the_first_to_end_wins_and_then_the_first_that_is_named(
    stops: list[str], text: str, reason: str
) -> None:
    assert StopFinder(StopStrings(stops)).push("abcd") == (text, reason)


def test_a_thousand_stop_strings_cost_a_token_what_one_does() -> None:
    text = " some words\nof User 1 and 2"

    def cpu_s(num: int) -> float:
        finder = StopFinder(StopStrings([f"\nUser {i}:" for i in range(num)]))

        def push() -> None:
            for _ in range(2000):
                assert finder.push(text) == (text, None)

        return least_cpu_s(push, num=3)

    assert cpu_s(1000) < 5 * cpu_s(1)


class Pieces:
    """A detokenizer whose token n is the n-th piece."""

    def __init__(self, pieces: list[str]) -> None:
        self._pieces = pieces

    def push(self, token_id: int) -> str:
        return self._pieces[token_id]

    def place(self) -> int:
        raise NotImplementedError

    def flush(self) -> str:
        return ""


class Letters:
    """A detokenizer whose token n is the n-th letter; 0 is a control token."""

    def __init__(self) -> None:
        self._num = 0

    def push(self, token_id: int) -> str:
        self._num += token_id > 0
        return "" if token_id == 0 else chr(96 + token_id)

    def place(self) -> int:
        return self._num - 1

    def flush(self) -> str:
        return ""


def create_transcript(
    stops: tuple[str, ...] = (),
    stop_ids: frozenset[int] = frozenset(),
    min_tokens: int = 0,
    include_stop: bool = False,
) -> OutputText:
    return OutputText(
        Letters(),
        stops=StopStrings(stops),
        stop_token_ids=stop_ids,
        min_tokens=min_tokens,
        include_stop=include_stop,
    )


def test_a_text_held_back_for_a_stop_string_is_sent_at_the_end() -> None:
    output_text = create_transcript(stops=("abc",))
    assert output_text.push(1, is_last=False, by_token=False) == ""
    assert output_text.push(2, is_last=True, by_token=False) == "ab"
    assert output_text.stop_reason is None


def test_a_stop_token_is_counted_but_is_no_text() -> None:
    output_text = create_transcript(stop_ids=frozenset({2}))
    assert output_text.push(1, is_last=False, by_token=False) == "a"
    assert output_text.push(2, is_last=True, by_token=True) == ""
    assert (output_text.token_ids, output_text.stop_reason) == ([1, 2], 2)


def test_an_included_stop_token_is_text() -> None:
    output_text = create_transcript(stop_ids=frozenset({2}), include_stop=True)
    assert output_text.push(1, is_last=False, by_token=False) == "a"
    assert output_text.push(2, is_last=True, by_token=True) == "b"
    assert (output_text.token_ids, output_text.stop_reason) == ([1, 2], 2)


def test_a_token_has_its_place_whether_its_text_is_sent_or_held_back() -> None:
    output_text = create_transcript(stops=("abc",), stop_ids=frozenset({5}))
    for place, token_id in enumerate((1, 2)):
        assert output_text.push(token_id, is_last=False, by_token=False) == ""
        assert output_text.place() == place
    assert output_text.push(5, is_last=True, by_token=True) == "ab"
    assert output_text.place() == 2


def test_the_end_token_gives_no_stop_reason() -> None:
    output_text = create_transcript(stop_ids=frozenset({2}))
    assert output_text.push(0, is_last=True, by_token=True) == ""
    assert output_text.stop_reason is None


@pytest.mark.parametrize(("min_tokens", "text"), [(0, ""), (1, "a"), (3, "aaa")])
def test_stop_strings_count_only_after_min_tokens(min_tokens: int, text: str) -> None:
    output_text = create_transcript(stops=("a",), min_tokens=min_tokens)
    sent = ""
    while output_text.stop_reason is None:
        sent += output_text.push(1, is_last=False, by_token=False)
    assert sent == text


def test_the_last_token_of_min_tokens_ends_nothing() -> None:
    output_text = create_transcript(stops=("a",), min_tokens=2)
    assert output_text.push(1, is_last=False, by_token=False) == "a"
    assert output_text.push(1, is_last=True, by_token=False) == "a"
    assert output_text.stop_reason is None


@pytest.mark.parametrize(("include_stop", "text"), [(False, "a"), (True, "abcd")])
def test_a_stop_string_that_begins_within_min_tokens_is_found(
    include_stop: bool, text: str
) -> None:
    output_text = create_transcript(stops=("bcd",), min_tokens=3, include_stop=include_stop)
    sent = "".join(output_text.push(i, is_last=i == 4, by_token=False) for i in (1, 2, 3, 4))
    assert (sent, output_text.stop_reason) == (text, "bcd")
