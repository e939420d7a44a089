"""The engine process is first: what takes long to import comes after it, in both processes."""

import json
import subprocess
import sys

from sluice_worker.base.config import EngineConfig
from sluice_worker.engine.client import spawn

IMPORTED = "import sys, {}; before = list(sys.modules); import json; print(json.dumps(before))"


def imported_by(modules: str) -> set[str]:
    """The packages that a process has imported after it imported `modules`."""
    code = IMPORTED.format(modules)
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)
    return {name.partition(".")[0] for name in json.loads(told.stdout)}


def test_nothing_heavy_is_imported_before_the_engine_process_starts_nor_by_it_before_torch() -> (
    None
):
    heavy = {"torch", "fastapi", "uvicorn", "pydantic", "jinja2", "tokenizers", "httpx", "numpy"}
    first = "sluice_worker.__main__, sluice_worker.engine.client, sluice_worker.base.config"
    assert not heavy & imported_by(f"{first}, sluice_frontend.http.logs")
    assert not heavy & imported_by("sluice_worker.engine.process")


def test_sigterm_is_heard_before_anything_that_takes_long_to_import() -> None:
    assert not {"asyncio", "logging", "msgspec", "uvloop"} & imported_by("sluice_worker.__main__")


def test_the_api_process_imports_neither_torch_nor_an_http_client() -> None:
    assert not {"torch", "httpx"} & imported_by("sluice_worker.run")


async def test_an_engine_process_that_nobody_took_over_is_ended_at_once_and_once_only() -> None:
    engine = await spawn(EngineConfig(model="/nowhere"))
    await engine.end()
    assert engine.process.returncode is not None
    await engine.end()
