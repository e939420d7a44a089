"""*rim*: `sluice ui`: its flags, its address and its end."""

import argparse
import asyncio
import secrets
import signal
import socket
import sys
from contextlib import suppress
from pathlib import Path

from aiohttp import web

from sluice.kube import KubeError
from sluice.measure.endpoint import EndpointError, base_url
from sluice.numbers import at_least

from . import cluster, server
from .site import HOST, Site

LEAVES_S = 1.0
"""Seconds for answers under way at the end."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("-n", "--namespace", help="default: all that you may list")
    parser.add_argument("--kubeconfig", type=Path, help="default: kubectl's own")
    parser.add_argument(
        "--url", type=base_url, help="show this one server, without a cluster: of its API"
    )
    parser.add_argument("--admin-url", type=base_url, help="its admin port; default: 8001 there")
    parser.add_argument("--admin-token-file", type=Path, help="bearer of the admin port")
    parser.add_argument("--port", type=at_least(0), default=0, help="of loopback; 0: a free one")


def main(args: argparse.Namespace) -> int:
    """Entry of `sluice ui`: 0 after Ctrl-C or SIGTERM, 2 if there is nothing to look at."""
    try:
        asyncio.run(_run(args))
    except (KubeError, EndpointError) as e:
        print(f"sluice ui: {e}", file=sys.stderr)
        return 2
    return 0


async def _run(args: argparse.Namespace) -> None:
    if args.kubeconfig and not args.kubeconfig.is_file():
        raise KubeError(f"--kubeconfig {args.kubeconfig} is not a file")
    opened = (
        server.opened(args.url, args.admin_url, args.admin_token_file)
        if args.url
        else cluster.opened(args.kubeconfig, args.namespace)
    )
    async with opened as source:
        loop = asyncio.get_running_loop()
        looks = asyncio.create_task(source.run())
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, looks.cancel)
        await _serve(source, args.port, looks)


async def _serve(
    source: "cluster.Cluster | server.Server", port: int, looks: "asyncio.Task[None]"
) -> None:
    """Give pages until `looks` ends."""
    with socket.create_server((HOST, port)) as listener:
        token, port = secrets.token_urlsafe(32), listener.getsockname()[1]
        runner = web.AppRunner(
            Site(source, token, port).app(), access_log=None, shutdown_timeout=LEAVES_S
        )
        await runner.setup()
        try:
            await web.SockSite(runner, listener).start()
            print(f"http://{HOST}:{port}/?token={token}   (Ctrl-C ends it)", flush=True)
            with suppress(asyncio.CancelledError):
                await looks
        finally:
            await runner.cleanup()
