"""The frontend's one stateful object: the limits in force, the evidence and the engine.

It receives the engine's reports, and gives the operator the counts.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Mapping

from msgspec import structs
from sluice_core.contract import Evidence, RuntimeConfig, RuntimePatch, Waiting
from sluice_core.errors import DeadlineUnreachable, Draining, NotReady, Shed
from sluice_core.port import EngineFacts, EngineLoad, EngineStep
from sluice_core.work import Deadlines, Work

from ..config import ServerConfig
from ..evidence.health import Verdict
from ..evidence.measured import Measured
from ..evidence.metrics import MINUTE_TICKS, MetricsView, create_registry
from .backend import Backend
from .forecast import forecast_for, retry_after_s
from .limits import RuntimeLimits

log = logging.getLogger(__name__)

BEAT_S = 0.1
"""Seconds between two looks for ticks to close and for hopeless requests."""
CROWDED_LIFETIME = 0.1
"""Share of their age limit that connections reach while requests wait. A Service picks a pod for
each new connection, so a new pod gets its share of the clients within seconds."""


class Runtime:
    """Limits in force, evidence and health. All methods belong to the event loop's thread."""

    def __init__(
        self,
        config: ServerConfig,
        live: RuntimeLimits,
        measured: Measured,
        backend: Backend,
        *,
        model_name: str,
        cache_config: Mapping[str, str],
        throttled_s: Callable[[], float],
        task: str = "generate",
    ) -> None:
        """`live`: in force at the start, with the largest token budget ever allowed.

        `cache_config`: the KV cache's labels in a scrape. `throttled_s`: seconds that the CPU quota
        has throttled this process. `task`: what the model is for, for the log.
        """
        self.config, self.live, self.backend = config, live, backend
        self.model_name, self.created_s = model_name, measured.created_s
        self.engine_liveness, self.recorder = measured.liveness, measured.recorder
        self.stats, self.ledger = measured.stats, measured.ledger
        self.registry = create_registry(model_name, self.stats, self.view)
        self.is_closed = False
        self._largest_budget = live.max_num_batched_tokens
        self._cache_config, self._task = cache_config, task
        self._throttled_s = throttled_s

    # -- news of the engine (backend.Listener)

    def serves(self, facts: EngineFacts) -> None:
        self.live = structs.replace(self.live, cap=facts.cap)
        self.stats.set_window(facts.max_model_len)
        self.recorder.engine.serves(facts)
        self.recorder.ticks.start(self.live.epoch, facts.cap, self.live.slo)
        log.info(
            "ready",
            extra={
                "task": self._task,
                "cap": facts.cap,
                "ceiling": facts.ceiling,
                "predicted": facts.predicted_cap,
                "epoch": self.live.epoch,
                "kv_tokens": facts.kv_tokens,
                "max_model_len": facts.max_model_len,
                "kernels": facts.kernels,
                "memory": facts.memory.measured,
            },
        )

    def step(self, step: EngineStep, load: EngineLoad, now_s: float) -> None:
        self.recorder.engine.see(load)
        self.recorder.engine.step(step)
        self.recorder.admit(step.admitted, step.started_s)
        self.stats.step(step)
        self.shed(now_s)

    def state(self, load: EngineLoad) -> None:
        self.recorder.engine.see(load)

    # -- live configuration

    def limits(self) -> EngineFacts:
        """Return what the engine says of itself; raises NotReady before it serves."""
        facts = self.backend.facts
        if facts is None:
            raise NotReady("the model is being loaded", retry_after_s=1)
        return facts

    def runtime_config(self) -> RuntimeConfig:
        """The limits in force; raises NotReady before the engine serves."""
        state = self.recorder.engine.load
        return RuntimeConfig(
            **structs.asdict(self.live) | {"scheduling_policy": self.live.policy},
            **self.backend.manner._asdict(),
            ceiling=self.limits().ceiling,
            running=state.running,
            waiting=Waiting(cap=state.waiting_cap, kv=state.waiting_kv),
            boot_id=self.recorder.ticks.boot_id,
            hung=self.engine_liveness.hung(time.monotonic(), self.config.liveness_timeout),
        )

    def patch(self, change: RuntimePatch) -> RuntimeConfig:
        """Put `change` in force. The same again changes nothing; see `contract.RuntimePatch`."""
        new = self.live.changed(
            change, ceiling=self.limits().ceiling, largest_budget=self._largest_budget
        )
        if new != self.live:
            self.backend.configure(new.for_engine())
            self.live = new
            self.recorder.ticks.configure(new.epoch, new.cap, new.slo)
            log.info("configured", extra={"epoch": new.epoch, "cap": new.cap})
        return self.runtime_config()

    def evidence(self, after: int) -> Evidence:
        """Closed ticks after `after`; raises NotReady before the engine serves."""
        self.limits()
        return self.recorder.evidence(after)

    # -- health, metrics, time

    def liveness(self) -> Verdict:
        return self.engine_liveness.liveness(time.monotonic(), self.config.liveness_timeout)

    def health(self) -> Verdict:
        return self.engine_liveness.health(time.monotonic(), self.config.liveness_timeout)

    def readiness(self) -> Verdict:
        return self.engine_liveness.readiness(time.monotonic(), self.config.liveness_timeout)

    def load(self) -> dict[str, float]:
        """The load for a gateway's balancing, under the gateway's names."""
        state = self.recorder.engine.load
        return {"kv_cache_usage_perc": state.kv_usage, "num_requests_waiting": state.waiting}

    def lifetime(self) -> float:
        """The share of its age limit that a connection may reach: another pod may have room."""
        if self.engine_liveness.is_draining:
            return 0.0
        return CROWDED_LIFETIME if self.recorder.engine.load.waiting else 1.0

    def drain(self) -> None:
        """Stop being ready; each answer closes its connection."""
        self.engine_liveness.is_draining = True

    def close(self) -> None:
        """Take no more requests, and end the open ones."""
        self.is_closed = True
        sentence = "the server shut down before this was finished"
        self.backend.fail_all(Draining(sentence, retry_after_s=1))

    @property
    def num_open(self) -> int:
        """Sequences that have not ended, those of the background left out."""
        return self.backend.num_open - len(self.recorder.requests.background)

    def view(self) -> MetricsView:
        engine, cache = self.backend.facts, dict(self._cache_config)
        now_s = time.monotonic()
        if engine is not None:
            cache["block_size"] = str(engine.block_size)
            cache["num_gpu_blocks"] = str(engine.num_blocks)
        return MetricsView(
            is_ready=self.readiness().ok,
            is_hung=self.engine_liveness.hung(now_s, self.config.liveness_timeout) is not None,
            load=self.recorder.engine.load,
            open_requests=self.backend.num_open,
            epoch=self.live.epoch,
            cap=self.live.cap,
            ceiling=engine.ceiling if engine else 0,
            cache_config=cache,
            memory=self.recorder.engine.memory,
            step_model=self.recorder.engine.step_model,
            last_minute=self.recorder.ticks.newest(MINUTE_TICKS),
            totals=self.recorder.ticks.totals,
        )

    async def beat(self) -> None:
        """Close ticks as time passes, and shed; runs until cancelled."""
        while True:
            now_s = time.monotonic()
            if self.recorder.ticks.is_due(now_s):
                self.recorder.advance(now_s, time.time(), self._throttled_s())
            self.shed(now_s)
            await asyncio.sleep(BEAT_S)

    def shed(self, now_s: float) -> None:
        """Drop the requests that wait and can no longer have their first token in time.

        Requests that have begun are kept if the engine makes progress, and dropped if it hangs.
        """
        hopeless = self.recorder.hopeless(now_s, self.live.shed_ms)
        if not hopeless:
            return
        first = hopeless[0]
        again = Work(
            (first.num_prompt_tokens,),
            deadlines=Deadlines(first.ttft_ms),
            priority=first.priority,
            client=first.client,
        )
        forecast = forecast_for(
            self.recorder, self.live, self.num_open, again, arrival_s=now_s, now_s=now_s
        )
        is_moving = self.engine_liveness.progress(now_s, self.config.liveness_timeout).ok
        end = self.backend.drop if is_moving else self.backend.fail
        for timer in hopeless:
            kind = Shed if timer.ttft_ms is None else DeadlineUnreachable
            error = kind(
                "the first token can no longer come within the target of "
                f"{timer.ttft_ms or self.live.slo.ttft_ms:g} ms, so the request was dropped",
                retry_after_s=retry_after_s(forecast.wait_s(1)),
            )
            end(timer.request_id, error)
