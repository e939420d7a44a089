"""`sluice.simulate.pod.Pod` in C++, as the world knows a pod: 17 to 100 times faster."""

import ctypes
import dataclasses
import math
from collections import deque
from collections.abc import Iterable, Sequence
from ctypes import byref, c_double, c_int64
from itertools import chain

import numpy as np
from research.compiled import layout
from research.compiled.library import library
from sluice.simulate.params import Params
from sluice.simulate.pod import Outcome, SimulatedPod
from sluice.simulate.recording import Recording, Totals
from sluice.simulate.trace import Request
from sluice_core import latency, steptime
from sluice_core.contract import (
    AT_CAP_SHARE,
    SKETCH_GAMMA,
    SMOOTH_SHARE,
    TICK_SECONDS,
    Causes,
    FirstTokens,
    Requests,
    Slo,
    StepModel,
    Tick,
    TokenGaps,
    Waiting,
)
from sluice_core.latency import MIN_CHUNK_TOKENS
from sluice_core.sketch import SMALLEST_MS
from sluice_core.steptime import REFIT_S
from sluice_core.wire import Snapshot

NUM_BUCKETS = 2560
INTERFERENCE_AT_ONCE = 64
_NEEDS_FACTORS, _NEEDS_INTERFERENCE = 1, 2


class CannotCompile(RuntimeError):
    """There is no compiled pod here."""


def quickest(params: Params, trace: Sequence[Request]) -> type[SimulatedPod]:
    """`CompiledPod` where it does what `SimulatedPod` would: by arrival, no prefixes, no shedding,
    no delays of single steps, no launch, and g++."""
    is_plain = params.order == "fcfs" and params.overload == "Queue"
    is_plain = is_plain and not (params.has_graphs or params.has_delays)
    is_plain = is_plain and not any(request.prefix for request in trace)
    return CompiledPod if is_plain and library() is not None else SimulatedPod


class Taken(Recording):
    """A recording that takes whole ticks."""

    def take(
        self, ticks: Iterable[Tick], lengths: Iterable[int], state: Snapshot, model: StepModel
    ) -> None:
        """What was booked elsewhere since the last time."""
        for tick in ticks:
            self.ticks.append(tick)
        for length in lengths:
            self.recent.add(length)
        self.engine.snapshot, self.engine.step_model = state, model


class CompiledPod(SimulatedPod):
    """As `SimulatedPod`. Raises CannotCompile."""

    _recording = Taken
    _recorder: Taken

    def _prepare(self, start_s: float) -> None:
        if self.params.order != "fcfs":
            raise CannotCompile("the compiled pod serves by arrival only.")
        loaded = library()
        if loaded is None:
            raise CannotCompile("there is no g++, or no directory to build in.")
        self._library = loaded
        rows = [dataclasses.astuple(record) for record in self.profiled]
        anchor = (layout.Row * len(rows))(*(layout.Row(*row, 1.0) for row in rows))
        config = _config(self.params, self.slo, self.cap, self.epoch, start_s)
        self._pod = loaded.pod_new(byref(config), anchor, len(anchor), byref(_fit()))
        self._is_read = True

    def __del__(self) -> None:
        if hasattr(self, "_pod"):
            self._library.pod_delete(self._pod)

    @property
    def _view(self) -> layout.View:
        view: layout.View = self._library.pod_view(self._pod).contents
        return view

    @property
    def is_idle(self) -> bool:
        return not self._view.num_open

    @property
    def num_preemptions(self) -> int:
        return int(self._view.num_preemptions)

    @property
    def recorder(self) -> Recording:
        if not self._is_read:
            self._read()
            self._is_read = True
        return self._recorder

    @property
    def totals(self) -> Totals:
        totals, pairs = layout.Totals(), (c_int64 * (2 * NUM_BUCKETS))()
        num = self._library.pod_gaps(self._pod, byref(totals), pairs)
        gaps = (totals.num_gaps, totals.num_gaps_over, _sketch(pairs[: 2 * num]))
        return Totals(totals.most_running, *gaps)

    def run(self, until_s: float, arrivals: deque[Request]) -> None:
        loaded, pod = self._library, self._pod
        while arrivals and arrivals[0].t_s <= until_s:
            request = arrivals.popleft()
            loaded.pod_send(pod, request.t_s, request.prompt_tokens, request.max_tokens)
        while need := loaded.pod_run(pod, until_s):
            if need == _NEEDS_FACTORS:
                factors = self.noise.factors()[::-1]  # it takes the last first
                loaded.pod_factors(pod, (c_double * len(factors))(*factors), len(factors))
            elif need == _NEEDS_INTERFERENCE:
                interference = chain.from_iterable(
                    self.noise.interference() for _ in range(INTERFERENCE_AT_ONCE)
                )
                num = 2 * INTERFERENCE_AT_ONCE
                loaded.pod_interference(pod, (c_double * num)(*interference), num)
        self._is_read, self.num_refused = False, int(self._view.num_refused)

    def patch(self, cap: int, epoch: int, now_s: float) -> None:
        self._library.pod_patch(self._pod, cap, epoch, now_s)
        self.cap, self.epoch = cap, epoch
        self._is_read = False
        self.recorder.ticks.configure(epoch, cap, self.slo)

    def outcomes(self) -> tuple[list[Outcome], list[Outcome]]:
        """As a pod's; what one that still decodes has is told as of when it began to."""
        num, num_done = (
            getattr(self._library, name)(self._pod) for name in ("pod_num_jobs", "pod_num_done")
        )
        jobs = (layout.Ended * num)()
        self._library.pod_jobs(self._pod, jobs)
        found = [Outcome(*row) for row in np.ctypeslib.as_array(jobs).tolist()] if num else []
        return found[:num_done], found[num_done:]

    def _read(self) -> None:
        """Bring the recorder to what the library has found since the last time."""
        loaded, pod, view = self._library, self._pod, self._view
        pairs, start, ticks = loaded.pod_pairs(pod), 0, list[Tick]()
        rows, seq = loaded.pod_ticks(pod), self._recorder.ticks.next_seq
        for index in range(view.num_ticks):
            row = rows[index]
            ticks.append(_tick(row, pairs, start, seq + index, self.name))
            start += 2 * (row.num_ttft + row.num_itl + row.num_e2e)
        model = view.model
        self._recorder.take(
            ticks,
            loaded.pod_lengths(pod)[: view.num_lengths],
            Snapshot(view.running, view.waiting_cap, view.waiting_kv, 0, 0, 0, 0, 0, 0, 0),
            StepModel(model.a, model.b, model.c, model.d, model.n, model.resid_q),
        )
        loaded.pod_forget(pod)


