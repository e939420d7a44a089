"""The plain-torch kernels against attention written out, on scattered pages."""

from types import SimpleNamespace

import pytest
import torch
from sluice_kernels.decode_attention import decode_attention, padding_bias
from sluice_kernels.expert_mlp import _counts, expert_mlp
from sluice_kernels.gather_kv import page_rows
from sluice_kernels.linear import PlainLinear
from sluice_kernels.plain import PlainKernels
from sluice_kernels.prefill_attention import (
    capped_prefill_attention,
    causal_bias,
    prefill_attention,
)
from torch import Tensor

HEADS, KV_HEADS, HEAD_DIM, PAGE = 6, 2, 8, 4
SCALE = HEAD_DIM**-0.5


def written_out(
    query: Tensor, keys: Tensor, values: Tensor, softcap: float | None = None
) -> Tensor:
    """query [heads, head_dim]; keys, values [context, kv_heads, head_dim]."""
    keys = keys.repeat_interleave(HEADS // KV_HEADS, dim=1)
    values = values.repeat_interleave(HEADS // KV_HEADS, dim=1)
    scores = torch.einsum("hd,chd->hc", query, keys) * SCALE
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    weights = scores.softmax(dim=-1)
    return torch.einsum("hc,chd->hd", weights, values).reshape(-1)


def paged(lengths: list[int], *, seed: int = 0) -> tuple[Tensor, Tensor, list[Tensor]]:
    """A cache, its tables, and each sequence's keys and values [length, 2, kv_heads, head_dim]."""
    generator = torch.Generator().manual_seed(seed)
    num_pages = max(-(-length // PAGE) for length in lengths)
    order = torch.randperm(num_pages * len(lengths), generator=generator)
    tables = order.view(len(lengths), num_pages)
    # What lies in slots that no token was written to must not matter.
    cache = torch.full((len(order), 2, KV_HEADS, PAGE, HEAD_DIM), 1e4)
    contexts = []
    for table, length in zip(tables, lengths, strict=True):
        kv = torch.randn(length, 2, KV_HEADS, HEAD_DIM, generator=generator)
        positions = torch.arange(length)
        cache[table[positions // PAGE], :, :, positions % PAGE] = kv
        contexts.append(kv)
    return cache, tables, contexts


@pytest.mark.parametrize("lengths", [[1], [4, 5], [1, 3, 4, 16, 17]])
def test_decode_equals_attention_written_out(lengths: list[int]) -> None:
    cache, tables, contexts = paged(lengths)
    query = torch.randn(len(lengths), HEADS, HEAD_DIM)
    bias = padding_bias(torch.tensor(lengths), tables.shape[1] * PAGE, KV_HEADS, query.dtype)
    out = decode_attention(query, cache, page_rows(tables, KV_HEADS), bias, SCALE)
    for row, kv in enumerate(contexts):
        expected = written_out(query[row], kv[:, 0], kv[:, 1])
        torch.testing.assert_close(out[row], expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(("start", "count"), [(0, 1), (0, 9), (3, 6), (8, 1), (5, 12)])
def test_prefill_equals_attention_written_out(start: int, count: int) -> None:
    cache, tables, (kv,) = paged([start + count])
    query = torch.randn(count, HEADS, HEAD_DIM)
    rows = page_rows(tables, KV_HEADS) if start else None
    num_slots = tables.shape[1] * PAGE
    bias = causal_bias(start, count, num_slots, like=query) if start else None
    out = prefill_attention(query, kv[start:], cache, rows, bias, SCALE)
    for row in range(count):
        seen = kv[: start + row + 1]
        expected = written_out(query[row], seen[:, 0], seen[:, 1])
        torch.testing.assert_close(out[row], expected, atol=1e-5, rtol=1e-4)


def test_bfloat16_stays_close_to_float32() -> None:
    lengths = [3, 17]
    cache, tables, _ = paged(lengths)
    cache[cache == 1e4] = 0
    query = torch.randn(2, HEADS, HEAD_DIM)
    rows = page_rows(tables, KV_HEADS)
    num_slots = tables.shape[1] * PAGE
    exact, rough = (
        decode_attention(
            query.to(dtype),
            cache.to(dtype),
            rows,
            padding_bias(torch.tensor(lengths), num_slots, KV_HEADS, dtype),
            SCALE,
        ).float()
        for dtype in (torch.float32, torch.bfloat16)
    )
    torch.testing.assert_close(rough, exact, atol=0.05, rtol=0.05)


@pytest.mark.parametrize(("window", "softcap"), [(6, None), (None, 0.4), (6, 0.4)])
def test_windows_and_caps_equal_attention_written_out(
    window: int | None, softcap: float | None
) -> None:
    lengths = [3, 7, 17]
    cache, tables, contexts = paged(lengths)
    query = torch.randn(len(lengths), HEADS, HEAD_DIM)
    num_slots = tables.shape[1] * PAGE
    bias = padding_bias(torch.tensor(lengths), num_slots, KV_HEADS, query.dtype, window)
    out = decode_attention(query, cache, page_rows(tables, KV_HEADS), bias, SCALE, softcap)
    for row, kv in enumerate(contexts):
        seen = kv if window is None else kv[-window:]
        expected = written_out(query[row], seen[:, 0], seen[:, 1], softcap)
        torch.testing.assert_close(out[row], expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("start", [0, 5])
@pytest.mark.parametrize("window", [4, None])
@pytest.mark.parametrize("max_scores_bytes", [1, 4 * HEADS * 20 * 5, 1 << 20])
def test_capped_prefill_is_the_same_in_tiles_of_any_size(
    start: int, window: int | None, max_scores_bytes: int
) -> None:
    count, softcap = 12, 0.4
    cache, tables, (kv,) = paged([start + count])
    query = torch.randn(count, HEADS, HEAD_DIM)
    rows = page_rows(tables, KV_HEADS) if start else None
    num_slots = tables.shape[1] * PAGE if start else count
    bias = causal_bias(start, count, num_slots, query, window) if start or window else None
    out = capped_prefill_attention(
        query, kv[start:], cache, rows, bias, SCALE, softcap, max_scores_bytes
    )
    for row in range(count):
        end = start + row + 1
        seen = kv[max(0, end - window) if window else 0 : end]
        expected = written_out(query[row], seen[:, 0], seen[:, 1], softcap)
        torch.testing.assert_close(out[row], expected, atol=1e-5, rtol=1e-4)


def test_experts_see_the_tokens_that_chose_them_and_add_up_by_share() -> None:
    tokens, hidden, width, num_experts = 7, 6, 5, 4
    rows = torch.randn(tokens, hidden)
    gate_up, down = torch.randn(num_experts, 2 * width, hidden), torch.randn(4, hidden, width)
    experts = torch.stack([torch.randperm(3)[:2] for _ in range(tokens)])  # none chooses the last
    gate_up[3] = float("nan")
    shares = torch.rand(tokens, 2)
    plain = PlainKernels(1, 1)
    first = [plain.projection(weight, None, "silu", narrow=False) for weight in gate_up]
    last = [PlainLinear(weight, None) for weight in down]
    out = expert_mlp(rows, experts, shares, first, last)
    for token in range(tokens):
        expected = torch.zeros(hidden)
        for expert, share in zip(experts[token].tolist(), shares[token], strict=True):
            gate, up = (gate_up[expert] @ rows[token]).chunk(2)
            expected += share * (down[expert] @ (torch.nn.functional.silu(gate) * up))
        torch.testing.assert_close(out[token], expected, atol=1e-5, rtol=1e-4)


class OnGpu(torch.Tensor):
    """Says that it is there."""

    is_cuda = True


def test_a_gpus_experts_are_counted_by_one_wait_asleep(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[str] = []
    event = SimpleNamespace(synchronize=lambda: waits.append("asleep"))
    monkeypatch.setattr("sluice_kernels.expert_mlp.reached", lambda: event)
    chosen = torch.randint(5, (40,))
    found = _counts(chosen.as_subclass(OnGpu), 6)
    assert found == torch.bincount(chosen, minlength=6).tolist()
    assert waits == ["asleep"]
