"""The sampler: each parameter against a plain reference, and what is drawn against its law."""

import math
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sluice_core.work import Sampling
from sluice_worker.execution.sampler import (
    FIRST_CANDIDATES,
    PIECE_ELEMENTS,
    Draw,
    _edit,
    _nucleus_edge,
    sample,
    score,
)
from sluice_worker.scheduling.edits import Editor, Edits
from torch import Tensor
from transformers.generation.logits_process import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)
from unit.worker.engine.factories import Sliced

NO_IDS = torch.zeros(1, 0, dtype=torch.long)
VOCAB = 40


def create_logits(rows: int, vocab: int, *, seed: int = 0, spread: float = 3.0) -> Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * spread


def law(logits: Tensor, **fields: float) -> Tensor:
    """The probabilities that vLLM's order gives, by transformers' warpers."""
    scores = TemperatureLogitsWarper(fields.get("temperature", 1.0))(NO_IDS, logits)
    if min_p := fields.get("min_p"):
        scores = MinPLogitsWarper(min_p)(NO_IDS, scores)
    if top_k := fields.get("top_k"):
        scores = TopKLogitsWarper(int(top_k))(NO_IDS, scores)
    if top_p := fields.get("top_p"):
        scores = TopPLogitsWarper(top_p)(NO_IDS, scores)
    return torch.softmax(scores, dim=-1)


def chi_square_is_plausible(counts: Tensor, probabilities: Tensor) -> bool:
    """Pearson's test at about 4.5 standard deviations, rare outcomes taken together."""
    expected = probabilities * counts.sum()
    common = expected >= 5
    rare = ~common
    seen = torch.cat([counts[common], counts[rare].sum()[None]])
    wanted = torch.cat([expected[common], expected[rare].sum()[None]])
    seen, wanted = seen[wanted > 0], wanted[wanted > 0]
    freedom = len(seen) - 1
    statistic = float(((seen - wanted) ** 2 / wanted).sum())
    return statistic <= freedom + 4.5 * math.sqrt(2 * max(freedom, 1)) + 4.5**2 / 3


LAWS: list[dict[str, float]] = [
    {},
    {"temperature": 0.6},
    {"temperature": 1.7},
    {"top_k": 7},
    {"top_p": 0.8},
    {"min_p": 0.05},
    {"top_k": 12, "top_p": 0.7, "temperature": 1.3},
    {"top_k": 20, "top_p": 0.9, "min_p": 0.02, "temperature": 0.8},
]


@pytest.mark.parametrize("fields", LAWS, ids=str)
def test_draws_follow_the_law_of_the_reference(fields: dict[str, float]) -> None:
    logits = create_logits(1, VOCAB)
    wanted = law(logits, **fields)[0].double()
    num = 20_000
    draws = [Draw(**{"temperature": 1.0, **fields}, seed=n, index=3) for n in range(num)]  # type: ignore[arg-type]
    counts = torch.zeros(VOCAB, dtype=torch.double)
    for token in sample(logits.expand(num, -1), draws):
        assert token is not None
        counts[token] += 1
    assert not counts[wanted == 0].any()
    assert chi_square_is_plausible(counts, wanted)


def test_the_chi_square_test_can_fail() -> None:
    wanted = law(create_logits(1, VOCAB))[0].double()
    shifted = torch.roll(wanted, 1)
    assert not chi_square_is_plausible((shifted * 20_000).round(), wanted)


def support(logits: Tensor, **fields: float) -> set[int]:
    """All tokens that can be drawn, found with uniforms from end to end."""
    draws = [Draw(**{"temperature": 1.0, **fields}, seed=n, index=0) for n in range(600)]  # type: ignore[arg-type]
    return {token for token in sample(logits.expand(600, -1), draws) if token is not None}


