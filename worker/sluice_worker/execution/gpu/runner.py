"""The runner on a GPU: mixed steps on Triton kernels, decode steps ahead of the host."""

from collections.abc import Sequence as Seq
from typing import Any

import torch
from numpy.typing import NDArray
from sluice_core.model.sizing import blocks_for
from sluice_kernels.triton.choose import choose
from sluice_kernels.triton.cut import Draws
from sluice_kernels.triton.kernels import TritonKernels, upload
from sluice_kernels.waiting import reached
from torch import Tensor

from ...scheduling.step import StepWork
from ..models.decoder import Decoder
from ..runner import Runner, Tokens, by_length
from ..sampler import Draw, sample
from .arrays import aligned_rows, draw_arrays
from .decode_step import DecodeStep, PendingTokens
from .rows import Row, decodes_of, rows_after, rows_of


class GpuRunner(Runner):
    """A decoder with its paged KV cache. A step of decodes is launched before the scheduler asks
    for it, unless the model has experts. So the scheduler must give each sequence one slot more
    than its tokens (`num_ahead`).
    """

    def __init__(
        self,
        model: Decoder,
        num_blocks: int,
        block_size: int,
        eos_token_ids: frozenset[int],
        *,
        ceiling: int,
        max_model_len: int,
        activation_bytes: int,
    ) -> None:
        super().__init__(model, num_blocks, block_size, eos_token_ids)
        assert isinstance(model.kernels, TritonKernels)
        max_pages = blocks_for(max_model_len, block_size) + 1
        self._decodes = DecodeStep(
            model, model.kernels, self.caches, ceiling, max_pages, activation_bytes
        )
        self._ahead: PendingTokens | None = None
        # With experts the host waits for counts in each layer, so launching a step takes as long
        # as the step. The tokens of the step before would wait that long.
        self._runs_ahead = model.config.shape.experts is None
        with torch.inference_mode():
            self._decodes.warm_up()

    @property
    def is_ahead(self) -> bool:
        return self._ahead is not None

    @torch.inference_mode()
    def execute(self, works: Seq[StepWork], prefill_follows: bool = False) -> list[int | None]:
        """As `Runner.execute`. Unedited draws have other noise than on a CPU."""
        ahead, self._ahead = self._ahead, None
        claimed = self._claimed(ahead, works)
        rest = [work for work in works if id(work) not in claimed]
        flights = [(ahead, claimed)] if ahead is not None and claimed else []
        found: Tokens = {}
        if rest:
            rest.sort(key=by_length)
            rows = rows_of(rest, self.block_size, self._draw)
            if rows is None or len(rows) > self._decodes.ceiling:
                found = self._run(rest)
            else:
                flight = self._launch(rest, rows, len(ahead.rows) if ahead and claimed else 0)
                sampling = (id(work) for work in rest if work.samples)
                flights.append((flight, {work: at for at, work in enumerate(sampling)}))
        may_go_on = self._runs_ahead and not (found or prefill_follows)
        if may_go_on and all(work.num_samples == 1 for work in works):
            self._run_ahead(flights)
        for flight, places in flights:
            tokens = flight.tokens()
            found |= {work: [tokens[at]] for work, at in places.items()}
        return [token for work in works for token in found.get(id(work), ())]

    @torch.inference_mode()
    def use_idle_time(self) -> bool:
        """Capture one more CUDA graph; False if none is left."""
        self._ahead = None
        return self._decodes.capture_next()

    # Ahead

    def _claimed(self, ahead: PendingTokens | None, works: Seq[StepWork]) -> dict[int, int]:
        """The rows that ran ahead, by the identity of the work that asks for them."""
        if ahead is None:
            return {}
        places = {id(row.sequence): at for at, row in enumerate(ahead.rows)}
        return {
            id(work): places[id(work.sequence)]
            for work in works
            if id(work.sequence) in places
            and ahead.rows[places[id(work.sequence)]].is_of(work, self.block_size)
        }

    def _run_ahead(self, flights: Seq[tuple[PendingTokens, dict[int, int]]]) -> None:
        sampled = (
            (flight.offset + at, flight.rows[at])
            for flight, places in flights
            for at in places.values()
        )
        rows = rows_after(sampled, self.block_size, self._draw)
        if rows:
            self._ahead = self._decodes.launch(rows)

    # Work that did not run ahead. If sampling needs the host (edits, drafts, scores), `_run` waits.

    def _launch(self, works: Seq[StepWork], rows: Seq[Row], offset: int) -> PendingTokens:
        """Start `works`, whose samples are `rows`; `offset`: behind the rows that ran ahead."""
        if offset == 0 and len(rows) == len(works) == sum(work.num_tokens for work in works):
            return self._decodes.launch(rows)
        step = self.build(works)
        if not rows:
            self.model.hidden(step, self.caches)
            return self._decodes.keep((), step.sampled_rows, offset)
        logits = self.model.logits(self.model.hidden(step, self.caches, step.sampled_rows))
        tokens = self._choose(logits, [row.draw for row in rows])
        return self._decodes.keep(rows, tokens, offset)

    def _forward(self, works: Seq[StepWork], draws: Seq[Draw]) -> tuple[Tensor, Tensor | None]:
        """Logits of all `draws`, and the last layer's output. It is None if `works` only decode: a
        graph runs them."""
        rows = decodes_of(works, draws, self.block_size)
        if rows is not None and len(rows) <= self._decodes.ceiling:
            return self._decodes.logits(rows), None
        step = self.build(works)
        stream = self.model.hidden(step, self.caches)
        return self.model.logits(stream[step.sampled_rows]), stream

    def _sample(self, logits: Tensor, draws: Seq[Draw]) -> list[int | None]:
        """Sample each row by the same sampler in every step, whatever its neighbours need."""
        if self.device.type == "cuda":
            reached().synchronize()  # sleeps here: the first operation below would spin
        edited = [at for at, draw in enumerate(draws) if draw.is_edited]
        others = [at for at, draw in enumerate(draws) if not draw.is_edited]
        chosen: dict[int, int | None] = {}
        if others:
            tokens = self._choose(logits[others], [draws[at] for at in others]).tolist()
            chosen |= zip(others, (token if token >= 0 else None for token in tokens), strict=True)
        if edited:
            drawn = sample(logits[edited], [draws[at] for at in edited])
            chosen |= zip(edited, drawn, strict=True)
        return [chosen[at] for at in range(len(draws))]

    def _choose(self, logits: Tensor, draws: Seq[Draw]) -> Tensor:
        count = len(draws)
        arrays = draw_arrays(draws, aligned_rows(count))
        shares, numbers = (self._tensor(array)[:, :count] for array in arrays)
        return choose(logits, Draws(*shares, *numbers))

    def _tensor(self, values: NDArray[Any]) -> Tensor:
        return upload(torch.from_numpy(values), self.device)
