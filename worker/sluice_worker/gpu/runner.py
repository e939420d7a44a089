"""The runner on a GPU: mixed steps on Triton kernels, decode steps ahead of the host."""

from collections.abc import Iterator
from collections.abc import Sequence as Seq

import numpy as np
import torch
from sluice_kernels.triton.choose import choose
from sluice_kernels.triton.prefill import cut_tiles, tile_tokens
from torch import Tensor

from ..models.decoder import Decoder
from ..runner import Runner
from ..sampler import Draw, row_seed, sample
from ..sizing import blocks_for
from ..step import Work
from .arrays import MixedArrays, mixed_arrays
from .decode_step import DecodeStep, Flight
from .forward import Batch, hidden
from .rows import Row, is_plain, rows_after, rows_of

Tokens = dict[int, list[int | None]]
"""What was sampled for a work, by its identity."""


class GpuRunner(Runner):
    """A decoder with its paged KV cache. A step that only decodes is launched before it is asked
    for; the scheduler must leave each sequence a slot more than it has tokens (`num_ahead`).
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
    ) -> None:
        super().__init__(model, num_blocks, block_size, eos_token_ids)
        max_pages = blocks_for(max_model_len, block_size) + 1
        self._decodes = DecodeStep(model, self.caches, ceiling, max_pages, block_size)
        self._ahead: Flight | None = None
        with torch.inference_mode():
            self._decodes.capture_first()

    @torch.inference_mode()
    def execute(self, works: Seq[Work]) -> list[int | None]:
        """As `Runner.execute`; draws by temperature alone have other noise than on a CPU."""
        ahead, self._ahead = self._ahead, None
        claimed = self._claimed(ahead, works)
        rest = [work for work in works if id(work) not in claimed]
        flights = [(ahead, claimed)] if ahead is not None and claimed else []
        found: Tokens = {}
        if rest:
            rest.sort(key=lambda work: (work.num_tokens > 1, work.start))
            rows = rows_of(rest, self.block_size, self._draw)
            if rows is None or not self._decodes.has_room(len(rows)):
                found = self._run_and_wait(rest)
            else:
                flight = self._launch(rest, rows, len(ahead.rows) if ahead and claimed else 0)
                sampling = (id(work) for work in rest if work.samples)
                flights.append((flight, {work: at for at, work in enumerate(sampling)}))
        if not found and all(work.num_samples == 1 for work in works):
            self._run_ahead(flights)
        for flight, places in flights:
            tokens = flight.tokens()
            found |= {work: [tokens[at]] for work, at in places.items()}
        return [token for work in works for token in found.get(id(work), ())]

    @torch.inference_mode()
    def use_idle_time(self) -> bool:
        """Capture one more CUDA graph; False where none is left."""
        self._ahead = None
        return self._decodes.capture_next()

    # Ahead

    def _claimed(self, ahead: Flight | None, works: Seq[Work]) -> dict[int, int]:
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

    def _run_ahead(self, flights: Seq[tuple[Flight, dict[int, int]]]) -> None:
        sampled = (
            (flight.offset + at, flight.rows[at])
            for flight, places in flights
            for at in places.values()
        )
        rows = rows_after(sampled, self.block_size, self._draw)
        if rows:
            self._ahead = self._decodes.launch(rows)

    # What was not ahead

    def _launch(self, works: Seq[Work], rows: Seq[Row], offset: int) -> Flight:
        """Start `works`, whose samples are `rows`; `offset`: behind the rows that ran ahead."""
        if offset == 0 and len(rows) == len(works) == sum(work.num_tokens for work in works):
            return self._decodes.launch(rows)
        arrays = mixed_arrays(works, self.block_size)
        _, normed = self._forward(arrays)
        if not rows:
            return self._decodes.keep((), self._decodes.upload(arrays.sampled), offset)
        logits = self.model.head(normed[self._decodes.upload(arrays.sampled)])
        tokens = self._choose(logits, [row.draw for row in rows], self.model.config.logit_softcap)
        return self._decodes.keep(rows, tokens, offset)

    def _run_and_wait(self, works: Seq[Work]) -> Tokens:
        """A step whose sampling needs the host: edits, cut-offs, drafts, log-probabilities."""
        arrays = mixed_arrays(works, self.block_size)
        stream, _ = self._forward(arrays)
        logits = self.model.logits(stream[self._decodes.upload(arrays.sampled)])
        places = [(work, ahead) for work in works for ahead in range(work.num_samples)]
        draws = [self._draw(work.sequence, ahead) for work, ahead in places]
        tokens = self._sample(logits, draws)
        self._score(logits, [work.sequence for work, _ in places], tokens)
        self._score_prompts(stream, works)
        drawn = iter(tokens)
        return {id(work): [next(drawn) for _ in range(work.num_samples)] for work in works}

    def _forward(self, arrays: MixedArrays) -> tuple[Tensor, Tensor]:
        upload, num_decodes = self._decodes.upload, len(arrays.lengths)
        tiles = cut_tiles(
            arrays.chunks, tile_tokens(self.model.config.shape.num_heads, self.caches[0])
        )
        batch = Batch(
            token_ids=upload(arrays.token_ids),
            positions=upload(arrays.positions),
            slots=upload(arrays.slots),
            lengths=upload(arrays.lengths),
            tables=upload(arrays.tables),
            tiles=upload(tiles),
            num_splits=self._decodes.splits(num_decodes),
        )
        return hidden(self.model, batch, self.caches)

    def _sample(self, logits: Tensor, draws: Seq[Draw]) -> list[int | None]:
        """Each row by the sampler that it has in every step, whatever its neighbours ask for."""
        plain = [at for at, draw in enumerate(draws) if is_plain(draw)]
        others = [at for at, draw in enumerate(draws) if not is_plain(draw)]
        chosen: dict[int, int | None] = {}
        if plain:
            tokens = self._choose(logits[plain], [draws[at] for at in plain], None).tolist()
            chosen |= zip(plain, (token if token >= 0 else None for token in tokens), strict=True)
        if others:
            drawn = sample(logits[others], [draws[at] for at in others])
            chosen |= zip(others, drawn, strict=True)
        return [chosen[at] for at in range(len(draws))]

    def _choose(self, logits: Tensor, draws: Seq[Draw], softcap: float | None) -> Tensor:
        temperatures = np.array(list(_temperatures(draws)), dtype=np.float32)
        seeds = np.array([row_seed(draw.seed, draw.index) for draw in draws], dtype=np.int64)
        upload = self._decodes.upload
        return choose(logits, upload(temperatures), upload(seeds), softcap)


def _temperatures(draws: Seq[Draw]) -> Iterator[float]:
    return (0.0 if draw.is_greedy else draw.temperature for draw in draws)
