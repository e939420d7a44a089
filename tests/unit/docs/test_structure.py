"""docs/structure.md names each module once, and no module that is not there."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[3]
PACKAGES = (
    "operator/sluice_operator", "operator/sluice_operator/tuner", "worker/sluice_worker",
    "kernels/sluice_kernels", "cli/sluice", "cluster/sluice_cluster",
)  # fmt: skip


def _listed() -> list[tuple[str, str]]:
    found, package = [], ""
    for line in (ROOT / "docs/structure.md").read_text().splitlines():
        if line.startswith("### "):
            package = line.split()[1]
        elif module := re.match(r"\| `([\w/]+)` \|", line):
            found.append((package, module[1]))
    return found


def test_every_module_has_its_one_line() -> None:
    there = {
        (package, str(path.relative_to(ROOT / package).with_suffix("")))
        for package in PACKAGES
        for path in (ROOT / package).rglob("*.py")
        if path.name != "__init__.py"
        and not (package == "operator/sluice_operator" and "tuner" in path.parts)
    }
    listed = _listed()
    assert len(listed) == len(set(listed))
    assert set(listed) == there
