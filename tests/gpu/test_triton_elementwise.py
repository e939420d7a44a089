"""Norm, rotation and store, activation and sampling in Triton against torch."""

import math

import pytest
import torch
from sluice_kernels.interface import Activation
from sluice_kernels.triton import add_norm, choose, gated, rotate_store
from triton import knobs

from .paged import DEVICE, Heads, close, on_device, paged_cache

DTYPES = [torch.float32, torch.float16] + [torch.bfloat16] * torch.cuda.is_available()
VOCAB = 2 * choose.BLOCK + 5  # in three parts, the last one short


def random(*size: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*size).to(DEVICE, dtype)


def test_without_a_gpu_kernels_run_interpreted_and_not_their_references() -> None:
    assert torch.cuda.is_available() or knobs.runtime.interpret
    assert torch.cuda.is_available() or "Interpreted" in type(gated._gated).__name__


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [64, 100])
def test_norm_equals_torch_and_adds_to_the_stream_first(width: int, dtype: torch.dtype) -> None:
    stream, added = random(5, width, dtype=dtype), random(5, width, dtype=dtype)
    weight, total = random(width), stream + added
    close(add_norm.add_norm(stream, None, weight, 1e-5), add_norm.reference(stream, weight, 1e-5))
    close(add_norm.add_norm(stream, added, weight, 1e-5), add_norm.reference(total, weight, 1e-5))
    assert torch.equal(stream, total)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("has_norm", [False, True])
@pytest.mark.parametrize("heads", [Heads(6, 2, 16, 4), Heads(7, 1, 24, 16), Heads(2, 2, 256, 8)])
def test_queries_turn_in_place_and_keys_and_values_reach_their_slots(
    heads: Heads, has_norm: bool, dtype: torch.dtype
) -> None:
    cache, _ = paged_cache(heads, [3 * heads.page], dtype)
    cache.zero_()
    rows = random(4, heads.num_heads + 2 * heads.num_kv_heads, heads.dim, dtype=dtype)
    angles = random(4, 1, heads.dim // 2)
    turns = torch.polar(torch.ones_like(angles), angles)
    norm = random(heads.num_heads + heads.num_kv_heads, heads.dim) if has_norm else None
    blocks, slots = on_device([[1, -1, 0, 2], [1, 0, 0, 0]], torch.int64)
    expected_rows, expected = rows.clone(), cache.clone()
    rotate_store.reference(
        expected_rows, turns, norm, 1e-6, expected, blocks, slots, heads.num_heads
    )
    rotate_store.rotate_store(rows, turns, norm, 1e-6, cache, blocks, slots, heads.num_heads)
    close(rows[:, : heads.num_heads], expected_rows[:, : heads.num_heads])
    close(cache, expected)
    assert cache.any(dim=-1).sum() == 3 * 2 * heads.num_kv_heads  # -1 went nowhere


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", ["silu", "gelu_pytorch_tanh"])
def test_gated_activation_equals_torch(activation: Activation, dtype: torch.dtype) -> None:
    rows = random(3, 2 * (gated.BLOCK + 9), dtype=dtype)
    close(gated.gated(rows, activation), gated.reference(rows, activation))


@pytest.mark.parametrize("softcap", [None, 2.0])
def test_the_likeliest_token_is_chosen_and_the_first_of_equals(softcap: float | None) -> None:
    logits = random(4, VOCAB)
    logits[1, [7, VOCAB - 1]] = 50.0
    logits[2] = -3.0
    zeros = torch.zeros(4, device=DEVICE)
    found = choose.choose(logits, zeros, zeros.long(), softcap)
    assert found[1:3].tolist() == [7, 0]
    if softcap is None:  # a cap makes equals of the large
        assert torch.equal(found, logits.argmax(dim=1))


def test_a_row_without_a_finite_best_gives_no_token_and_spoils_no_other() -> None:
    logits = random(5, VOCAB)
    logits[0, 3], logits[1, 9] = float("nan"), float("inf")
    logits[2] = float("-inf")
    logits[3, 1:] = float("-inf")
    temperatures = on_device([0.0, 0.7, 0.7, 0.7, 0.0], torch.float32)
    found = choose.choose(logits, temperatures, torch.arange(5, device=DEVICE))
    assert found.tolist() == [-1, -1, -1, 0, int(logits[4].argmax())]


def test_draws_follow_the_softmax_and_depend_on_row_and_seed_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Shares of draws from four tokens, two of them in the row's second part."""
    monkeypatch.setattr(choose, "BLOCK", 16)
    weights, count, temperature = torch.tensor([0.6, 0.2, 0.15, 0.05]), 200, 0.8
    logits = torch.full((1, 20), float("-inf"), device=DEVICE)
    logits[0, [0, 7, 17, 19]] = weights.log().to(DEVICE) * temperature
    seeds = torch.arange(count, device=DEVICE) * 0x9E3779B97F4A7C15 % (1 << 62)
    found = draws(logits, seeds, temperature)
    for token, weight in zip([0, 7, 17, 19], weights.tolist(), strict=True):
        spread = math.sqrt(weight * (1 - weight) / count)
        assert abs((found == token).float().mean().item() - weight) < 4 * spread
    assert torch.equal(found[100:103], draws(logits, seeds[100:103], temperature))


def draws(logits: torch.Tensor, seeds: torch.Tensor, temperature: float) -> torch.Tensor:
    temperatures = torch.full((len(seeds),), temperature, device=DEVICE)
    return choose.choose(logits.expand(len(seeds), -1), temperatures, seeds)
