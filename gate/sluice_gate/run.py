"""Binds the ports, and leaves in order."""

import asyncio

from sluice_frontend.http.guards import Inflight
from sluice_frontend.process.app import admin_app
from sluice_frontend.process.server import (
    drain,
    listening,
    max_connections,
    on_signals,
    quieten_collections,
)

from .app import add_probes, api_app
from .config import GateConfig
from .gate import Gate


async def serve(config: GateConfig) -> None:
    """Serve until a signal; raises ConfigError if a port cannot be used."""
    most = max_connections(config.server, config.engine.max_num_seqs)
    async with listening(config.server, config.model_name, most) as ports:
        gate, inflight, stop, end = Gate(config), Inflight(), asyncio.Event(), asyncio.Event()
        quieten_collections()
        ports.swappable_api.app = api_app(gate, config.server, inflight)
        ports.swappable_admin.app = admin_app(
            gate.runtime, gate.admission.check_room, lambda app: add_probes(app, gate)
        )
        on_cut = gate.runtime.stats.connection_cut
        ports.swappable_api.on_cut = ports.swappable_admin.on_cut = on_cut
        on_signals(stop.set)
        running = asyncio.create_task(gate.run(end))
        stopped = asyncio.create_task(stop.wait())
        await asyncio.wait({running, stopped}, return_when=asyncio.FIRST_COMPLETED)
        if stop.is_set():
            await drain(gate.runtime, ports.api, inflight)
        end.set()
        await running
