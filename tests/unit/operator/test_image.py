"""The images hold what their programs need."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]


def test_the_operator_starts_from_the_files_that_its_image_copies(tmp_path: Path) -> None:
    text = (ROOT / "operator" / "Dockerfile").read_text()
    for source, package in re.findall(r"^COPY (\S+) /opt/sluice/src/(\w+)$", text, re.MULTILINE):
        shutil.copytree(ROOT / source, tmp_path / package)
    for source in re.findall(r"^COPY (\S+) /opt/sluice/src$", text, re.MULTILINE):
        shutil.copytree(ROOT / source, tmp_path, dirs_exist_ok=True)
    environ = {**os.environ, "PYTHONPATH": str(tmp_path)}
    command = [
        sys.executable,
        "-c",
        "import sluice_operator.__main__, sluice_operator.loop.handlers, sluice.load, sluice.plan, "
        "sluice_frontend.config, sluice_vllm",
    ]
    done = subprocess.run(command, env=environ, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr.splitlines()[-1]


def test_the_workers_image_finds_the_driver_where_gke_mounts_it() -> None:
    lines = (ROOT / "worker" / "Dockerfile").read_text().splitlines()
    assert "ENV LD_LIBRARY_PATH=/usr/local/nvidia/lib64" in lines
