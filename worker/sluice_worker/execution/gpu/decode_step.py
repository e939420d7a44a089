"""Decode steps on static buffers, as CUDA graphs where they are captured. Rim.

Only `PendingTokens.tokens` waits for the device. Uploads, graphs and downloads follow each other on
one stream. On a CPU the same runs at once and without graphs.
"""

import logging
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import torch
from sluice_kernels.linear import PlainLinear
from sluice_kernels.triton.choose import choose
from sluice_kernels.triton.cut import Draws
from sluice_kernels.triton.decode import Splits
from sluice_kernels.triton.kernels import LaunchPlan, TritonKernels
from sluice_kernels.waiting import reached
from torch import Tensor

from ..models.decoder import Decoder
from ..models.step import StepInput
from .arrays import NUM_FIELDS, NUM_SHARES, DecodeArrays, aligned_rows, decode_arrays, spans
from .capture import first_sizes, has_room, kinds_of_steps, next_size, padded_size
from .rows import Row

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PendingTokens:
    """Tokens of `rows` on their way from the device, which keeps them from place `offset` on."""

    rows: Seq[Row]
    offset: int
    _host: Tensor
    _event: torch.cuda.Event | None

    def tokens(self) -> list[int | None]:
        """Wait for the device: one token for each row; None if no logit was finite."""
        if self._event is not None:
            self._event.synchronize()
        return [token if token >= 0 else None for token in self._host.tolist()]


