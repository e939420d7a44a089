"""Starts the engine behind both ports, and leaves in order."""

import asyncio

from sluice_core.errors import EngineDied
from sluice_core.model.sizing import MAX_CEILING
from sluice_frontend.http.guards import Inflight
from sluice_frontend.http.offload import keep_little
from sluice_frontend.process.server import (
    ANSWER_S,
    Ports,
    drain,
    listening,
    max_connections,
    on_signals,
    quieten_collections,
)

from .api.app import admin_app, api_app
from .api.service import Service
from .base.config import WorkerConfig
from .engine.client import EngineProcess, spawn
from .tasks import all_served


async def serve(config: WorkerConfig, engine: EngineProcess | None) -> None:
    """Serve until a signal. `engine`: None if it must wait for its model.

    Raises StartupError if it cannot start, and EngineDied if the engine ended while serving. It is
    raised as well if the engine hangs at the signal and when the open requests' time is over.
    """
    most = max_connections(config.server, config.engine.max_num_seqs or MAX_CEILING)
    async with listening(config.server, config.model_name, most) as ports:
        there = await _fetched(config, ports)
        if there is not None:
            await _serve(there, engine, ports)


async def _fetched(config: WorkerConfig, ports: Ports) -> WorkerConfig | None:
    """`config` with its checkpoint in a directory; the ports say how far a download is.

    None if told to leave; raises StartupError.
    """
    if config.hub is None:
        return config
    from .api.arrival import Arrival  # and with it an HTTP client, which a directory does not need

    arrival = Arrival(config, config.hub)
    on_signals(arrival.stop)
    ports.answer(arrival.app(), arrival.app(), lambda reason: None)
    directory = await arrival.fetch()
    return config.at(directory) if directory else None


async def _serve(config: WorkerConfig, engine: EngineProcess | None, ports: Ports) -> None:
    keep_little()
    service, inflight = Service(config), Inflight()
    quieten_collections()
    on_cut = service.runtime.stats.connection_cut
    ports.answer(api_app(service, all_served(service), inflight), admin_app(service), on_cut)
    running = [
        asyncio.create_task(each) for each in (service.runtime.beat(), service.batches.run())
    ]
    try:
        await _live(service, engine, ports, inflight)
    finally:
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        service.close()
        await service.client.stop()


async def _live(
    service: Service, engine: EngineProcess | None, ports: Ports, inflight: Inflight
) -> None:
    stop = asyncio.Event()
    on_signals(stop.set)
    await service.client.attach(engine or await spawn(service.config.engine), service.runtime)
    ends = [asyncio.create_task(stop.wait()), asyncio.create_task(service.client.closed.wait())]
    try:
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for end in ends:
            end.cancel()
    if stop.is_set():
        await drain(service.runtime, ports.api, inflight)
    else:
        service.client.raise_if_never_served()
        await inflight.until_empty(ANSWER_S)
    verdict = service.runtime.liveness()
    if not verdict.ok:
        raise EngineDied(verdict.reason)
