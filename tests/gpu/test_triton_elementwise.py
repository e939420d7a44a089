"""Norm, rotation and store, and activation in Triton against torch."""

import pytest
import torch
from gpu.paged import DEVICE, Heads, close, on_device, paged_cache
from sluice_kernels.interface import Activation
from sluice_kernels.triton import add_norm, gated, rotate_store
from triton import knobs

DTYPES = [torch.float32, torch.float16] + [torch.bfloat16] * torch.cuda.is_available()


def random(*size: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*size).to(DEVICE, dtype)


def test_without_a_gpu_kernels_run_interpreted_and_not_their_references() -> None:
    assert torch.cuda.is_available() or knobs.runtime.interpret
    assert torch.cuda.is_available() or "Interpreted" in type(gated._gated).__name__


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [64, 100])
def test_norm_equals_torch_and_adds_to_the_stream_first(width: int, dtype: torch.dtype) -> None:
    residual, added = random(5, width, dtype=dtype), random(5, width, dtype=dtype)
    weight, total = random(width), residual + added
    close(
        add_norm.add_norm(residual, None, weight, 1e-5), add_norm.reference(residual, weight, 1e-5)
    )
    close(add_norm.add_norm(residual, added, weight, 1e-5), add_norm.reference(total, weight, 1e-5))
    assert torch.equal(residual, total)


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
    rotary = torch.polar(torch.ones_like(angles), angles)
    norm = random(heads.num_heads + heads.num_kv_heads, heads.dim) if has_norm else None
    blocks, slots = on_device([[1, -1, 0, 2], [1, 0, 0, 0]], torch.int64)
    expected_rows, expected = rows.clone(), cache.clone()
    rotate_store.reference(
        expected_rows, rotary, norm, 1e-6, expected, blocks, slots, heads.num_heads
    )
    rotate_store.rotate_store(rows, rotary, norm, 1e-6, cache, blocks, slots, heads.num_heads)
    close(rows[:, : heads.num_heads], expected_rows[:, : heads.num_heads])
    close(cache, expected)
    assert cache.any(dim=-1).sum() == 3 * 2 * heads.num_kv_heads  # -1 went nowhere


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", ["silu", "gelu_pytorch_tanh"])
def test_gated_activation_equals_torch(activation: Activation, dtype: torch.dtype) -> None:
    rows = random(3, 2 * (gated.BLOCK + 9), dtype=dtype)
    close(gated.gated(rows, activation), gated.reference(rows, activation))
