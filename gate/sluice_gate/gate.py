"""One gate: the runtime, the queue, the engine's server, and how each hears of the others."""

import asyncio
import math
import time
from contextlib import AsyncExitStack

from msgspec import structs
from sluice_core.bounded import Numbers
from sluice_core.contract import MemoryReport
from sluice_core.errors import EngineDied, timestamp
from sluice_core.wire import EngineLimits, Ready, StepReport
from sluice_frontend.evidence.health import Liveness
from sluice_frontend.serving.admission import Admission
from sluice_frontend.serving.backend import Listener
from sluice_frontend.serving.limits import Manner, RuntimeLimits
from sluice_frontend.serving.runtime import Runtime

from .config import GateConfig
from .engine.inner import SglangKey, VllmSocket
from .engine.patience import Owed
from .engine.upstream import Served, Upstream
from .proxy import Proxy
from .queue.backend import GateBackend

SECOND_S = 1.0
QUEUE_BYTES = 8 << 30
"""Of this memory the frontend's rule gives a share to waiting prompts; their bodies are bounded by
`http.bodies` as well."""
AHEAD_SHARE = 4
"""Divisor: this part of the cap waits inside an engine that holds the cap itself."""


def live_at_start(config: GateConfig) -> RuntimeLimits:
    """As the flags and the operator's files say."""
    engine, server = config.engine, config.server
    ceiling = engine.capacity(None)
    return RuntimeLimits(
        epoch=engine.epoch,
        cap=min(engine.initial_num_seqs or ceiling, ceiling),
        max_num_batched_tokens=max(engine.max_num_batched_tokens, ceiling),
        slo=server.slo,
        overload=server.overload,
        scheduling_policy=engine.scheduling_policy,
        hold_share=engine.hold_share,
    )


class Gate:
    """Everything between two ports and an engine."""

    def __init__(self, config: GateConfig) -> None:
        self.config = config
        live = live_at_start(config)

        def connect(liveness: Liveness, listener: Listener) -> GateBackend:
            return GateBackend(live.for_engine(), lambda: self.runtime.ledger)

        self.runtime: Runtime[GateBackend] = Runtime(
            config.server,
            live,
            model_name=config.model_name,
            cache_config={},
            throttled_s=lambda: 0.0,
            connect=connect,
            manner=self._manner,
        )
        self.backend = self.runtime.backend
        self.admission = Admission(self.runtime, QUEUE_BYTES)
        liveness, unreadable = self.runtime.engine_liveness, self.runtime.stats.unreadable
        self._served_file = config.engine.served_file
        liveness.has_served = self._served_file is not None and self._served_file.exists()
        self.upstream = Upstream(config.engine, config.server, liveness, unreadable)
        self.upstream.on_ready, self.upstream.on_load = self._ready, self.backend.loaded
        self.upstream.on_away = self._away
        self.proxy = Proxy(config, self.admission, self.backend, self.upstream, unreadable)
        told = self._inner_changed, self._inner_stepped
        self._socket = VllmSocket(self._limits, *told, Numbers("socket", unreadable))
        self._num_inner = 0
        self._has_served = False
        self._sglang: SglangKey | None = None

    async def run(self, stop: asyncio.Event) -> None:
        """Watch the engine until `stop`."""
        async with AsyncExitStack() as stack, self.upstream, asyncio.TaskGroup() as tasks:
            backend, engine = self.backend, self.config.engine
            running = [
                tasks.create_task(self.runtime.beat()),
                tasks.create_task(self._each_second()),
                tasks.create_task(self.upstream.watch(self._owed)),
            ]
            if engine.engine_socket is not None:
                server = await self._socket.listen(engine.engine_socket)
                await stack.enter_async_context(server)
                backend.on_limits.append(self._socket.tell)
            if engine.engine_admin_key_file is not None:
                self._sglang = SglangKey(self.upstream, engine.engine_admin_key_file)
                backend.on_limits.append(self._sglang.tell)
                running.append(tasks.create_task(self._sglang.run()))
            await stop.wait()
            for task in running:
                task.cancel()
            self.proxy.close()

    # -- news

    def _ready(self, served: Served) -> None:
        """The engine answers, for the first time or again."""
        self.proxy.serves(served.model)
        self.backend.progress.window = served.window or math.inf
        ceiling = self.config.engine.capacity(served.capacity)
        cap = min(self.runtime.live.cap, ceiling)
        self.backend.ready = Ready(
            ceiling=ceiling,
            predicted_cap=cap,
            cap=cap,
            max_model_len=max(served.window, 1),
            block_size=1,
            num_blocks=0,
            kv_tokens=0,
            memory=MemoryReport(planned={}, measured={}, kv_tokens=0),
            step_model=None,
            kernels=self.config.engine.engine,
        )
        self.backend.is_away = False
        if not self._has_served:
            self._has_served = True
            self.runtime.ready(self.backend.ready)
        if self._served_file is not None:
            self._served_file.touch()
        self.backend.configure(self._limits())

    def _away(self) -> None:
        """Nobody begins until it is back; those that began learn of it by their connection."""
        if not self.backend.is_away:
            self.backend.is_away = True
            moment = timestamp(time.time())
            gone = EngineDied(f"the engine went away at {moment}", retry_after_s=1)
            self.backend.fail_waiting(gone)
        if self._served_file is not None:
            self._served_file.unlink(missing_ok=True)

    def _owed(self) -> Owed:
        is_counted = self.config.engine.facts.counts_steps and self.backend.load.tokens is not None
        return self.backend.progress.owed(is_counted=is_counted)

    def _limits(self) -> EngineLimits:
        return self.runtime.live.for_engine()

    def _inner_changed(self, num: int, ceiling: int) -> None:
        self._num_inner, ready = num, self.backend.ready
        self.backend.books.has_law = num > 0
        if ready is not None and 0 < ceiling < ready.ceiling:
            self.backend.ready = structs.replace(ready, ceiling=ceiling)
        cap = self.backend.queue.limits.cap
        self.backend.queue.ahead = max(1, cap // AHEAD_SHARE) if num else 0
        self.backend.pump()

    def _inner_stepped(self, report: StepReport) -> None:
        """A step of vLLM. Its tokens are counted as they pass here."""
        now_s = time.monotonic()
        self.backend.progress.stepped(now_s)
        if report.is_long:
            self.backend.books.long_ended_s = now_s
        recorder, own = self.runtime.recorder, self.runtime.recorder.engine.snapshot
        tick = recorder.ticks.open
        decodes, prefill = tick.decodes, tick.prefill_tokens
        recorder.engine.step(structs.replace(report, snapshot=own, tokens=[]))
        tick.decodes, tick.prefill_tokens = decodes, prefill

    async def _each_second(self) -> None:
        """The engine's progress, also while a look at it lasts, and the step model from outside,
        unless one comes from inside."""
        while True:
            await asyncio.sleep(SECOND_S)
            self.upstream.judge(self._owed())
            if not self._num_inner:
                self.runtime.recorder.engine.step_model = self.backend.outside.fit(time.monotonic())

    def _manner(self) -> Manner:
        holds_cap = bool(self._num_inner) or (self._sglang is not None and self._sglang.is_set)
        return Manner(
            cap_is="live" if holds_cap else "gate",
            gaps_from=self.backend.books.gaps_from,
            chunk_is="live" if self._num_inner else "fixed",
        )
