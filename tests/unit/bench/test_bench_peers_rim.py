"""What the bench does with processes."""

import subprocess
import sys
from pathlib import Path

import pytest
from bench.peers.install import CannotInstall, Site
from bench.peers.launch import complaint, inherited
from bench.peers.processes import cpu_time, stop

BURN = "import time\nwhile time.process_time() < 0.2: pass"
PARENT = f"""
import subprocess, sys
subprocess.run([sys.executable, "-c", {BURN!r}], check=True)
print("ready", flush=True)
subprocess.run(["sleep", str(60 + 0.25)])
"""


def test_cpu_time_of_children_that_ended_is_counted_and_the_tree_is_stopped() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", PARENT], stdout=subprocess.PIPE, start_new_session=True
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == b"ready\n"
            used = cpu_time(process.pid, "60.25")
            assert used.total_s > 0.15  # clock ticks are rounded down, for each process
            assert used.engine_s < 0.1  # only `sleep` has that mark
        finally:
            stop(process)
        assert process.stdout.read() == b""  # `sleep` held the other end


def test_settings_of_the_caller_tune_no_peer(tmp_path: Path) -> None:
    environ = {"OMP_NUM_THREADS": "1", "SLUICE_KERNELS": "torch", "PATH": "p", "PYTHONPATH": "q"}
    assert inherited(environ, None) == {"PATH": "p", "PYTHONPATH": "q"}
    assert inherited(environ, Site("peer", tmp_path)) == {"PATH": "p"}


def test_why_a_peer_cannot_be_installed_is_its_last_line(tmp_path: Path) -> None:
    site = Site("peer", tmp_path)
    site.root.mkdir()
    with pytest.raises(CannotInstall, match=r"^sh failed: no such wheel$"):
        site.run("sh", "-c", "echo begun; echo no such wheel >&2; exit 1")
    with pytest.raises(CannotInstall, match="no-such-program"):
        site.run("no-such-program")


def test_why_a_peer_does_not_start_is_told_without_directories(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("loading\nValueError: /somewhere/models/88M has no head\nbye\n")
    assert complaint(log) == "ValueError: 88M has no head"
    log.write_text("")
    assert complaint(log) == "nothing was said"
