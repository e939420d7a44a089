"""One gate: the runtime, the queue, the engine's server, and how each hears of the others."""

import asyncio
import math
import time
from contextlib import AsyncExitStack

from msgspec import structs
from sluice_core.bounded import Numbers
from sluice_core.errors import EngineDied, timestamp
from sluice_core.port import EngineFacts, EngineLimits, EngineStep
from sluice_frontend.batches.routes import Batches
from sluice_frontend.evidence.measured import Measured
from sluice_frontend.serving.admission import Admission
from sluice_frontend.serving.limits import RuntimeLimits
from sluice_frontend.serving.runtime import Runtime

from .config import GateConfig
from .engine.inner import SglangKey, VllmSocket
from .engine.patience import Owed
from .engine.upstream import EngineSays, Upstream
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
        live, measured = live_at_start(config), Measured(config.server.flag_slo)
        self.backend = GateBackend(live.for_engine(), measured.ledger)
        self.runtime = Runtime(
            config.server,
            live,
            measured,
            self.backend,
            model_name=config.model_name,
            cache_config={},
            throttled_s=lambda: 0.0,
        )
        self.admission = Admission(self.runtime, QUEUE_BYTES)
        liveness, unreadable = self.runtime.engine_liveness, self.runtime.stats.unreadable
        self._served_file = config.engine.served_file
        liveness.has_served = self._served_file is not None and self._served_file.exists()
        self.upstream = Upstream(config.engine, config.server, liveness, unreadable)
        self.upstream.on_ready, self.upstream.on_load = self._ready, self.backend.loaded
        self.upstream.on_away = self._away
        self.proxy = Proxy(config, self.admission, self.backend, self.upstream, unreadable)
        self.batches = Batches(self.runtime)
        self.batches.app = self.proxy
        told = self._inner_changed, self._inner_stepped
        self._socket = VllmSocket(self._limits, *told, Numbers("socket", unreadable))
        self._has_served = False

    async def run(self, stop: asyncio.Event) -> None:
        """Watch the engine until `stop`."""
        async with AsyncExitStack() as stack, self.upstream, asyncio.TaskGroup() as tasks:
            backend, engine = self.backend, self.config.engine
            running = [
                tasks.create_task(self.runtime.beat()),
                tasks.create_task(self._each_second()),
                tasks.create_task(self.upstream.watch(self._owed)),
                tasks.create_task(self.batches.run()),
            ]
            if engine.engine_socket is not None:
                server = await self._socket.listen(engine.engine_socket)
                await stack.enter_async_context(server)
                backend.on_limits.append(self._socket.tell)
            if engine.engine_admin_key_file is not None:
                backend.sglang = SglangKey(self.upstream, engine.engine_admin_key_file)
                backend.on_limits.append(backend.sglang.tell)
                running.append(tasks.create_task(backend.sglang.run()))
            await stop.wait()
            for task in running:
                task.cancel()
            self.proxy.close()

    # -- news

    def _ready(self, served: EngineSays) -> None:
        """Note that the engine answers, for the first time or again."""
        self.proxy.serves(served.model)
        self.backend.progress.window = served.window or math.inf
        ceiling = self.config.engine.capacity(served.capacity)
        cap = min(self.runtime.live.cap, ceiling)
        self.backend.facts = EngineFacts(
            ceiling=ceiling,
            predicted_cap=cap,
            cap=cap,
            max_model_len=max(served.window, 1),
            kernels=self.config.engine.engine,
        )
        self.backend.is_away, self.backend.queue.ceiling = False, ceiling
        if not self._has_served:
            self._has_served = True
            self.runtime.serves(self.backend.facts)
        if self._served_file is not None:
            self._served_file.touch()
        self.backend.configure(self._limits())

    def _away(self) -> None:
        """Let nobody begin until it is back; those that began learn of it by their connection."""
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
        self.backend.num_inner, facts = num, self.backend.facts
        self.backend.books.has_law = num > 0
        if facts is not None and 0 < ceiling < facts.ceiling:
            self.backend.facts = structs.replace(facts, ceiling=ceiling)
            self.backend.queue.ceiling = ceiling
        cap = self.backend.queue.limits.cap
        self.backend.queue.ahead = max(1, cap // AHEAD_SHARE) if num else 0
        self.backend.pump()

    def _inner_stepped(self, step: EngineStep, is_long: bool) -> None:
        """Count a step of vLLM, but not its tokens: they are counted as they pass here."""
        now_s = time.monotonic()
        self.backend.progress.stepped(now_s)
        if is_long:
            self.backend.books.long_ended_s = now_s
        recorder = self.runtime.recorder
        tick = recorder.ticks.open
        decodes, prefill = tick.decodes, tick.prefill_tokens
        recorder.engine.step(step)
        tick.decodes, tick.prefill_tokens = decodes, prefill

    async def _each_second(self) -> None:
        """Report the engine's progress, also while a look at it lasts, and the step model from
        outside, unless one comes from inside."""
        while True:
            await asyncio.sleep(SECOND_S)
            self.upstream.judge(self._owed())
            if not self.backend.num_inner:
                self.runtime.recorder.engine.step_model = self.backend.outside.fit(time.monotonic())