@pytest.mark.parametrize("vocab", [9, FIRST_CANDIDATES, 6000])
@pytest.mark.parametrize("top_p", [0.001, 0.5, 0.9, 0.999])
def test_nucleus_is_that_of_the_reference_at_any_vocabulary(vocab: int, top_p: float) -> None:
    for spread in (0.01, 3.0):  # flat: the set is larger than the first candidates
        logits = create_logits(2, vocab, spread=spread)
        allowed = law(logits, top_p=top_p) > 0
        draws = [Draw(1.0, n, 0, top_p=top_p) for n in range(150)]
        for row in range(2):
            tokens = sample(logits[row].expand(150, -1), draws)
            assert all(token is not None and allowed[row, token] for token in tokens)
            if allowed[row].sum() == 1:
                assert set(tokens) == {int(logits[row].argmax())}


@pytest.mark.parametrize("top_p", [0.3, 0.95, 0.9999, 1 - 2**-53])
@pytest.mark.parametrize("spread", [0.0, 0.01, 3.0, 60.0])
def test_a_nucleus_of_many_ends_where_sorting_would_end_it(top_p: float, spread: float) -> None:
    logits = create_logits(3, 20_000, spread=spread)
    weights = (logits - logits.amax(dim=-1, keepdim=True)).exp()
    weights[1] *= weights[1] >= weights[1].median()  # as min-p leaves it
    ordered = weights.double().sort(dim=-1, descending=True).values
    shares = weights.sum(dim=-1, keepdim=True, dtype=torch.float64) * top_p
    count = (ordered.cumsum(dim=-1) - ordered < shares).sum(dim=-1, keepdim=True)
    wanted = ordered.gather(1, count - 1)
    found = _nucleus_edge(weights, weights.topk(FIRST_CANDIDATES).values, [top_p] * 3)
    if top_p < 0.99999:
        assert torch.equal(found.double(), wanted)
    else:  # the last tokens are within what orders of summing differ by
        left_out = (weights * (weights < found)).sum(dim=-1, keepdim=True, dtype=torch.float64)
        assert (left_out <= weights.sum(dim=-1, keepdim=True) * 1e-12).all()


def test_ties_at_the_cut_off_are_all_kept() -> None:
    logits = torch.tensor([[3.0, 1.0, 2.0, 2.0, 2.0, 0.0]])
    assert support(logits, top_k=2) == {0, 2, 3, 4}
    assert support(logits, top_p=0.6) == {0, 2, 3, 4}
    assert support(logits, top_k=1) == {0}
    assert support(logits, top_k=99) == {0, 1, 2, 3, 4, 5}


@pytest.mark.parametrize("piece", [1, 700, 1 << 20])  # rows at once: 1, 2, all
def test_a_draw_depends_on_its_own_row_alone(monkeypatch: pytest.MonkeyPatch, piece: int) -> None:
    monkeypatch.setitem(PIECE_ELEMENTS, "cpu", piece)
    edits = Editor(Sampling(logit_bias={7: 4.0}), [], 300).edits([])
    logits = create_logits(24, 300)
    fields = [{}, {"top_k": 5}, {"top_p": 0.7}, {"min_p": 0.1}, {"top_k": 300, "top_p": 0.99}]
    draws = [
        Draw(
            temperature=0.0 if n % 7 == 0 else 0.5 + n / 20,
            seed=n,
            index=9,
            edits=edits if n % 3 == 0 else None,
            **fields[n % 5],  # type: ignore[arg-type]
        )
        for n in range(24)
    ]
    together = sample(logits, draws)
    alone = [sample(logits[n : n + 1], draws[n : n + 1])[0] for n in range(24)]
    assert together == alone
    order = torch.randperm(24, generator=torch.Generator().manual_seed(1)).tolist()
    assert sample(logits[order], [draws[n] for n in order]) == [together[n] for n in order]


def test_positions_and_neighbouring_seeds_draw_independently() -> None:
    logits = torch.zeros(2000, 2)
    for draws in (
        [Draw(1.0, 7, index) for index in range(2000)],
        [Draw(1.0, seed, 7) for seed in range(2000)],
    ):
        tokens = sample(logits, draws)
        pairs = Counter(zip(tokens, tokens[1:], strict=False))
        assert all(420 < count < 580 for count in pairs.values())
        assert len(pairs) == 4


def test_a_tiny_temperature_is_greedy_and_does_not_overflow() -> None:
    logits = torch.tensor([[1.0, 4.0, 3.0]])
    assert sample(logits, [Draw(1e-40, 5, 0)]) == [1]


