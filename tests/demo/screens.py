"""`sluice ui` beside the demo: four moments of the run, seen in a real browser and kept as PNG."""

import asyncio
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from pathlib import Path

from demo.timeline import Check, Row
from integration import browser
from sluice.kube import NAMESPACE

LOOK_S = 1.0
WIDE, NARROW, HIGH = 1280, 400, 420
TTFT_MS = 500.0
"""The demo's target."""
MOST_HIGH = 1700
"""Pixels of a picture: all but the tables at the end of the page."""
IS_LATE = "!!document.querySelector('#head .chip.bad')"


@dataclass(frozen=True)
class Moment:
    """`holds`: of a look at the object; `shown`: of the page, which follows it in seconds."""

    name: str
    holds: Callable[[Row], bool]
    shown: str
    path: str
    is_dark: bool = False
    width: int = WIDE


def moments(name: str) -> tuple[Moment, ...]:
    """Those of the service of that name, in their order."""
    one = f"/services/{NAMESPACE}/{name}"
    return (
        Moment("raised", lambda row: row.phase == "low", f"!({IS_LATE})", one),
        Moment("breach", lambda r: (r.phase, r.ready, r.verdict) == ("high", 1, "Breach"),
               IS_LATE, one),
        Moment("second-pod", lambda r: r.ready == 2 and (r.ttft_p99_ms or inf) < TTFT_MS,
               f"!({IS_LATE})", one, is_dark=True),
        Moment("fleet", lambda r: r.phase == "ebb", "!!document.querySelector('#fleet td')", "/",
               width=NARROW),
    )  # fmt: skip


class Watcher(threading.Thread):
    """Watches the page while the demo adds to `rows`. `kept`: the names of its pictures."""

    def __init__(
        self, name: str, rows: Sequence[Row], kubeconfig: Path, env: Mapping[str, str], out: Path
    ) -> None:
        super().__init__(daemon=True)
        self.kept: list[str] = []
        self.errors: list[str] = []
        self._rows, self._out, self._moments = rows, out, moments(name)
        self._over = threading.Event()
        words = [sys.executable, "-m", "sluice", "ui", f"--kubeconfig={kubeconfig}"]
        self._ui = subprocess.Popen(words, env=env, stdout=subprocess.PIPE, text=True)
        self.start()

    def run(self) -> None:
        """Until `end`."""
        try:
            asyncio.run(self._watch())
        except (OSError, TimeoutError, RuntimeError, browser.NoBrowserError) as e:
            self.errors.append(f"{type(e).__name__}: {e}")

    def end(self) -> Check:
        """Stop, and tell whether all moments were seen without an error in the console."""
        self._over.set()
        self.join()
        self._ui.terminate()
        self._ui.wait()
        detail = f"pictures: {', '.join(self.kept)}; errors: {'; '.join(self.errors) or 'none'}"
        is_whole = len(self.kept) == len(self._moments) and not self.errors
        return Check("sluice ui showed it in a browser", is_whole, detail)

    async def _watch(self) -> None:
        assert self._ui.stdout
        url = (await asyncio.to_thread(self._ui.stdout.readline)).split()[0]
        site = url.partition("/?")[0]
        self._out.mkdir(parents=True, exist_ok=True)
        async with browser.opened() as tab:
            await tab.open(url)
            for moment in self._moments:
                await tab.size(moment.width, HIGH, is_dark=moment.is_dark)
                await tab.open(site + moment.path)
                while not (self._rows and moment.holds(self._rows[-1])):
                    if self._over.is_set():
                        return
                    await asyncio.sleep(LOOK_S)
                await tab.until(moment.shown)
                await tab.picture(self._out / f"{moment.name}.png", most_high=MOST_HIGH)
                self.kept.append(moment.name)
                self.errors = tab.errors
