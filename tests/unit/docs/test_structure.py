"""docs/structure.md names each room once, and no room that is not there; nothing is a heap."""

import re
from pathlib import Path

import pytest
import rooms

ROOT = Path(__file__).parents[3]


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
    assert len(listed) == 9
    for package, names in listed.items():
        folders = {path.parent.name for path in (ROOT / package).glob("*/*.py")}
        assert sorted(names) == sorted({".", *folders}), package


def test_no_folder_of_a_package_and_no_class_is_a_heap() -> None:
    assert rooms.largest_folder(ROOT)[0] <= 15
    assert rooms.largest_class(ROOT)[0] <= 20


def test_rooms_import_each_other_in_no_circle() -> None:
    assert rooms.floors(rooms.arrows(ROOT)) > 1
    with pytest.raises(ValueError, match="circle"):
        rooms.floors({("a", "b"), ("b", "c"), ("c", "a")})


def test_a_package_over_its_budget_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(rooms, "BUDGETS", {"core/small": 2})
    (tmp_path / "core/small/room").mkdir(parents=True)
    (tmp_path / "core/small/room/module.py").write_text("A = 1\nB = 2\nC = 3\n")
    assert rooms.main([str(tmp_path)]) == 1
    assert "core/small is over its budget" in capsys.readouterr().err
    monkeypatch.setattr(rooms, "BUDGETS", {"core/small": 3})
    assert rooms.main([str(tmp_path)]) == 0
    assert "3 of      3 lines: room 3" in capsys.readouterr().out
