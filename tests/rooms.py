"""Lines by room against their budgets, and the house in figures; `make lint` calls it.

    python -m rooms [--figures] [ROOT]

It fails where a package has more lines than its budget, or a function more than 40. Who needs more
deletes something, or changes the budget in a commit of its own that says why. A room is a folder of
a package. `--figures` adds what docs/structure.md shows.
"""

import argparse
import ast
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

BUDGETS = {
    "core/sluice_core": 7_100,
    "frontend/sluice_frontend": 10_300,
    "gate/sluice_gate": 3_200,
    "gate/sluice_vllm": 800,
    "worker/sluice_worker": 12_930,
    "operator/sluice_operator": 14_150,
    "kernels/sluice_kernels": 4_760,
    "cli/sluice": 8_200,
    "cluster/sluice_cluster": 2_200,
}
"""Most lines of Python and C++ a package, blank lines and docstrings too."""
LONG_FUNCTION = 40


def sources(root: Path, package: str) -> list[Path]:
    """The package's Python and C++ files."""
    return sorted(
        path
        for path in (root / package).rglob("*")
        if path.suffix in (".py", ".cpp", ".h") and "build" not in path.parts
    )


def lines_by_room(root: Path, package: str) -> dict[str, int]:
    """Lines of each room; `.` is the package's own folder."""
    lines: dict[str, int] = defaultdict(int)
    for path in sources(root, package):
        inside = path.relative_to(root / package).parent.parts
        lines[inside[0] if inside else "."] += len(path.read_bytes().splitlines())
    return dict(lines)


def modules(root: Path) -> dict[str, Path]:
    """The packages' modules by their dotted names."""
    found = {}
    for package in BUDGETS:
        for path in sources(root, package):
            if path.suffix == ".py":
                name = ".".join(path.relative_to(root).with_suffix("").parts[1:])
                found[name.removesuffix(".__init__")] = path
    return found


def _imported(name: str, path: Path) -> Iterator[str]:
    """Dotted names that a module imports, each with what is taken from it."""
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) - node.level + 1]
            module = ".".join([*(above if node.level else ()), *filter(None, [node.module])])
            yield from (f"{module}.{alias.name}" for alias in node.names)


def arrows(root: Path) -> set[tuple[str, str]]:
    """Which room imports which, of all packages."""
    known, found = modules(root), set()

    def room_of(name: str) -> str | None:
        while name and name not in known:
            name = name.rpartition(".")[0]
        if not name:
            return None
        return ".".join(name.split(".")[:2])  # a module of the package's own folder is its own room

    for name, path in known.items():
        for other in _imported(name, path):
            pair = room_of(name), room_of(other)
            if pair[0] and pair[1] and pair[0] != pair[1]:
                found.add((pair[0], pair[1]))
    return found


def floors(pairs: set[tuple[str, str]]) -> int:
    """Rooms on the longest way down; raises ValueError on a circle of imports."""
    below: dict[str, set[str]] = defaultdict(set)
    for upper, lower in pairs:
        below[upper].add(lower)
    heights: dict[str, int] = {}
    try:
        for room in TopologicalSorter(below).static_order():  # lower rooms first
            heights[room] = 1 + max((heights[other] for other in below[room]), default=0)
    except CycleError as e:
        raise ValueError(f"a circle of imports: {' -> '.join(e.args[1])}") from e
    return max(heights.values(), default=0)


def long_functions(root: Path) -> list[str]:
    """Functions of more than LONG_FUNCTION lines, as module:function."""
    return [
        f"{name}:{node.name}"
        for name, path in modules(root).items()
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and node.end_lineno is not None
        and node.end_lineno - node.lineno >= LONG_FUNCTION
    ]


def largest_class(root: Path) -> tuple[int, str]:
    """Methods of the class that has most, and its name."""
    return max(
        (
            sum(isinstance(item, ast.FunctionDef | ast.AsyncFunctionDef) for item in node.body),
            node.name,
        )
        for path in modules(root).values()
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ClassDef)
    )


def largest_folder(root: Path) -> tuple[int, str]:
    """Modules in the fullest folder, and its name."""
    count: dict[str, int] = defaultdict(int)
    for path in modules(root).values():
        count[str(path.parent.relative_to(root))] += path.name != "__init__.py"
    return max((number, name) for name, number in count.items())


def words(root: Path) -> int:
    """Words of README and docs/."""
    pages = [root / "README.md", *(root / "docs").rglob("*.md")]
    return sum(len(page.read_text().split()) for page in pages)


def _figures(root: Path) -> None:
    pairs = arrows(root)
    for package in BUDGETS:
        name = Path(package).name
        inside = {pair for pair in pairs if all(room.split(".")[0] == name for room in pair)}
        rooms = len({room for pair in inside for room in pair})
        print(f"{package}: {rooms} rooms, {len(inside)} arrows, {floors(inside)} floors")
    print(f"all rooms: {len(pairs)} arrows, {floors(pairs)} floors")
    print("modules in the fullest folder: {} ({})".format(*largest_folder(root)))
    print("methods of the largest class: {} ({})".format(*largest_class(root)))
    print(f"words of README and docs: {words(root):,}")


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table; 1 where a package or a function is over its bound."""
    parser = argparse.ArgumentParser(prog="python -m rooms")
    parser.add_argument("--figures", action="store_true", help="add arrows, functions, words")
    parser.add_argument("root", nargs="?", type=Path, default=Path(__file__).parents[1])
    given = parser.parse_args(argv)
    total, over = 0, []
    for package, budget in BUDGETS.items():
        rooms = lines_by_room(given.root, package)
        lines = sum(rooms.values())
        total += lines
        inside = ", ".join(f"{room} {number:,}" for room, number in sorted(rooms.items()))
        print(f"{package:26} {lines:6,} of {budget:6,} lines: {inside}")
        if lines > budget:
            over.append(package)
    print(f"{'together':26} {total:6,}")
    if given.figures:
        _figures(given.root)
    for package in over:
        print(f"{package} is over its budget: delete something.", file=sys.stderr)
    for name in (long := long_functions(given.root)):
        print(f"{name} has more than {LONG_FUNCTION} lines.", file=sys.stderr)
    return 1 if over or long else 0


if __name__ == "__main__":
    sys.exit(main())
