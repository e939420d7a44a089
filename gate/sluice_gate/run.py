"""Binds the ports, and leaves in order."""

import asyncio

from sluice_frontend.http.clients import room_for
from sluice_frontend.http.guards import Inflight
from sluice_frontend.process.app import admin_app
from sluice_frontend.process.server import (
    drain,
    listening,
    max_connections,
    on_signals,
    quieten_collections,
)
from sluice_frontend.serving.admission import MAX_ON_THEIR_WAY

from .app import api_app, metrics_of
from .config import GateConfig
from .gate import Gate


async def serve(config: GateConfig) -> None:
    """Serve until a signal; raises ConfigError if a port cannot be used."""
    capacity = config.engine.capacity(None)
    most, to_engine = max_connections(config.server, capacity), capacity + MAX_ON_THEIR_WAY
    async with listening(config.server, config.model_name, most, room_for(to_engine)) as ports:
        gate, inflight, stop, end = Gate(config), Inflight(), asyncio.Event(), asyncio.Event()
        quieten_collections()
        admin = admin_app(gate.runtime, gate.admission.check_room, metrics_of(gate))
        on_cut = gate.runtime.stats.connection_cut
        ports.answer(api_app(gate, config.server, inflight), admin, on_cut)
        on_signals(stop.set)
        running = asyncio.create_task(gate.run(end))
        stopped = asyncio.create_task(stop.wait())
        try:
            await asyncio.wait({running, stopped}, return_when=asyncio.FIRST_COMPLETED)
            if stop.is_set():
                await drain(gate.runtime, ports.api, inflight)
        finally:
            stopped.cancel()
            end.set()
            await running