def _config(params: Params, slo: Slo, cap: int, epoch: int, start_s: float) -> layout.Config:
    names = (name for name, _ in layout.Config._fields_)
    shared = {name: getattr(params, name) for name in names if hasattr(params, name)}
    targets = {name: getattr(slo, name) or math.inf for name in ("ttft_ms", "itl_ms", "e2e_ms")}
    return layout.Config(
        **shared,
        **targets,
        start_s=start_s,
        tick_s=TICK_SECONDS,
        refit_s=REFIT_S,
        log_gamma=math.log(SKETCH_GAMMA),
        smallest_ms=SMALLEST_MS,
        smooth_share=SMOOTH_SHARE,
        at_cap_share=AT_CAP_SHARE,
        cap=cap,
        epoch=epoch,
        num_blocks=params.kv_tokens // params.block_size,
        caching=params.prefix_caching,
        min_chunk=MIN_CHUNK_TOKENS,
        has_interference=params.interference_every_s > 0,
    )


def _fit() -> layout.Fit:
    """The constants; the library fits the model, from the profile on."""
    known = vars(latency) | vars(steptime)
    constants = [known[name.upper()] for name, *_ in layout.Fit._fields_[2:]]
    return layout.Fit(layout.Model(), 1.0, *constants)


def _sketch(pairs: list[int]) -> dict[int, int]:
    return dict(zip(pairs[::2], pairs[1::2], strict=True))


def _tick(
    row: layout.Tick, pairs: "ctypes._Pointer[c_int64]", start: int, seq: int, boot_id: str
) -> Tick:
    gaps_at = start + 2 * row.num_ttft
    e2e_at = gaps_at + 2 * row.num_itl
    by = Causes(cap=row.by_cap, kv=row.by_kv, prefill=row.by_prefill, outside=row.by_outside)
    same = {n: getattr(row, n) for n in Tick.__struct_fields__ if hasattr(row, n)}
    return Tick(
        **{**same, "settled": bool(row.settled)},
        seq=seq,
        boot_id=boot_id,
        ttft=FirstTokens(row.ttft_n, row.ttft_over, by, _sketch(pairs[start:gaps_at])),
        itl=TokenGaps(
            row.itl_n,
            row.itl_over,
            row.over_after_over,
            row.n_at_cap,
            row.over_at_cap,
            _sketch(pairs[gaps_at:e2e_at]),
        ),
        e2e=Requests(row.e2e_n, row.e2e_over, _sketch(pairs[e2e_at : e2e_at + 2 * row.num_e2e])),
        throttled_s=0.0,
        waiting=Waiting(cap=row.waiting_cap, kv=row.waiting_kv),
    )
