"""What a start remembers of the machine, and what a clean-up takes away."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from sluice_cluster import binaries
from sluice_cluster.images import IMAGES, image_key
from sluice_cluster.node import processes
from sluice_cluster.node.leftovers import mounts_under
from sluice_cluster.settings import ClusterSettings
from sluice_cluster.state import State

MOUNTINFO = r"""
22 1 254:0 / / rw - ext4 /dev/vda rw
30 22 0:30 / /run/sluice/containerd/a rw - overlay overlay rw
31 30 0:31 / /run/sluice/containerd/a/shm rw - tmpfs shm rw
32 22 0:32 / /run/sluice-of-another rw - tmpfs x rw
33 22 0:33 / /var/lib/sluice/with\040space rw - tmpfs x rw
""".strip()


def test_inner_mounts_are_taken_away_first_and_those_of_others_never() -> None:
    found = mounts_under((Path("/run/sluice"), Path("/var/lib/sluice")), MOUNTINFO)
    assert found == [
        "/var/lib/sluice/with space",
        "/run/sluice/containerd/a/shm",
        "/run/sluice/containerd/a",
    ]


def test_a_pid_that_was_given_to_another_program_is_not_ours() -> None:
    started = processes.started_at(os.getpid())
    assert started is not None
    assert processes.Process(os.getpid(), started).alive
    assert not processes.Process(os.getpid(), started + 1).alive


def test_a_spawned_program_is_remembered_and_stopped(tmp_path: Path) -> None:
    register = processes.Register(tmp_path / "processes.json")
    command = [sys.executable, "-c", "import signal; signal.pause()"]
    register.add("one", processes.spawn("one", command, tmp_path, os.environ))
    process = register.read()["one"]
    assert process.alive
    processes.stop(process)
    assert not process.alive


def test_the_state_file_is_read_back_as_written(tmp_path: Path) -> None:
    state = State("local", "/kubeconfig", "/bin", "127.0.0.1:5077", {"worker": "w:1"})
    state.write(tmp_path / "cluster.json")
    assert State.read(tmp_path / "cluster.json") == state
    assert State.read(tmp_path / "absent.json") is None


def test_only_a_go_that_knows_tool_directives_is_new_enough() -> None:
    assert binaries.is_new_enough("go version go1.26.8 linux/amd64")
    assert not binaries.is_new_enough("go version go1.19.8 linux/amd64")
    assert not binaries.is_new_enough("")


def test_both_images_have_a_dockerfile_and_keys_of_their_own() -> None:
    paths = ClusterSettings.from_environment({}).paths
    assert all((paths.repository / image.dockerfile).exists() for image in IMAGES)
    assert len({image_key(paths, image) for image in IMAGES}) == len(IMAGES)
