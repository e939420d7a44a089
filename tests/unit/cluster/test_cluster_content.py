"""Keys made from content change with what they stand for, and with nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest
from sluice_cluster.content import key_of, key_of_files


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    (tmp_path / "src" / "__pycache__").mkdir(parents=True)
    (tmp_path / "src" / "a.py").write_text("a = 1\n")
    (tmp_path / "src" / "__pycache__" / "a.pyc").write_text("old")
    (tmp_path / "other.txt").write_text("x")
    return tmp_path


def test_moving_a_boundary_between_parts_changes_the_key() -> None:
    assert key_of("ab", "c") != key_of("a", "bc")


def test_a_changed_byte_changes_the_key(tree: Path) -> None:
    before = key_of_files(tree, ["src"])
    (tree / "src" / "a.py").write_text("a = 2\n")
    assert key_of_files(tree, ["src"]) != before


def test_a_renamed_file_changes_the_key(tree: Path) -> None:
    before = key_of_files(tree, ["src"])
    (tree / "src" / "a.py").rename(tree / "src" / "b.py")
    assert key_of_files(tree, ["src"]) != before


def test_caches_and_files_outside_the_inputs_do_not_change_the_key(tree: Path) -> None:
    before = key_of_files(tree, ["src/*.py", "src"])
    (tree / "src" / "__pycache__" / "a.pyc").write_text("new")
    (tree / "other.txt").write_text("y")
    assert key_of_files(tree, ["src"]) == before


def test_an_added_model_changes_the_key_of_a_glob(tree: Path) -> None:
    before = key_of_files(tree, ["src/*.json"])
    (tree / "src" / "config.json").write_text("{}")
    assert key_of_files(tree, ["src/*.json"]) != before
