"""docs/structure.md names each room once, and no room that is not there; nothing is a heap."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[3]
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


def _listed() -> dict[str, list[str]]:
    rooms: dict[str, list[str]] = {}
    package = ""
    for line in (ROOT / "docs/structure.md").read_text().splitlines():
        if line.startswith("### "):
            package = line.split()[1].rstrip(":")
        elif package and (room := re.match(r"\| `([\w.]+)` \|", line)):
            rooms.setdefault(package, []).append(room[1])
    return rooms


def test_every_room_has_its_one_line() -> None:
    listed = _listed()
    assert len(listed) == 6
    for package, rooms in listed.items():
        folders = {path.parent.name for path in (ROOT / package).glob("*/*.py")}
        assert sorted(rooms) == sorted({".", *folders}), package


def test_no_folder_of_a_package_is_a_heap() -> None:
    for package in _listed():
        for folder in {path.parent for path in (ROOT / package).rglob("*.py")}:
            limit = 20 if folder.name == "tuner" else 15
            modules = [path for path in folder.glob("*.py") if path.name != "__init__.py"]
            assert len(modules) <= limit, folder


def test_no_class_is_a_heap() -> None:
    packages = (*_listed(), "cluster")
    modules = [path for package in packages for path in (ROOT / package).rglob("*.py")]
    heaps = {
        f"{path.relative_to(ROOT)}: {node.name}": len(methods)
        for path in modules
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ClassDef)
        and len(methods := [each for each in node.body if isinstance(each, FUNCTIONS)]) > 20
    }
    assert not heaps
