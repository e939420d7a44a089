"""Decode steps on static buffers, as CUDA graphs where they are captured. Rim.

Nothing waits for the device but `Flight.tokens`; uploads, graphs and downloads follow each other on
one stream. On a CPU the same runs at once and without graphs.
"""

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from sluice_kernels.triton.choose import choose
from sluice_kernels.triton.decode import choose_splits
from torch import Tensor

from ..models.decoder import Decoder
from .arrays import NUM_FIELDS, DecodeArrays, decode_arrays
from .capture import first_sizes, next_size, padded_size
from .forward import Batch, hidden
from .rows import Row

ROUND_ROWS = 16
"""Rows of buffers are a multiple of this, so that kernels find each field as well aligned."""


@dataclass(frozen=True, slots=True)
class Flight:
    """Tokens on their way from the device: of `rows`, kept there from place `offset` on."""

    rows: Seq[Row]
    offset: int
    _host: Tensor
    _event: torch.cuda.Event | None

    def tokens(self) -> list[int | None]:
        """One for each row, once the device has sampled them; None where no logit was finite."""
        if self._event is not None:
            self._event.synchronize()
        return [token if token >= 0 else None for token in self._host.tolist()]


class DecodeStep:
    """One token for each of up to `ceiling` sequences of up to `max_pages` blocks."""

    def __init__(
        self, model: Decoder, caches: list[Tensor], ceiling: int, max_pages: int, block_size: int
    ) -> None:
        self.ceiling = ceiling
        self.device = model.embedding.device
        self._model, self._caches, self._block_size = model, caches, block_size
        self.num_processors = _num_processors(self.device)
        rows = -(-ceiling // ROUND_ROWS) * ROUND_ROWS
        self._fields = torch.zeros(NUM_FIELDS, rows, dtype=torch.int64, device=self.device)
        self._lengths = torch.zeros(rows, dtype=torch.int32, device=self.device)
        self._temperatures = torch.zeros(rows, device=self.device)
        self._tables = torch.zeros(rows, max_pages, dtype=torch.int32, device=self.device)
        self._tiles = torch.zeros(0, 4, dtype=torch.int32, device=self.device)
        # What was sampled last: by decodes from 0 on, by a mixed step beside them behind those.
        self._sampled = torch.zeros(2 * rows, dtype=torch.int64, device=self.device)
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}
        # An expert's tokens are counted by the host, so a step with experts cannot be a graph.
        has_experts = model.config.shape.experts is not None
        self._may_capture = self.device.type == "cuda" and not has_experts
        self._pool = torch.cuda.graph_pool_handle() if self._may_capture else None

    def launch(self, rows: Seq[Row]) -> Flight:
        """Start a step of `rows`, at most `ceiling`."""
        size = padded_size(len(rows), self._graphs)
        self._upload(decode_arrays(rows, size, self._block_size))
        graph = self._graphs.get(size)
        if graph is None:
            self._run(size)
        else:
            graph.replay()
        return self._fetch(rows, 0)

    def keep(self, rows: Seq[Row], tokens: Tensor, offset: int) -> Flight:
        """Keep what another forward sampled for `rows`, as sources of the next step."""
        self._sampled[offset : offset + len(rows)] = tokens
        return self._fetch(rows, offset)

    def has_room(self, num_rows: int) -> bool:
        """Whether `keep` can hold so many at any offset that `launch` leaves."""
        return num_rows <= self.ceiling

    def splits(self, num_rows: int) -> int:
        """In how many parts the contexts of so many decodes are read."""
        num_kv_heads = self._model.config.shape.num_kv_heads
        return choose_splits(max(num_rows, 1), num_kv_heads, self.num_processors)

    def upload(self, values: NDArray[np.generic]) -> Tensor:
        """`values` on the device, behind all that was started before."""
        found = torch.from_numpy(values)
        if self.device.type == "cpu":
            return found
        return found.pin_memory().to(self.device, non_blocking=True)

    # Graphs

    def capture_first(self) -> None:
        """Capture the small sizes; a worker does so before it is ready."""
        for size in first_sizes(self.ceiling) if self._may_capture else ():
            self._capture(size)

    def capture_next(self) -> bool:
        """Capture one more size, a fraction of a second; False where none is left to capture."""
        if not self._may_capture:
            return False
        free_bytes, _ = torch.cuda.mem_get_info(self.device)
        size = next_size(self.ceiling, self._graphs, free_bytes)
        if size is None:
            return False
        self._capture(size)
        return True

    def _capture(self, size: int) -> None:
        # Rows of no sequence: they read nothing and write to no page.
        self._fields[3].fill_(-1)
        self._lengths.zero_()
        self._run(size)  # compiles the kernels, and loads those of the libraries
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            self._run(size)
        self._graphs[size] = graph

    # One step

    def _upload(self, arrays: DecodeArrays) -> None:
        size, (num_rows, num_pages) = len(arrays.lengths), arrays.tables.shape
        self._fields[:, :size].copy_(self.upload(arrays.fields))
        self._lengths[:size].copy_(self.upload(arrays.lengths))
        self._temperatures[:size].copy_(self.upload(arrays.temperatures))
        self._tables[:num_rows, :num_pages].copy_(self.upload(arrays.tables))

    def _run(self, size: int) -> None:
        token_ids, sources, positions, slots, seeds = self._fields[:, :size]
        # A token of -1 had no finite logit: its sequence ends, and so does what comes of this.
        sampled_before = self._sampled[sources].clamp_min_(0)
        batch = Batch(
            token_ids=torch.where(token_ids >= 0, token_ids, sampled_before),
            positions=positions,
            slots=slots,
            lengths=self._lengths[:size],
            tables=self._tables[:size],
            tiles=self._tiles,
            num_splits=self.splits(size),
        )
        _, rows = hidden(self._model, batch, self._caches)
        logits, softcap = self._model.head(rows), self._model.config.logit_softcap
        self._sampled[:size] = choose(logits, self._temperatures[:size], seeds, softcap)

    def _fetch(self, rows: Seq[Row], offset: int) -> Flight:
        kept = self._sampled[offset : offset + len(rows)]
        if self.device.type == "cpu":
            return Flight(rows, offset, kept.clone(), None)
        host = torch.empty(len(rows), dtype=torch.int64, pin_memory=True)
        host.copy_(kept, non_blocking=True)
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
        return Flight(rows, offset, host, event)


def _num_processors(device: torch.device) -> int:
    if device.type == "cpu":
        return 1
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
