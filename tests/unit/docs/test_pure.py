"""A module whose docstring says "Pure" imports no clock, socket, file, thread or client."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
WORLD = {"asyncio", "os", "socket", "time", "threading", "httpx", "aiohttp", "subprocess"}
PURE = [
    path
    for package in ("core", "frontend", "worker", "operator", "cli", "kernels")
    for path in sorted((ROOT / package).rglob("*.py"))
    if re.search(r"\bPure[.:;]", ast.get_docstring(ast.parse(path.read_text())) or "")
]


def test_there_are_pure_modules() -> None:
    assert len(PURE) > 50


@pytest.mark.parametrize("path", PURE, ids=lambda path: str(path.relative_to(ROOT)))
def test_pure_modules_import_nothing_of_the_world(path: Path) -> None:
    imported = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            imported |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            imported.add((node.module or "").partition(".")[0])
    assert not imported & WORLD
