"""Tokens are chosen in Triton as the worker's sampler would: the likeliest, or drawn."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import fields, replace

import pytest
import torch
import triton
import triton.language as tl
from gpu.paged import DEVICE, on_device
from gpu.test_triton_elementwise import DTYPES, random
from sluice_kernels.triton import choose, cut
from sluice_worker.execution.sampler import Draw, sample

VOCAB = 2 * choose.BLOCK + 5  # in three parts, the last one short


def draws_of(
    temperatures: Sequence[float], top_p: float = 1.0, min_p: float = 0.0, top_k: int = 0
) -> cut.Draws:
    """Rows that are cut alike, with seeds that have no bits in common."""
    ones, numbers = torch.ones(len(temperatures)), torch.arange(len(temperatures))
    seeds = numbers * 0x9E3779B97F4A7C15 % (1 << 62)
    parts = torch.tensor(temperatures), top_p * ones, min_p * ones, top_k + 0 * numbers, seeds
    return cut.Draws(*(part.to(DEVICE) for part in parts))


@pytest.mark.parametrize("softcap", [None, 2.0])
def test_the_likeliest_token_is_chosen_and_the_first_of_equals(softcap: float | None) -> None:
    logits = random(4, VOCAB)
    logits[1, [7, VOCAB - 1]] = 50.0
    logits[2] = -3.0
    found = choose.choose(logits, draws_of([0.0] * 4), softcap)
    assert found[1:3].tolist() == [7, 0]
    if softcap is None:  # a cap makes equals of the large
        assert torch.equal(found, logits.argmax(dim=1))


@pytest.mark.parametrize(("top_p", "top_k"), [(1.0, 0), (0.9, 0), (0.9, 5)])
def test_a_row_without_a_finite_best_gives_no_token_and_spoils_no_other(
    monkeypatch: pytest.MonkeyPatch, top_p: float, top_k: int
) -> None:
    monkeypatch.setattr(cut, "BLOCK", 4096)
    logits = random(5, VOCAB)
    logits[0, 3], logits[1, 9] = float("nan"), float("inf")
    logits[2] = float("-inf")
    logits[3, 1:] = float("-inf")
    found = choose.choose(logits, draws_of([0.0, 0.7, 0.7, 0.7, 0.0], top_p, top_k=top_k))
    assert found.tolist() == [-1, -1, -1, 0, int(logits[4].argmax())]


@triton.jit
def write_noise(out, seed, BLOCK: tl.constexpr):
    columns = tl.arange(0, BLOCK)
    tl.store(out + columns, choose.gumbel(seed, columns))


def test_noise_is_gumbels_and_another_one_for_each_seed() -> None:
    """The largest gap between the two distribution functions; larger once in 10,000 times."""
    count = 4096
    noise = torch.empty(2, count, device=DEVICE)
    for row, seed in enumerate((5, 0x1234567 << 32)):
        write_noise[(1,)](noise[row], seed, BLOCK=count)
    expected = (-(-noise.sort(dim=1).values).exp()).exp()
    gap = (expected - torch.arange(1, count + 1, device=DEVICE) / count).abs().amax(dim=1)
    assert (gap * math.sqrt(count)).tolist() < [2.23, 2.23]
    assert abs(noise.corrcoef()[0, 1].item()) < 4 / math.sqrt(count)


def test_draws_depend_on_their_own_row_and_seed_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choose, "BLOCK", 16)
    logits = random(6, 40)
    draws = draws_of([5.0] * 6)
    together = choose.choose(logits, draws)
    alone = choose.choose(logits[2:4], cut.Draws(*(field[2:4] for field in each_of(draws))))
    assert torch.equal(together[2:4], alone)
    assert len(set(together.tolist())) > 2


def each_of(draws: cut.Draws) -> Iterator[torch.Tensor]:
    return (getattr(draws, field.name) for field in fields(draws))


@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("edges", [(0.9, 0.0, 0), (1.0, 0.0, 4), (1.0, 0.1, 0), (0.7, 0.02, 20)])
def test_rows_are_cut_where_sorting_finds_the_edge(
    monkeypatch: pytest.MonkeyPatch,
    edges: tuple[float, float, int],
    dtype: torch.dtype,
    softcap: float | None,
) -> None:
    """In three parts; the second row has many equals, and the last two are not cut."""
    monkeypatch.setattr(cut, "BLOCK", 64)
    logits = (3 * random(4, 130)).to(dtype)
    logits[1] = logits[1].round()
    draws = draws_of([1.0, 0.6, 0.0, 1.5], *edges)
    draws.top_k[3], draws.top_p[3], draws.min_p[3] = 130, 1.0, 0.0
    found = cut.cut(logits, draws, softcap)
    assert torch.equal(found, cut.reference(logits, draws, softcap))
    assert found.isfinite().tolist() == [True, True, False, False]


@pytest.mark.parametrize("edges", [(0.9, 0.0, 0), (1.0, 0.0, 4), (0.95, 0.02, 20), (1e-9, 0.0, 0)])
def test_what_is_cut_off_is_what_the_sampler_cuts_off(edges: tuple[float, float, int]) -> None:
    top_p, min_p, top_k = edges
    logits = 2 * random(1, 50)
    floor = cut.cut(logits, draws_of([0.8], *edges))
    kept = (logits >= floor).flatten().nonzero().flatten().tolist()
    draw = Draw(0.8, 1, 0, top_k=top_k, top_p=top_p, min_p=min_p)
    drawn = sample(logits.expand(400, -1), [replace(draw, index=at) for at in range(400)])
    assert set(drawn) <= set(kept)
    likely = logits.softmax(1).flatten()[kept] > 0.05
    assert {token for token, often in zip(kept, likely, strict=True) if often} <= set(drawn)


def test_draws_are_from_what_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cut, "BLOCK", 16)
    weights = on_device([0.1, 0.4, 0.2, 0.05, 0.25], torch.float32)
    count = 60
    logits = weights.log().expand(count, -1)
    found = torch.bincount(choose.choose(logits, draws_of([1.0] * count, top_p=0.8)), minlength=5)
    assert found[[0, 3]].tolist() == [0, 0]
    expected = count * weights[[1, 2, 4]] / 0.85
    chi_square = ((found[[1, 2, 4]] - expected) ** 2 / expected).sum().item()
    assert chi_square < 18.4  # larger once in 10,000 times


def test_a_row_that_is_not_cut_is_drawn_as_if_nobody_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cut, "BLOCK", 64)
    logits, draws = random(4, 100), draws_of([2.0] * 4)
    plain = choose.choose(logits, draws)
    draws.top_k[1] = 3
    beside = choose.choose(logits, draws)
    assert beside[[0, 2, 3]].tolist() == plain[[0, 2, 3]].tolist()
    assert beside[1].item() in logits[1].topk(3).indices.tolist()