@pytest.mark.parametrize("draw", [Draw(0.0, 1, 1), Draw(1.0, 1, 1), Draw(1.0, 1, 1, top_p=0.5)])
def test_a_row_that_is_not_finite_gets_no_token_and_others_do(draw: Draw) -> None:
    logits = create_logits(4, 50)
    logits[1, 3] = float("nan")
    logits[2, 3] = float("inf")
    tokens = sample(logits, [draw] * 4)
    assert [token is None for token in tokens] == [False, True, True, False]
    excluding = Draw(draw.temperature, 1, 1, forbidden=(3,))  # does not hide that it is broken
    tokens = sample(logits, [excluding] * 4)
    assert [token is None for token in tokens] == [False, True, True, False]


def test_logits_stay_as_they_are() -> None:
    logits = create_logits(3, 50)
    before = logits.clone()
    edits = Editor(Sampling(presence_penalty=1.0, logit_bias={4: 9.0}), [1], 50).edits([1, 2])
    sample(logits, [Draw(1.0, 0, 0, forbidden=(1,)), Draw(0.9, 0, 0, top_k=3, edits=edits)] * 1)
    assert torch.equal(logits, before)


@pytest.mark.parametrize("piece", [1, 130, 1 << 20])
def test_scores_of_chosen_rows_are_the_raw_log_softmax(
    monkeypatch: pytest.MonkeyPatch, piece: int
) -> None:
    monkeypatch.setitem(PIECE_ELEMENTS, "cpu", piece)
    logits = create_logits(6, 60)
    wanted = torch.log_softmax(logits, dim=-1)
    rows, tokens, widths = [0, 2, 3, 5], [7, 1, 9, 30], [1, 4, 61, 99]
    for row, token, width, told in zip(
        rows, tokens, widths, score(logits, rows, tokens, widths), strict=True
    ):
        assert told.width == min(width, 61)
        ids = np.frombuffer(told.token_ids, dtype=np.int32)
        logprobs = np.frombuffer(told.logprobs, dtype=np.float32)
        assert ids[0] == token
        assert np.allclose(logprobs, wanted[row, ids.astype(np.int64)], atol=1e-5)
        assert list(logprobs[1:]) == sorted(logprobs[1:], reverse=True)
        rank = int((wanted[row] > wanted[row, token]).sum()) + 1
        assert np.frombuffer(told.ranks, dtype=np.int32).tolist() == [rank]


# Edits


def test_forbidden_tokens_are_not_sampled_and_unknown_ids_do_nothing() -> None:
    logits = torch.tensor([[5.0, 4.0, 3.0]] * 2)
    draws = [Draw(0.0, 0, 0, forbidden=(0, -1, 999)), Draw(1.0, 0, 0, forbidden=(0, 1))]
    assert sample(logits, draws) == [1, 2]


def test_a_row_without_any_token_left_gets_none() -> None:
    logits = create_logits(2, 3)
    assert sample(logits, [Draw(t, 0, 0, forbidden=(0, 1, 2)) for t in (0.0, 1.0)]) == [None, None]


def edited(logits: Tensor, edits: Edits) -> Tensor:
    """The logits of one row as the sampler edits them."""
    return _edit(logits.clone(), [Draw(0.0, 0, 0, edits=edits)])


TOKENS = st.lists(st.integers(0, VOCAB - 1), max_size=30)


@settings(max_examples=60)
@given(
    prompt=TOKENS,
    output=TOKENS,
    cut=st.integers(0, 30),
    repetition=st.sampled_from([1.0, 0.5, 1.3, 2.0]),
    presence=st.sampled_from([0.0, -1.5, 0.7]),
    frequency=st.sampled_from([0.0, -0.3, 1.1]),
)
def test_penalties_equal_the_plain_formula(
    prompt: list[int],
    output: list[int],
    cut: int,
    repetition: float,
    presence: float,
    frequency: float,
) -> None:
    sampling = Sampling(
        repetition_penalty=repetition, presence_penalty=presence, frequency_penalty=frequency
    )
    editor = Editor(sampling, prompt, VOCAB)
    editor.edits([*prompt, *output[:cut]])  # counts what came since, not everything again
    logits = create_logits(1, VOCAB)
    got = edited(logits, editor.edits([*prompt, *output]))
    wanted = logits
    if prompt or output:
        seen = torch.tensor([[*prompt, *output]])
        wanted = RepetitionPenaltyLogitsProcessor(repetition)(seen, logits)
    counts = torch.bincount(torch.tensor(output, dtype=torch.long), minlength=VOCAB)
    wanted = wanted - frequency * counts - presence * (counts > 0)
    assert torch.allclose(got, wanted, atol=1e-5)


