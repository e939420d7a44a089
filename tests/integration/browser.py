"""A real headless Chromium, Debian's, driven by its own DevTools protocol."""

from __future__ import annotations

import asyncio
import base64
import itertools
import os
import shutil
import tempfile
from asyncio.subprocess import DEVNULL
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import Any

import aiohttp
from PIL import Image
from sluice.processes import die_with_parent
from sluice_cluster import debian
from sluice_cluster.settings import ClusterSettings
from sluice_cluster.shell import wait_until

PACKAGES = {
    "chromium": "/usr/bin/chromium",
    "fonts-dejavu-core": "/usr/share/fonts/truetype/dejavu/DejaVuSans.ttf",
}
FLAGS = (
    *("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"),
    *("--no-first-run", "--disable-extensions", "--disable-background-networking"),
    *("--hide-scrollbars", "--remote-debugging-port=0"),
)
START_S = 60.0
COLOURS = 128
"""Of a kept picture: enough for a page, and a third of the bytes."""


class NoBrowserError(Exception):
    """There is no Chromium here, and it cannot be installed."""


class Tab:
    """One page in the browser. `errors`: what its console told of."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self.errors: list[str] = []
        self._socket, self._numbers, self._session = socket, itertools.count(1), ""
        self._answers = dict[int, asyncio.Future[dict[str, Any]]]()
        self._loaded = asyncio.Event()

    async def call(self, method: str, **params: object) -> dict[str, Any]:
        """One command of the protocol, and its result."""
        number = next(self._numbers)
        answer = self._answers[number] = asyncio.get_running_loop().create_future()
        told = {"id": number, "method": method, "params": params}
        await self._socket.send_json(told | ({"sessionId": self._session} if self._session else {}))
        return await asyncio.wait_for(answer, START_S)

    async def begin(self) -> None:
        """Open an empty page, and listen to its console."""
        target = (await self.call("Target.createTarget", url="about:blank"))["targetId"]
        attached = await self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            await self.call(f"{domain}.enable")

    async def read(self) -> None:
        """Take what the browser sends, until it ends."""
        async for message in self._socket:
            told = message.json()
            if future := self._answers.pop(told.get("id", 0), None):
                if "error" in told:
                    future.set_exception(RuntimeError(f"{told['error']}"))
                else:
                    future.set_result(told["result"])
                continue
            params = told.get("params", {})
            match told.get("method"):
                case "Page.loadEventFired":
                    self._loaded.set()
                case "Runtime.exceptionThrown":
                    self.errors.append(str(params["exceptionDetails"]))
                case "Runtime.consoleAPICalled" if params["type"] in ("error", "warning"):
                    self.errors.append(str(params["args"]))
                case "Log.entryAdded" if params["entry"]["level"] in ("error", "warning"):
                    self.errors.append(str(params["entry"]))

    async def open(self, url: str) -> None:
        """Go there, and wait until it is loaded."""
        self._loaded.clear()
        await self.call("Page.navigate", url=url)
        await asyncio.wait_for(self._loaded.wait(), START_S)

    async def size(self, width: int, height: int = 900, *, is_dark: bool = False) -> None:
        """Be a screen of that width, in a light or dark theme."""
        await self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width, height=height, deviceScaleFactor=1, mobile=False,
        )  # fmt: skip
        scheme = {"name": "prefers-color-scheme", "value": "dark" if is_dark else "light"}
        await self.call("Emulation.setEmulatedMedia", features=[scheme])

    async def value(self, expression: str) -> Any:
        """The value of an expression of JavaScript in the page."""
        told = await self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in told, told
        return told["result"].get("value")

    async def text(self) -> str:
        """What a person reads, in one line."""
        return " ".join(str(await self.value("document.body.innerText")).split())

    async def until(self, expression: str, limit_s: float = 30.0) -> None:
        """Wait until the expression is true."""
        async with asyncio.timeout(limit_s):
            while not await self.value(expression):  # noqa: ASYNC110
                await asyncio.sleep(0.1)

    async def picture(self, path: Path, *, most_high: int = 4000) -> None:
        """The whole page, or its upper part, as PNG."""
        size = (await self.call("Page.getLayoutMetrics"))["cssContentSize"]
        clip = {"x": 0, "y": 0, "width": size["width"], "height": min(size["height"], most_high)}
        told = await self.call(
            "Page.captureScreenshot", captureBeyondViewport=True, clip={**clip, "scale": 1}
        )
        image = Image.open(BytesIO(base64.b64decode(told["data"]))).convert("RGB")
        image.quantize(COLOURS).save(path, optimize=True)


@asynccontextmanager
async def opened() -> AsyncIterator[Tab]:
    """A page in a browser that ends on leaving; raises NoBrowserError."""
    if debian.missing(PACKAGES) and (os.geteuid() or not shutil.which("apt-get")):
        raise NoBrowserError("there is no chromium here, and only root of a Debian can install it")
    debian.install_missing(ClusterSettings.from_environment().paths, PACKAGES)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        process = await asyncio.create_subprocess_exec(
            *(PACKAGES["chromium"], *FLAGS, f"--user-data-dir={folder}"),
            stdout=DEVNULL, stderr=DEVNULL, preexec_fn=die_with_parent,
        )  # fmt: skip
        try:
            url = await _address(Path(folder) / "DevToolsActivePort")
            async with (
                aiohttp.ClientSession() as session,
                session.ws_connect(url, max_msg_size=0) as socket,
            ):
                tab = Tab(socket)
                reader = asyncio.create_task(tab.read())
                await tab.begin()
                yield tab
                await tab.call("Browser.close")
                await reader
        finally:
            if process.returncode is None:
                process.terminate()
            await process.wait()


async def _address(file: Path) -> str:
    """Where the browser listens, which it writes when it does."""
    is_there = partial(wait_until, "the browser", lambda: len(_words(file)) == 2, START_S)
    await asyncio.to_thread(is_there)
    port, path = _words(file)
    return f"ws://127.0.0.1:{port}{path}"


def _words(file: Path) -> list[str]:
    return file.read_text().split() if file.exists() else []
