"""A running `sluice serve --engine`, and requests through its gate."""

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from sluice_cluster.shell import tail, wait_until


@dataclass(frozen=True)
class Served:
    """`url`: of the gate; `admin`: of its admin port."""

    process: subprocess.Popen[bytes]
    log: Path
    url: str
    admin: str

    def answers(self, **body: Any) -> httpx.Response:
        asked = {"model": "m", "prompt": "Once upon a time", "max_tokens": 4} | body
        return httpx.post(f"{self.url}/v1/completions", json=asked, timeout=120)

    def config(self) -> dict[str, Any]:
        found: dict[str, Any] = httpx.get(f"{self.admin}/v1/runtime_config").json()
        return found


@contextmanager
def serving(
    folder: Path,
    engine: str,
    model: str,
    ports: Sequence[int],
    flags: Sequence[str] = (),
    theirs: Sequence[str] = (),
    environ: Mapping[str, str] | None = None,
    limit_s: float = 120.0,
) -> Iterator[Served]:
    """`sluice serve --engine` once it is ready; `flags`: the gate's, `theirs`: the engine's."""
    log = folder / "serve.log"
    line = [
        sys.executable, "-m", "sluice", "serve", "--engine", engine, model, "--host=127.0.0.1",
        f"--port={ports[0]}", f"--admin-port={ports[1]}", "--served-model-name=m", *flags,
        "--", *theirs,
    ]  # fmt: skip
    with log.open("wb") as output:
        process = subprocess.Popen(
            line, stdout=output, stderr=output, env={**os.environ, **(environ or {})}
        )
    url, admin = (f"http://127.0.0.1:{port}" for port in ports)
    try:
        served = Served(process, log, url, admin)
        wait_until("readyz", lambda: _is_ready(served), limit_s, why_not=lambda: tail(log))
        yield served
    finally:
        process.terminate()
        try:
            process.wait(timeout=60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            raise


def _is_ready(served: Served) -> bool:
    assert served.process.poll() is None, served.log.read_text()[-3000:]
    try:
        return httpx.get(f"{served.url}/readyz").status_code == 200
    except httpx.TransportError:
        return False
