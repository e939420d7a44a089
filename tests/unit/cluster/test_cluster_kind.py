"""kind's node image: which program an image runs, and which libraries come with nft."""

from __future__ import annotations

from pathlib import Path

import pytest
from sluice_cluster.kind_node import libraries, program_of


@pytest.mark.parametrize(
    ("image", "program"),
    [
        ("registry.k8s.io/kube-proxy:v1.35.4", "kube-proxy"),
        ("registry.k8s.io/coredns/coredns:v1.13.1", "coredns"),
        ("localhost:5000/etcd:3.6.6-0", "etcd"),
    ],
)
def test_an_image_runs_the_program_of_its_name(image: str, program: str) -> None:
    assert program_of(image) == program


def test_libraries_are_the_files_that_ldd_found_and_the_loader() -> None:
    ldd = """
        linux-vdso.so.1 (0x00007ffd3a5f2000)
        libnftables.so.1 => /lib/x86_64-linux-gnu/libnftables.so.1 (0x00007f1b2c000000)
        /lib64/ld-linux-x86-64.so.2 (0x00007f1b2c5d0000)
    """
    found = [Path("/lib/x86_64-linux-gnu/libnftables.so.1"), Path("/lib64/ld-linux-x86-64.so.2")]
    assert libraries(ldd) == found
