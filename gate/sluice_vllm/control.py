"""The work before and after each step of vLLM's scheduler. *Rim*: reads the clocks."""

import logging
import os
import time
from collections import deque
from typing import Any

from msgspec.structs import replace
from sluice_core.contract import AT_CAP_SHARE, MemoryReport, StepModel, policy_in_force
from sluice_core.steptime import StepRecord
from sluice_core.wire import EngineLimits, Ready, Snapshot, StepReport

from .budget import Budget
from .link import Link
from .order import DeadlineOrder
from .probe import what_lacks, why_whole
from .settings import Settings, read

log = logging.getLogger("vllm.sluice")

KV_FULL = 0.95
"""Share of KV cache in use from which on requests below the cap count as waiting for it."""


class Control:
    """Sets a scheduler's cap, token budget and order before each step, and reports the step.

    `scheduler`: vLLM's; `probe` lists what is used of it.
    """

    def __init__(self, scheduler: Any, given: Settings, version: str, *, may_cut: bool) -> None:
        """`may_cut`: prompts may be computed in chunks of any size."""
        self._scheduler, self._version, self._may_cut = scheduler, version, may_cut
        self._ceiling: int = scheduler.max_num_running_reqs
        self._most_tokens: int = scheduler.max_num_scheduled_tokens
        cap, policy = scheduler.max_num_active_reqs, policy_in_force(None, given.ttft_ms)
        self.limits = EngineLimits(0, cap, self._most_tokens, given.itl_ms, given.ttft_ms, policy)
        self.budget = Budget()
        self._order = DeadlineOrder(self.limits)
        self.link = Link(given.socket, self._ready) if given.socket else None
        self._steps: dict[int, tuple[float, EngineLimits, int, int]] = {}  # by vLLM's output
        self._ended_s: float | None = None  # of the last step; None: it left nothing to do
        self._num_preemptions = 0
        self._num_blocks: int = scheduler.cache_config.num_gpu_blocks
        self._poll(time.monotonic())

    def before_step(self) -> float:
        """Set the limits of the next step; returns its start on the monotonic clock."""
        started_s, scheduler = time.monotonic(), self._scheduler
        self._poll(started_s)
        scheduler.max_num_active_reqs = self.limits.max_num_seqs
        scheduler.max_num_scheduled_tokens = self._most_tokens
        decodes, kv_tokens, has_prefill, is_mixed = 0, 0, False, False
        for request in scheduler.running:
            if request.is_prefill_chunk:
                has_prefill = True
            else:
                decodes += 1
                kv_tokens += request.num_computed_tokens
                is_mixed = is_mixed or has_prefill
        if is_mixed:  # a prefill chunk before a decode would take its token
            scheduler.running.sort(key=lambda request: bool(request.is_prefill_chunk))
        num_running, num_waiting = scheduler.get_request_counts()
        if self._may_cut and (has_prefill or num_waiting):
            per_decode = 1 + scheduler.num_spec_tokens
            tokens = self.budget.tokens(self.limits, decodes, kv_tokens, per_decode)
            scheduler.max_num_scheduled_tokens = min(tokens, self._most_tokens)
        num_free = self.limits.max_num_seqs - num_running
        if num_waiting and num_free > 0 and self.limits.policy == "deadline":
            self._arrange(decodes, kv_tokens, num_free)
        return started_s

    def scheduled(self, output: Any, started_s: float) -> None:
        """vLLM scheduled `output`, which runs now. Drafts count as prefill, whose work they are."""
        per_decode, requests = 1 + self._scheduler.num_spec_tokens, self._scheduler.requests
        decodes = kv_tokens = 0
        for request_id, num_tokens in output.num_scheduled_tokens.items():
            decodes += num_tokens <= per_decode
            kv_tokens += requests[request_id].num_computed_tokens
        self._num_preemptions += len(output.preempted_req_ids or ())
        self._steps[id(output)] = started_s, self.limits, decodes, kv_tokens

    def ended(self, output: Any) -> None:
        """Book the step's tokens.

        A step lasts from the end of the one before, if that left something to do. Time between two
        steps is part of the gap between two tokens as well.
        """
        now_s = time.monotonic()
        started_s, limits, decodes, kv_tokens = self._steps.pop(id(output))
        started_s = started_s if self._ended_s is None else self._ended_s
        is_busy = bool(self._steps) or self._scheduler.get_num_unfinished_requests() > 0
        self._ended_s = now_s if is_busy else None
        if not output.total_num_scheduled_tokens:
            return
        step_ms = 1e3 * (now_s - started_s)
        prefill = output.total_num_scheduled_tokens - decodes
        record = StepRecord(now_s, decodes, kv_tokens, prefill, step_ms)
        model = self.budget.learn(record)
        if self.link is not None:
            self.link.send(self._report(limits, record, len(output.num_scheduled_tokens), model))

    def _poll(self, now_s: float) -> None:
        """Take the newest limits, within those that the engine was started with."""
        for limits in self.link.receive(now_s) if self.link else ():
            self.limits = self._order.limits = replace(
                limits,
                max_num_seqs=max(min(limits.max_num_seqs, self._ceiling), 1),
                max_num_batched_tokens=min(limits.max_num_batched_tokens, self._most_tokens),
            )

    def _arrange(self, decodes: int, kv_tokens: int, num_free: int) -> None:
        waiting, most = self._scheduler.waiting, self.limits.max_num_batched_tokens
        if isinstance(waiting, deque):  # else vLLM was started with an order of its own
            price_s = self.budget.times.price_s(self.limits.itl_ms, most, decodes, kv_tokens)
            self._order.arrange(waiting, time.time(), price_s, num_free)

    def _ready(self) -> Ready:
        scheduler = self._scheduler
        kv_tokens = self._num_blocks * scheduler.block_size
        return Ready(
            ceiling=self._ceiling,
            predicted_max_num_seqs=self._ceiling,
            max_num_seqs=self.limits.max_num_seqs,
            max_model_len=scheduler.max_model_len,
            block_size=scheduler.block_size,
            num_blocks=self._num_blocks,
            kv_tokens=kv_tokens,
            memory=MemoryReport(planned={}, measured={}, kv_tokens=kv_tokens),
            step_model=self.budget.times.model,
            kernels=f"vLLM {self._version}",
        )

    def _report(
        self, limits: EngineLimits, record: StepRecord, num_running: int, model: StepModel | None
    ) -> StepReport:
        """`tokens` stays empty: the gate sees them pass."""
        snapshot = self._snapshot()
        return StepReport(
            tokens=[],
            epoch=limits.epoch,
            started_s=record.at_s - record.step_ms / 1e3,
            step_s=record.step_ms / 1e3,
            num_decodes=record.num_decodes,
            num_kv_tokens=record.num_kv_tokens,
            num_prefill_tokens=record.num_prefill_tokens,
            num_running=num_running,
            at_cap=snapshot.running >= AT_CAP_SHARE * limits.max_num_seqs,
            snapshot=snapshot,
            step_model=model,
            is_slow=self.budget.times.is_slow,
        )

    def _snapshot(self) -> Snapshot:
        running, waiting = self._scheduler.get_request_counts()
        usage = self._scheduler.kv_cache_manager.usage
        at_cap, kv_full = running >= self.limits.max_num_seqs, usage >= KV_FULL
        for_cap, for_kv = waiting * at_cap, waiting * (kv_full and not at_cap)
        return Snapshot(
            running=running,
            waiting_cap=for_cap,
            waiting_kv=for_kv,
            used_blocks=round(usage * self._num_blocks),
            cached_blocks=0,  # this and three more are in vLLM's own metrics
            preempted_tokens=0,
            prefix_queries=0,
            prefix_hits=0,
            num_blocks=self._num_blocks,
            num_preemptions=self._num_preemptions,
            waiting_turn=waiting - for_cap - for_kv,
        )


def attach(scheduler: Any, stock: Any, version: str) -> Control | None:
    """A control of `scheduler`, of class `stock`; None if this vLLM is not supported: the log says
    why."""
    lack = what_lacks(scheduler, stock)
    if lack is not None:
        log.warning("Sluice leaves vLLM %s as it is, and the gate holds the cap: %s", version, lack)
        return None
    whole = why_whole(scheduler)
    if whole is not None:
        log.warning("Sluice sizes no chunks of prompts: %s", whole)
    given = read(os.environ)
    log.info("Sluice's inner loop runs in vLLM %s: %s", version, given)
    return Control(scheduler, given, version, may_cut=whole is None)