class DecodeStep:
    """One token for each of up to `ceiling` sequences of up to `max_pages` blocks.

    activation_bytes: memory that any step may take, so graphs captured while idle leave it free.
    """

    def __init__(
        self,
        model: Decoder,
        kernels: TritonKernels,
        caches: list[Tensor],
        ceiling: int,
        max_pages: int,
        activation_bytes: int,
    ) -> None:
        self.ceiling = ceiling
        self._activation_bytes = activation_bytes
        self._device = model.embedding.device
        self._model, self._kernels, self._caches = model, kernels, caches
        self._places = rows = aligned_rows(ceiling)
        # One copy brings all of a step. Its tables are then spread to fixed places, as a graph
        # needs.
        fields, lengths, shares, tables = spans(rows)
        size = tables.start + 4 * rows * max_pages
        self._packed = torch.zeros(size, dtype=torch.uint8, device=self._device)
        self._fields = self._packed[fields].view(torch.int64).view(NUM_FIELDS, rows)
        self._lengths = self._packed[lengths].view(torch.int32)
        self._shares = self._packed[shares].view(torch.float32).view(NUM_SHARES, rows)
        self._packed_tables = self._packed[tables].view(torch.int32)
        self._tables = torch.zeros(rows, max_pages, dtype=torch.int32, device=self._device)
        self._no_tiles = torch.zeros(0, 4, dtype=torch.int32, device=self._device)
        head = model.head
        assert isinstance(head, PlainLinear)
        # The last step's logits, shared by all graphs: each would keep tens of MiB of its own.
        self._head, self._logits = head, head.weight.new_zeros(rows, len(head.weight))
        # Last sampled tokens: of decodes from 0 on, then those of a mixed step beside them.
        self._sampled = torch.zeros(2 * rows, dtype=torch.int64, device=self._device)
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}
        # The host counts an expert's tokens, so a step with experts cannot be a graph.
        has_experts = model.config.shape.experts is not None
        self._may_capture = self._device.type == "cuda" and not has_experts
        self._pool = torch.cuda.graph_pool_handle() if self._may_capture else None

    def launch(self, rows: Seq[Row]) -> PendingTokens:
        """Start a step of `rows`, at most `ceiling`."""
        self._start(rows)
        return self._fetch(rows, 0)

    def logits(self, rows: Seq[Row]) -> Tensor:
        """Run a step of `rows`, at most `ceiling`; return the logits for other samplers.

        Returns float32 [num_rows, vocab_size], valid until the next step is launched. The step's
        own samples are meaningless for rows with edited draws.
        """
        self._start(rows)
        return self._model.bent(self._logits[: len(rows)])

    def _start(self, rows: Seq[Row]) -> None:
        size = padded_size(len(rows), self._graphs)
        self._upload(decode_arrays(rows, size, self._places, self._caches[0].shape[3]))
        graph = self._graphs.get(size)
        if graph is None:
            self._run(size)
        else:
            graph.replay()

    def keep(self, rows: Seq[Row], tokens: Tensor, offset: int) -> PendingTokens:
        """Keep tokens that another forward sampled for `rows`, at most `ceiling`."""
        self._sampled[offset : offset + len(rows)] = tokens
        return self._fetch(rows, offset)

    # Before the steps

    def warm_up(self) -> None:
        """Compile kernels for steps of all sizes, a second for each kind. Capture the small sizes,
        which the profile runs."""
        for size in kinds_of_steps(self.ceiling, lambda size: self._splits(size).num):
            self._rehearse(size)
        for size in first_sizes(self.ceiling):
            if self._may_capture:
                self._capture(size)

    def capture_next(self) -> bool:
        """Capture one more size, in a fraction of a second; False if none is left."""
        size = next_size(self.ceiling, self._graphs) if self._may_capture else None
        if size is None:
            return False
        # torch caches memory for later steps; a capture gives it back anyway.
        torch.cuda.empty_cache()
        free_bytes, _ = torch.cuda.mem_get_info(self._device)
        if not has_room(free_bytes, self._activation_bytes):
            self._go_without("memory is short")
            return False
        self._capture(size)
        return self._may_capture

    def _capture(self, size: int) -> None:
        """Capture `size`; if that fails, capture no more: steps also run without a graph."""
        graph = torch.cuda.CUDAGraph()
        try:
            self._rehearse(size)  # loads the libraries' kernels, which a capture may not
            with torch.cuda.graph(graph, pool=self._pool):
                self._run(size)
        except torch.OutOfMemoryError:
            self._go_without("memory is short")
        except RuntimeError as error:  # the driver's own: instantiating a graph takes memory too
            # The cause is its context: ending the capture fails too, with an error of its own.
            self._go_without(str(error.__context__ or error).partition("\n")[0])
        else:
            self._graphs[size] = graph

    def _go_without(self, why: str) -> None:
        self._may_capture = False
        largest = max(self._graphs, default=0)
        log.warning("no CUDA graphs for steps of over %d sequences: %s", largest, why)

    def _rehearse(self, size: int) -> None:
        """Run a step of empty rows, which read nothing and write to no page."""
        self._fields.fill_(-1)
        self._lengths.zero_()
        self._run(size)

    def _splits(self, size: int) -> Splits:
        return self._kernels.splits(size, self._caches[0])

    # One step

    def _upload(self, arrays: DecodeArrays) -> None:
        values, (num_rows, num_pages) = torch.from_numpy(arrays.packed), arrays.tables.shape
        if self._device.type != "cpu":  # torch reuses that memory once the copy is done
            values = values.pin_memory()
        self._packed[: len(values)].copy_(values, non_blocking=True)
        tables = self._packed_tables[: num_rows * num_pages].view(num_rows, num_pages)
        self._tables[:num_rows, :num_pages].copy_(tables)

    def _run(self, size: int) -> None:
        token_ids, sources, positions, blocks, slots, top_k, seeds = self._fields[:, :size]
        # Token -1 had no finite logit: its sequence ends, and the results of this step with it.
        sampled_before = self._sampled[sources.clamp_min(0)].clamp_min_(0)
        step = StepInput(
            token_ids=torch.where(token_ids >= 0, token_ids, sampled_before),
            positions=positions,
            blocks=blocks,
            slots=slots,
            plan=LaunchPlan(
                tables=self._tables,
                lengths=self._lengths[:size],
                tiles=self._no_tiles,
                splits=self._splits(size),
            ),
            sampled_rows=sources,  # every row is
        )
        model, logits = self._model, self._logits[:size]
        self._head.into(logits, model.norm(model.hidden(step, self._caches)))
        temperatures, top_p, min_p = self._shares[:, :size]
        draws = Draws(temperatures, top_p, min_p, top_k, seeds)
        self._sampled[:size] = choose(logits, draws, model.config.logit_softcap)

    def _fetch(self, rows: Seq[Row], offset: int) -> PendingTokens:
        kept = self._sampled[offset : offset + len(rows)]
        if self._device.type == "cpu":
            return PendingTokens(rows, offset, kept.clone(), None)
        host = torch.empty(len(rows), dtype=torch.int64, pin_memory=True)
        host.copy_(kept, non_blocking=True)
        return PendingTokens(rows, offset, host, reached())
