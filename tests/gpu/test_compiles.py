"""Every kernel compiles for Ampere, Hopper and Blackwell, without one of them."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from gpu.compiled import ARCHS, cases

TESTS = Path(__file__).parents[1]


def test_every_kernel_compiles_for_each_architecture_and_fits(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In a process of its own, as what is interpreted cannot be compiled; its table is shown."""
    environment = os.environ | {
        "TRITON_INTERPRET": "0",
        "TRITON_CACHE_DIR": str(tmp_path),
        "PYTHONPATH": os.pathsep.join([str(TESTS), *sys.path]),
    }
    command = [sys.executable, "-m", "gpu.compiled"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280)
    with capsys.disabled():
        print(f"\n{done.stdout}")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("\n") == 1 + len(ARCHS) * len([*cases()])
