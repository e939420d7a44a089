"""Log-probabilities in the shapes that clients read."""

from array import array
from typing import Any

import msgspec
from sluice_core.port import Scores
from sluice_frontend.api.logprobs import (
    LOWEST,
    PackedScores,
    Scored,
    as_token_id,
    of_chat,
    of_completion,
    of_prompt,
    prompt_tokens,
)

MINUS_INFINITY = float("-inf")


def create_scores(rows: list[list[tuple[int, float]]], ranks: list[int]) -> Scores:
    """Scores of tokens, each with its own pair first."""
    return Scores(
        width=len(rows[0]),
        token_ids=array("i", [token for row in rows for token, _ in row]).tobytes(),
        logprobs=array("f", [logprob for row in rows for _, logprob in row]).tobytes(),
        ranks=array("i", ranks).tobytes(),
    )


def unpack(scores: Scores, offsets: list[int]) -> list[Scored]:
    """The tokens of `scores`."""
    packed = PackedScores()
    packed.add(scores, offsets)
    return [*packed.tokens()]


def told(what: object) -> Any:
    """What a client reads."""
    return msgspec.json.decode(msgspec.json.encode(what))


def text_of(token_id: int) -> str:
    return chr(96 + token_id)


PART = create_scores(
    [[(3, -2.0), (1, -0.5), (2, -1.0)], [(1, -0.25), (1, -0.25), (9, -3.5)]], [4, 1]
)
scored = unpack(PART, [0, 1])


def test_scores_are_unpacked_row_by_row() -> None:
    assert scored == [
        Scored(3, -2.0, 4, ((1, -0.5), (2, -1.0)), 0),
        Scored(1, -0.25, 1, ((1, -0.25), (9, -3.5)), 1),
    ]
    assert unpack(create_scores([[(3, -2.0)]], [4]), [7]) == [Scored(3, -2.0, 4, (), 7)]


def test_scores_are_packed_as_they_come_and_told_from_anywhere_on() -> None:
    packed = PackedScores()
    assert [*packed.tokens()] == []
    packed.add(PART, [0, 1])
    packed.add(PART, [2, 3])
    assert [token.offset for token in packed.tokens()] == [0, 1, 2, 3]
    assert [*packed.tokens(2)] == unpack(PART, [2, 3])
    assert [*packed.tokens(4)] == []


def test_nothing_is_told_of_no_token() -> None:
    names = ("text_offset", "token_logprobs", "tokens", "top_logprobs")
    assert told(of_completion([], 2, text_of)) == {name: [] for name in names}
    assert told(of_chat([], 2, text_of, str.encode)) == {"content": []}  # type: ignore[arg-type]


def test_completions_tell_the_token_itself_and_the_likeliest() -> None:
    assert told(of_completion(scored, 2, text_of)) == {
        "text_offset": [0, 1],
        "token_logprobs": [-2.0, -0.25],
        "tokens": ["c", "a"],
        "top_logprobs": [{"c": -2.0, "a": -0.5, "b": -1.0}, {"a": -0.25, "i": -3.5}],
    }
    named = told(of_completion(scored, 0, as_token_id))
    assert named["tokens"] == ["token_id:3", "token_id:1"]
    assert named["top_logprobs"] == [{"token_id:3": -2.0}, {"token_id:1": -0.25}]


def test_chats_tell_the_likeliest_in_order_with_their_bytes() -> None:
    texts = {3: "é"}

    def name(token_id: int) -> str:
        return texts.get(token_id, "a")

    chat = of_chat(scored[:1], 1, name, lambda token_id: name(token_id).encode())
    assert told(chat) == {
        "content": [
            {
                "token": "é",
                "logprob": -2.0,
                "bytes": [195, 169],
                "top_logprobs": [{"token": "a", "logprob": -0.5, "bytes": [97]}],
            }
        ]
    }


def test_a_prompt_begins_with_a_token_of_which_nothing_is_known() -> None:
    parts = [
        create_scores([[(2, -1.0), (5, -0.5)]], [2]),
        create_scores([[(4, -0.5), (4, -0.5)]], [1]),
    ]
    tokens = [*prompt_tokens(parts, [1, 2, 4], [0, 0, 3])]
    assert [token.offset for token in tokens] == [0, 0, 3]
    assert {token.offset for token in prompt_tokens(parts, [1, 2, 4], ())} == {0}
    completion = told(of_completion(tokens, 1, text_of))
    assert completion["token_logprobs"] == [None, -1.0, -0.5]
    assert completion["top_logprobs"][0] is None
    assert told(of_prompt(tokens, 1, text_of)) == [
        None,
        {
            "2": {"logprob": -1.0, "rank": 2, "decoded_token": "b"},
            "5": {"logprob": -0.5, "rank": 1, "decoded_token": "e"},
        },
        {"4": {"logprob": -0.5, "rank": 1, "decoded_token": "d"}},
    ]


def test_an_excluded_token_has_a_finite_logprob_in_json() -> None:
    (token,) = unpack(create_scores([[(3, MINUS_INFINITY)]], [9]), [0])
    assert token.logprob == LOWEST
    assert b"-9999" in msgspec.json.encode(of_completion([token], 0, text_of))