def test_bias_allowed_tokens_and_penalties_come_in_vllms_order() -> None:
    logits = torch.tensor([[-1.0, 2.0, 3.0, 0.5]])
    sampling = Sampling(
        logit_bias={0: 2.0, 3: -1.0}, allowed_token_ids=(0, 1, 3), repetition_penalty=2.0
    )
    got = edited(logits, Editor(sampling, [0, 3], 4).edits([0, 3]))
    # The bias turns the signs first, and so decides whether the penalty divides or multiplies.
    assert got.tolist() == [[0.5, 2.0, float("-inf"), -1.0]]


def test_ids_outside_the_vocabulary_change_nothing() -> None:
    sampling = Sampling(logit_bias={99: 5.0}, allowed_token_ids=(1, 99))
    got = edited(torch.zeros(1, 4), Editor(sampling, [], 4).edits([]))
    assert got.isinf().tolist() == [[True, False, True, True]]


@pytest.mark.parametrize(
    ("token_ids", "ends"),
    [
        ([5, 6], {8}),  # the prompt is not looked at
        ([5, 6, 6], {7, 8}),
        ([5, 6, 5, 6], {7, 8, 9}),
        ([5, 6, 5, 7], {8}),
    ],
)
def test_bad_words_forbid_the_token_that_completes_them(
    token_ids: list[int], ends: set[int]
) -> None:
    editor = Editor(Sampling(bad_words=((8,), (6, 7), (5, 6, 9))), [5, 6], VOCAB)
    assert set(editor.bad_words(token_ids)) == ends


def test_a_text_is_cut_only_where_its_last_token_is_within_a_bad_word() -> None:
    words = tuple((i, 200) for i in range(100))
    token_ids = Sliced([1, 2, 3])
    assert list(Editor(Sampling(bad_words=words), [1], VOCAB).bad_words(token_ids)) == [200]
    assert token_ids.num_slices == 1
    assert not list(Editor(Sampling(bad_words=words), [], VOCAB).bad_words([]))


def reference_bad_words(words: list[list[int]], output: list[int]) -> set[int]:
    return {
        word[-1]
        for word in words
        if len(word) == 1
        or (len(output) >= len(word) - 1 and output[-len(word) + 1 :] == word[:-1])
    }


WORDS = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=3), max_size=4)


@given(words=WORDS, output=st.lists(st.integers(0, 2), max_size=6))
def test_bad_words_equal_the_plain_rule(words: list[list[int]], output: list[int]) -> None:
    editor = Editor(Sampling(bad_words=tuple(tuple(word) for word in words)), [1, 1], VOCAB)
    assert set(editor.bad_words([1, 1, *output])) == reference_bad_words(words, output)


def test_greedy_takes_edits_into_account_row_by_row() -> None:
    logits = torch.tensor([[5.0, 4.0, 3.0]] * 3)
    bias = Editor(Sampling(logit_bias={2: 10.0}), [], 3).edits([])
    allowed = Editor(Sampling(allowed_token_ids=(1,)), [], 3).edits([])
    draws = [Draw(0.0, 0, 0, edits=bias), Draw(0.0, 0, 0), Draw(0.0, 0, 0, edits=allowed)]
    assert sample(logits, draws) == [2, 0, 1]


def test_counts_of_a_long_text_are_kept_as_arrays() -> None:
    editor = Editor(Sampling(frequency_penalty=1.0), [], 100)
    text = [n % 100 for n in range(1000)]
    for end in range(0, 1001, 10):
        edits = editor.edits(text[:end])
    assert np.array_equal(edits.charge, np.full(100, 10.0, dtype=np.float32))
