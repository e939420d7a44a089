"""A real worker whose files cannot be read: one sentence, in its output and for Kubernetes."""

import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from integration.worker_process import command

EXAMPLE = Path(__file__).parents[2] / "examples/model"
SIZE = (EXAMPLE / "model.safetensors").stat().st_size
RIGHTS = "-dac_override,-dac_read_search"
AS_OTHERS = ["setpriv", f"--bounding-set={RIGHTS}", f"--inh-caps={RIGHTS}"]
"""Root without its right to read what it may not."""


def deny(path: Path) -> None:
    path.chmod(0)


def halve(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


@pytest.mark.parametrize(
    ("name", "damage", "sentence"),
    [
        ("config.json", deny, f"config.json: permission denied for user {os.geteuid()}."),
        ("tokenizer.json", deny, f"tokenizer.json: permission denied for user {os.geteuid()}."),
        ("model.safetensors", deny, f"permission denied for user {os.geteuid()}."),
        ("model.safetensors", halve, f"its header asks for {SIZE:,}."),
    ],
)
def test_a_file_that_cannot_be_read_ends_a_start_with_one_sentence(
    tmp_path: Path, name: str, damage: Callable[[Path], None], sentence: str
) -> None:
    model, word = tmp_path / "model", tmp_path / "termination-log"
    shutil.copytree(EXAMPLE, model)
    damage(model / name)
    done = subprocess.run(
        [*(AS_OTHERS if os.geteuid() == 0 else []), *command(model, load_format="auto")],
        env={**os.environ, "SLUICE_TERMINATION_LOG": str(word)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 2
    told = [line for line in done.stderr.splitlines() if not line.startswith("{")]
    assert told == [f"sluice-worker: {word.read_text()}"]
    assert told[0].startswith(f"sluice-worker: {name}: ")
    assert told[0].endswith(sentence)
