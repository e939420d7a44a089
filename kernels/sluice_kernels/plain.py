"""All operations of a step in plain torch, on any device: the reference and the fallback.

Attention never gathers more pages than `max_gather_bytes`, or those of one sequence.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import gelu, rms_norm, silu

from .decode_attention import decode_attention, padding_bias
from .gather_kv import page_rows
from .interface import Activation, GatedLinear, Heads, MakeProjection, Projection, Spans
from .linear import plain_projection
from .prefill_attention import capped_prefill_attention, causal_bias, prefill_attention

ACTIVATIONS: Mapping[Activation, Callable[[Tensor], Tensor]] = {
    "silu": silu,
    "gelu_pytorch_tanh": partial(gelu, approximate="tanh"),
}


@dataclass(frozen=True, slots=True)
class PagedView:
    """Pages of sequences (`page_rows`), and their visible slots as a bias on scores.

    A chunk at a sequence's start has rows None. A bias of a chunk that is only causal is None.
    """

    rows: Tensor | None
    bias: Tensor | None


@dataclass(frozen=True, slots=True)
class Group:
    """Rows [begin, end) of the step: one token each of similarly long sequences, or a chunk of one.

    `views`: one for each window; windows that hide nothing share one.
    """

    begin: int
    end: int
    is_decode: bool
    views: Mapping[int | None, PagedView]


@dataclass(frozen=True, slots=True)
class PlainKernels:
    """`max_gather_bytes`, `max_scores_bytes`: scratch of attention, planned for by the caller."""

    max_gather_bytes: int
    max_scores_bytes: int
    making: Callable[[bool], MakeProjection] = lambda narrow: plain_projection
    name: str = "torch"
    round_rows: Callable[[int], int] = int

    def projection(
        self, weight: Tensor, bias: Tensor | None, activation: Activation | None, *, narrow: bool
    ) -> Projection:
        linear = self.making(narrow)(weight, bias)
        return linear if activation is None else GatedLinear(linear, activation, gate)

    def plan(
        self, spans: Spans, cache: Tensor, windows: tuple[int | None, ...]
    ) -> tuple[Group, ...]:
        planner = _Planner(spans, cache, windows)
        num_decodes = sum(1 for count in planner.counts if count == 1)
        pages = [-(-length // cache.shape[3]) for length in planner.lengths[:num_decodes]]
        groups = split(pages, self.max_gather_bytes // cache[0].nbytes)
        decodes = [planner.decodes(begin, end) for begin, end in groups]
        chunks = [planner.chunk(seq) for seq in range(num_decodes, len(planner.counts))]
        return (*decodes, *chunks)

    def norm(self, residual: Tensor, hidden: Tensor | None, weight: Tensor, eps: float) -> Tensor:
        if hidden is not None:
            residual += hidden
        return rms_norm(residual.float(), weight.shape, weight, eps).to(residual.dtype)

    def rope_and_store(
        self,
        rows: Tensor,
        rotary: Tensor,
        heads: Heads,
        cache: Tensor,
        slot_mapping: tuple[Tensor, ...],
    ) -> None:
        turning = rows[:, : heads.num_heads + heads.num_kv_heads]
        if heads.norm is not None:
            normed = rms_norm(turning.float(), (heads.head_dim,), None, heads.norm_eps)
            turning.copy_(normed.mul_(heads.norm))
        # Neighbours are one complex number. A copy only where the dtype is not float32.
        pairs = turning.float().view(*turning.shape[:-1], -1, 2)
        turned = torch.view_as_complex(pairs).mul_(rotary)
        if turning.dtype != torch.float32:
            turning.copy_(torch.view_as_real(turned).flatten(-2))
        blocks, slots = slot_mapping
        cache[blocks, :, :, slots] = _kv(rows, heads)

    def attention(self, rows: Tensor, heads: Heads, cache: Tensor, plan: object) -> Tensor:
        assert isinstance(plan, tuple)
        parts = [self._attend(rows[g.begin : g.end], heads, cache, g) for g in plan]
        if extra := len(rows) - plan[-1].end:
            parts.append(parts[0].new_zeros(extra, parts[0].shape[1]))
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _attend(self, rows: Tensor, heads: Heads, cache: Tensor, group: Group) -> Tensor:
        view, query = group.views[heads.window], rows[:, : heads.num_heads]
        if group.is_decode:
            assert view.rows is not None
            assert view.bias is not None
            return decode_attention(query, cache, view.rows, view.bias, heads.scale, heads.softcap)
        given = (query, _kv(rows, heads), cache, view.rows, view.bias, heads.scale)
        if heads.softcap is None:
            return prefill_attention(*given)
        return capped_prefill_attention(*given, heads.softcap, self.max_scores_bytes)


def gate(gate_up: Tensor, activation: Activation) -> Tensor:
    """activation(gate) * up: [num_rows, 2 * width] -> [num_rows, width]."""
    opened, up = gate_up.chunk(2, dim=-1)
    return ACTIVATIONS[activation](opened).mul_(up)


def _kv(rows: Tensor, heads: Heads) -> Tensor:
    return rows[:, heads.num_heads :].view(-1, 2, heads.num_kv_heads, heads.head_dim)


class _Planner:
    def __init__(self, spans: Spans, cache: Tensor, windows: tuple[int | None, ...]) -> None:
        self._spans = spans
        self._cache = cache
        self._windows = windows
        self._num_kv_heads, self._block_size = cache.shape[2:4]
        self._offsets: list[int] = spans.offsets.tolist()
        self._starts: list[int] = spans.starts.tolist()
        self.counts = spans.offsets.diff().tolist()
        self.lengths: list[int] = (spans.starts + spans.offsets.diff()).tolist()

    def decodes(self, begin: int, end: int) -> Group:
        views = self._views(self.lengths[end - 1], lambda window: self._decodes(begin, end, window))
        return Group(begin, end, True, views)

    def _decodes(self, begin: int, end: int, window: int | None) -> PagedView:
        """The pages that a window reaches into; the first one may reach out of it."""
        lengths = torch.tensor(self.lengths[begin:end])
        first_pages = torch.zeros_like(lengths)
        if window is not None:
            first_pages = (lengths - window).clamp(min=0) // self._block_size
        lengths = lengths - first_pages * self._block_size
        num_pages = -(-int(lengths.max()) // self._block_size)
        tables = self._spans.tables[begin:end]
        if window is None:
            tables = tables[:, :num_pages]
        else:
            columns = first_pages[:, None] + torch.arange(num_pages)
            tables = tables.gather(1, columns.clamp(max=tables.shape[1] - 1))
        num_slots, device = num_pages * self._block_size, self._cache.device
        return PagedView(
            page_rows(tables.to(device), self._num_kv_heads),
            padding_bias(
                lengths.to(device), num_slots, self._num_kv_heads, self._cache.dtype, window
            ),
        )

    def chunk(self, seq: int) -> Group:
        views = self._views(self.lengths[seq], lambda window: self._chunk(seq, window))
        return Group(self._offsets[seq], self._offsets[seq + 1], False, views)

    def _chunk(self, seq: int, window: int | None) -> PagedView:
        start, count, like = self._starts[seq], self.counts[seq], self._cache
        if start == 0:
            bias = None if window is None else causal_bias(0, count, count, like, window)
            return PagedView(None, bias)
        first = 0 if window is None else max(start + 1 - window, 0) // self._block_size
        pages = slice(first, -(-(start + count) // self._block_size))
        table = self._spans.tables[seq : seq + 1, pages].to(like.device)
        num_slots = table.shape[1] * self._block_size
        bias = causal_bias(start - first * self._block_size, count, num_slots, like, window)
        return PagedView(page_rows(table, self._num_kv_heads), bias)

    def _views(
        self, longest: int, make: Callable[[int | None], PagedView]
    ) -> dict[int | None, PagedView]:
        shown = {w: None if w is None or w >= longest else w for w in self._windows}
        made = {window: make(window) for window in dict.fromkeys(shown.values())}
        return {window: made[shown[window]] for window in shown}


def split(pages: Sequence[int], max_pages: int) -> list[tuple[int, int]]:
    """Groups of neighbours (sorted by pages) such that padding at most doubles what is read.

    Each group costs its calls in every layer. So a group is cut only if that saves more, or if
    its padded pages would exceed `max_pages`.
    """
    groups, begin = [], 0
    for end in range(1, len(pages)):
        padded = pages[end] * (end + 1 - begin)
        if pages[end] > 2 * pages[begin] + 2 or padded > max_pages:
            groups.append((begin, end))
            begin = end
    return [*groups, (begin, len(pages))] if pages else []
