"""Limits of cgroups v1 and v2, read from directories laid out as the kernel does."""

import mmap
import os
import subprocess
import sys
from pathlib import Path

import pytest
from sluice_worker.base.resources import Resources, engine_environment

CPUS = len(os.sched_getaffinity(0))


def machine(tmp_path: Path, cgroup_line: str, files: dict[str, str]) -> Resources:
    proc = tmp_path / "proc"
    (proc / "self").mkdir(parents=True)
    (proc / "self" / "cgroup").write_text(cgroup_line)
    (proc / "meminfo").write_text("MemTotal:       16777216 kB\nMemFree: 1 kB\n")
    for name, text in files.items():
        path = tmp_path / "cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return Resources(tmp_path / "cgroup", proc)


@pytest.mark.parametrize(
    ("line", "files", "quota", "memory"),
    [
        ("0::/\n", {"cpu.max": "50000 100000\n", "memory.max": "1073741824\n"}, 0.5, 1 << 30),
        ("0::/\n", {"cpu.max": "max 100000\n", "memory.max": "max\n"}, None, 16 << 30),
        (
            "0::/pod/app\n",
            {"pod/cpu.max": "150000 100000", "pod/app/cpu.max": "max 100000"},
            1.5,
            16 << 30,
        ),
        (
            "4:memory:/pod\n2:cpu,cpuacct:/pod\n",
            {
                "memory/memory.limit_in_bytes": "536870912\n",
                "cpu,cpuacct/pod/cpu.cfs_quota_us": "50000\n",
                "cpu,cpuacct/pod/cpu.cfs_period_us": "100000\n",
            },
            0.5,
            512 << 20,
        ),
        (
            "4:memory:/\n1:cpu:/\n",
            {
                "memory/memory.limit_in_bytes": "9223372036854771712\n",
                "cpu/cpu.cfs_quota_us": "-1\n",
                "cpu/cpu.cfs_period_us": "100000\n",
            },
            None,
            16 << 30,
        ),
        ("", {}, None, 16 << 30),
    ],
    ids=["v2", "v2-unlimited", "v2-nested", "v1-in-container", "v1-unlimited", "none"],
)
def test_limits_are_found(
    tmp_path: Path, line: str, files: dict[str, str], quota: float | None, memory: int
) -> None:
    resources = machine(tmp_path, line, files)
    assert resources.cpu_quota() == quota
    assert resources.memory_bytes() == memory
    assert resources.num_threads() == (CPUS if quota is None else min(CPUS, int(quota + 0.999)))


@pytest.mark.parametrize(
    ("membership", "stat", "content"),
    [
        ("0::/\n", "cpu.stat", "usage_usec 9\nnr_throttled 2\nthrottled_usec 2500000\n"),
        ("0::/pod/c\n", "pod/c/cpu.stat", "throttled_usec 2500000\n"),
        ("0::/pod/c\n", "cpu.stat", "throttled_usec 2500000\n"),
        ("4:cpu,cpuacct:/pod/c\n", "cpu,cpuacct/pod/c/cpu.stat", "throttled_time 2500000000\n"),
        ("4:cpu,cpuacct:/away\n", "cpu/cpu.stat", "nr_periods 1\nthrottled_time 2500000000\n"),
        ("no line of a cgroup\n", "cpu,cpuacct/cpu.stat", "throttled_time 2500000000\n"),
    ],
)
def test_throttling_is_read_from_both_cgroup_versions(
    tmp_path: Path, membership: str, stat: str, content: str
) -> None:
    assert machine(tmp_path, membership, {stat: content}).throttled_s() == 2.5


def test_a_file_of_another_layout_is_passed_by(tmp_path: Path) -> None:
    files = {"pod/cpu.stat": "one line of five words\n", "cpu.stat": "throttled_usec 2500000\n"}
    assert machine(tmp_path, "0::/pod\n", files).throttled_s() == 2.5


@pytest.mark.parametrize(
    ("membership", "file", "content"),
    [
        ("0::/\n", "memory.events", "low 0\noom 1\noom_kill 3\n"),
        ("0::/pod/c\n", "pod/c/memory.events", "oom_kill 3\n"),
        ("0::/pod/c\n", "memory.events", "oom_kill 3\n"),
        ("5:memory:/pod/c\n", "memory/pod/c/memory.oom_control", "under_oom 0\noom_kill 3\n"),
        ("5:memory:/away\n", "memory/memory.oom_control", "oom_kill_disable 0\noom_kill 3\n"),
    ],
)
def test_kills_for_memory_are_read_from_both_cgroup_versions(
    tmp_path: Path, membership: str, file: str, content: str
) -> None:
    assert machine(tmp_path, membership, {file: content}).oom_kills() == 3
    assert Resources(tmp_path / "none", tmp_path / "none").oom_kills() == 0


def test_without_a_quota_nothing_is_throttled(tmp_path: Path) -> None:
    assert machine(tmp_path, "0::/\n", {"cpu.stat": "usage_usec 9\n"}).throttled_s() == 0.0
    assert Resources(tmp_path, tmp_path / "none").throttled_s() == 0.0


def test_own_memory_is_read_and_its_peak_follows() -> None:
    resources = Resources()
    resident = resources.resident_bytes(os.getpid())
    assert resident > 1 << 20
    assert resources.peak_bytes() >= resident // 2
    if resources.reset_peak():
        with mmap.mmap(-1, 64 << 20) as block:  # new pages, not such as were freed before
            block[:: mmap.PAGESIZE] = bytes(len(block) // mmap.PAGESIZE)
        assert resources.peak_bytes() >= resident + (32 << 20)
    assert resources.resident_bytes(1 << 30) == 0


@pytest.mark.parametrize(
    ("told", "expected"),
    [
        (None, "glibc.malloc.hugetlb=1"),
        ("glibc.malloc.check=0", "glibc.malloc.check=0:glibc.malloc.hugetlb=1"),
        ("glibc.malloc.hugetlb=0", "glibc.malloc.hugetlb=0"),
    ],
)
def test_the_engine_gets_large_pages_unless_its_environment_says_otherwise(
    told: str | None, expected: str
) -> None:
    environ = {"PATH": "/bin"} | ({} if told is None else {"GLIBC_TUNABLES": told})
    caches = {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "256", "LRU_CACHE_CAPACITY": "256"}
    assert engine_environment(environ) == {"PATH": "/bin", "GLIBC_TUNABLES": expected, **caches}


GROWN = """
import torch
from sluice_kernels.linear import packed_projection

def own_mib() -> int:
    lines = open("/proc/self/status").read().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith("RssAnon")) // 1024

torch.set_num_threads(1)
layers = [packed_projection(torch.ones(out, 256), None) for out in (256, 512, 1408, 2048)]
with torch.inference_mode():
    for rows in range(1, 400):
        for layer in layers:
            layer(torch.zeros(rows, 256))
        if rows == 40:
            before = own_mib()
print(own_mib() - before)
"""


def test_linear_layers_do_not_keep_a_product_for_each_number_of_rows() -> None:
    """As prompts come in all lengths, 1,024 of them took 1 GB that nobody had planned."""
    grown = {
        name: int(subprocess.check_output([sys.executable, "-c", GROWN], env=environ))
        for name, environ in (("ours", engine_environment(os.environ)), ("torch's", os.environ))
    }
    assert 2 * grown["ours"] < grown["torch's"], grown
