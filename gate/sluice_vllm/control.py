"""The work before and after each step of vLLM's scheduler. *Rim*: reads the clocks."""

import logging
import os
import time
from typing import Any, NamedTuple

from msgspec.structs import replace
from sluice_core.contract import AT_CAP_SHARE, MemoryReport, StepModel, policy_in_force
from sluice_core.port import EngineLimits, EngineLoad
from sluice_core.steptime import StepRecord
from sluice_core.wire import Ready, StepReport

from .link import GateLink
from .probe import what_lacks, why_never_held, why_whole
from .settings import InnerSettings, read
from .steering import KV_FULL, Begun, Steering

log = logging.getLogger("vllm.sluice")


class _Step(NamedTuple):
    """A step under way, and the limits that it was scheduled with."""

    started_s: float
    limits: EngineLimits
    begun: Begun


class Control:
    """Steers a scheduler before each step (`steering`), and reports the step to a gate.

    `scheduler`: vLLM's; `probe` lists what is used of it.
    """

    def __init__(
        self, scheduler: Any, given: InnerSettings, version: str, *, may_cut: bool, may_hold: bool
    ) -> None:
        """`may_cut`, `may_hold`: as in `Steering`."""
        self._scheduler, self._version = scheduler, version
        self._ceiling: int = scheduler.max_num_running_reqs
        self._most_tokens: int = scheduler.max_num_scheduled_tokens
        limits = EngineLimits(
            epoch=0,
            cap=scheduler.max_num_active_reqs,
            max_num_batched_tokens=self._most_tokens,
            itl_ms=given.itl_ms,
            ttft_ms=given.ttft_ms,
            policy=policy_in_force(None, given.ttft_ms),
            hold_share=given.hold_share,
        )
        self.steering = Steering(scheduler, limits, may_cut=may_cut, may_hold=may_hold)
        self.trim = self.steering.trim
        self.link = GateLink(given.socket, self._ready) if given.socket else None
        self._steps: dict[int, _Step] = {}  # by vLLM's output
        self._ended_s: float | None = None  # of the last step; None: it left nothing to do
        self._num_preemptions = 0
        self._num_blocks: int = scheduler.cache_config.num_gpu_blocks
        self._poll(time.monotonic())

    @property
    def limits(self) -> EngineLimits:
        """Those in force."""
        return self.steering.limits

    def before_step(self) -> float:
        """Set the limits of the next step; returns its start on the monotonic clock."""
        started_s = time.monotonic()
        self._poll(started_s)
        self.steering.prepare(time.time())
        return started_s

    def scheduled(self, output: Any, started_s: float) -> None:
        """Note that vLLM scheduled `output`."""
        self._num_preemptions += len(output.preempted_req_ids or ())
        begun = self.steering.scheduled(output, time.time())
        self._steps[id(output)] = _Step(started_s, self.limits, begun)

    def ended(self, output: Any) -> None:
        """Book the step's tokens.

        A step lasts from the end of the one before, if that left something to do. Time between two
        steps is part of the gap between two tokens as well.
        """
        now_s = time.monotonic()
        step = self._steps.pop(id(output))
        self.steering.ended(output, time.time())
        started_s = step.started_s if self._ended_s is None else self._ended_s
        is_busy = bool(self._steps) or self._scheduler.get_num_unfinished_requests() > 0
        self._ended_s = now_s if is_busy else None
        if not output.total_num_scheduled_tokens:
            return
        step_ms, begun = 1e3 * (now_s - started_s), step.begun
        record = StepRecord(now_s, begun.decodes, begun.kv_tokens, begun.prefill, step_ms)
        model = self.steering.learn(record)
        if self.link is not None:
            self.link.send(self._report(step, record, len(output.num_scheduled_tokens), model))

    def _poll(self, now_s: float) -> None:
        """Take the newest limits, within those that the engine was started with."""
        for limits in self.link.receive(now_s) if self.link else ():
            self.steering.limits = replace(
                limits,
                cap=max(min(limits.cap, self._ceiling), 1),
                max_num_batched_tokens=min(limits.max_num_batched_tokens, self._most_tokens),
            )

    def _ready(self) -> Ready:
        scheduler = self._scheduler
        kv_tokens = self._num_blocks * scheduler.block_size
        return Ready(
            ceiling=self._ceiling,
            predicted_cap=self._ceiling,
            cap=self.limits.cap,
            max_model_len=scheduler.max_model_len,
            block_size=scheduler.block_size,
            num_blocks=self._num_blocks,
            kv_tokens=kv_tokens,
            memory=MemoryReport(planned={}, measured={}, kv_tokens=kv_tokens),
            step_model=self.steering.times.model,
            kernels=f"vLLM {self._version}",
        )

    def _report(
        self, step: _Step, record: StepRecord, num_running: int, model: StepModel | None
    ) -> StepReport:
        """`tokens` stays empty: the gate sees them pass."""
        limits, snapshot = step.limits, self._snapshot()
        return StepReport(
            tokens=[],
            epoch=limits.epoch,
            started_s=record.at_s - record.step_ms / 1e3,
            step_s=record.step_ms / 1e3,
            num_decodes=record.num_decodes,
            num_kv_tokens=record.num_kv_tokens,
            num_prefill_tokens=record.num_prefill_tokens,
            num_running=num_running,
            at_cap=snapshot.running >= AT_CAP_SHARE * limits.cap,
            snapshot=snapshot,
            step_model=model,
            is_slow=self.steering.times.is_slow,
            is_long=step.begun.is_long,
        )

    def _snapshot(self) -> EngineLoad:
        running, waiting = self._scheduler.get_request_counts()
        usage = self._scheduler.kv_cache_manager.usage
        at_cap, kv_full = running >= self.limits.cap, usage >= KV_FULL
        for_cap, for_kv = waiting * at_cap, waiting * (kv_full and not at_cap)
        return EngineLoad(
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
    free = whole or why_never_held(scheduler, stock)
    if free is not None:
        log.warning("Sluice holds no first tokens: %s", free)
    given = read(os.environ)
    log.info("Sluice's inner loop runs in vLLM %s: %s", version, given)
    return Control(scheduler, given, version, may_cut=whole is None, may_hold=free is None)
