"""Norm, rotation and store, activation and sampling in Triton against torch."""

import math

import pytest
import torch
import triton
import triton.language as tl
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
    logits, seeds = random(6, 40), torch.arange(6, device=DEVICE) * 0x9E3779B97F4A7C15 % (1 << 62)
    temperatures = torch.full((6,), 5.0, device=DEVICE)
    together = choose.choose(logits, temperatures, seeds)
    alone = choose.choose(logits[2:4], temperatures[2:4], seeds[2:4])
    assert torch.equal(together[2:4], alone)
    assert len(set(together.tolist())) > 2
