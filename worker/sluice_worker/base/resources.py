"""CPU and memory that this process may use, and its time throttled by the quota. No torch.

Limits are read from the process's own cgroup up to the root, and the smallest holds. In a
container the mount shows the container's own cgroup as the root.
"""

import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

# v1 writes "no limit" as the largest multiple of the page size.
_NO_LIMIT = 1 << 60


class Resources:
    """Reads below `cgroup` and `proc`, which tests replace."""

    def __init__(self, cgroup: Path = Path("/sys/fs/cgroup"), proc: Path = Path("/proc")) -> None:
        self._cgroup = cgroup
        self._proc = proc

    def cpu_quota(self) -> float | None:
        """Cores that the cgroup may use on average, or None without a limit."""
        quotas = []
        for directory in self._directories("cpu"):
            words = _words(directory / "cpu.max")  # v2: "max 100000" or "50000 100000"
            if not words:
                words = _words(directory / "cpu.cfs_quota_us")
                words += _words(directory / "cpu.cfs_period_us")
            if len(words) == 2 and words[0].isdigit() and int(words[1]) > 0:
                quotas.append(int(words[0]) / int(words[1]))
        return min(quotas, default=None)

    def num_threads(self) -> int:
        """Compute threads: the CPUs it may run on, at most the quota."""
        cpus = len(os.sched_getaffinity(0))
        quota = self.cpu_quota()
        return cpus if quota is None else max(1, min(cpus, math.ceil(quota)))

    def throttled_s(self) -> float:
        """Seconds throttled by the quota since the cgroup began; 0 without a quota.

        v2 counts microseconds, v1 nanoseconds.
        """
        for fields in self._counts("cpu", "cpu.stat"):
            if "throttled_usec" in fields:
                return fields["throttled_usec"] / 1e6
            if "throttled_time" in fields:
                return fields["throttled_time"] / 1e9
        return 0.0

    def oom_kills(self) -> int:
        """Processes of the cgroup that the kernel has killed for memory; 0 where it is not told."""
        files = ("memory.events", "memory.oom_control")  # v2 and v1
        counts = (fields for name in files for fields in self._counts("memory", name))
        return next((fields["oom_kill"] for fields in counts if "oom_kill" in fields), 0)

    def _counts(self, controller: str, name: str) -> Iterator[dict[str, int]]:
        """A file of named counters: of our own cgroup, then of the root, which is our own inside a
        cgroup namespace."""
        own = [base / path.lstrip("/") for base, path in self._groups(controller)]
        roots = [self._cgroup / each for each in ("", controller, "cpu,cpuacct")]
        for directory in (*own, *roots):
            words = [line.split() for line in _lines(directory / name)]
            pairs = [each for each in words if len(each) == 2 and each[1].isdigit()]
            yield {key: int(value) for key, value in pairs}

    def memory_bytes(self) -> int:
        """The cgroup's memory limit, or the machine's memory where that is smaller or unlimited."""
        limits = [self._node_memory()]
        for directory in self._directories("memory"):
            for name in ("memory.max", "memory.limit_in_bytes"):
                words = _words(directory / name)
                if words and words[0].isdigit() and int(words[0]) < _NO_LIMIT:
                    limits.append(int(words[0]))
        return min(limits)

    def resident_bytes(self, pid: int) -> int:
        """Resident memory of a process; 0 where it cannot be read."""
        words = _words(self._proc / str(pid) / "statm")
        return int(words[1]) * os.sysconf("SC_PAGE_SIZE") if len(words) > 1 else 0

    def peak_bytes(self) -> int:
        """Largest resident memory of this process since `reset_peak`."""
        return _kibibytes(self._proc / "self" / "status", "VmHWM:")

    def reset_peak(self) -> bool:
        """Start a new peak (man 5 proc, clear_refs: 5); False where that is not allowed."""
        try:
            (self._proc / "self" / "clear_refs").write_text("5")
        except OSError:
            return False
        return True

    def _node_memory(self) -> int:
        return _kibibytes(self._proc / "meminfo", "MemTotal:")

    def _directories(self, controller: str) -> Iterator[Path]:
        """Cgroup directories that may hold the controller's limits."""
        for base, path in self._groups(controller):
            here = base / path.lstrip("/")
            yield from (each for each in (here, *here.parents) if each.is_relative_to(base))

    def _groups(self, controller: str) -> Iterator[tuple[Path, str]]:
        """Places of our cgroup, v2 and v1: the root of a hierarchy, and the path below it."""
        for line in _lines(self._proc / "self" / "cgroup"):
            names, _, path = line.partition(":")[2].partition(":")
            if not names:
                bases = ("", "unified")
            elif controller in names.split(","):
                bases = (names, controller)
            else:
                continue
            yield from ((self._cgroup / base, path) for base in bases)


PRODUCTS_KEPT = "256"
"""oneDNN and torch each keep a product of some 350 KB for each number of rows, by default 1,024 of
them. A worker grew by 1 GB in a minute of mixed prompts. With rounded rows
(`sluice_kernels.linear`), 256 hold nearly all."""
PRODUCT_CACHES = ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY")


def engine_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """`environ` with large pages for glibc's allocations and small caches of oneDNN's products,
    unless it sets these itself.

    Every step reads all weights. With pages of 4 KiB a decode of one sequence took 1.3 times as
    long (measured). The C library reads these variables before a program begins.
    """
    found = {**dict.fromkeys(PRODUCT_CACHES, PRODUCTS_KEPT), **environ}
    name = "glibc.malloc.hugetlb"
    told = environ.get("GLIBC_TUNABLES", "")
    if name not in told:
        found["GLIBC_TUNABLES"] = ":".join(filter(None, (told, f"{name}=1")))
    return found


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []


def _words(path: Path) -> list[str]:
    lines = _lines(path)
    return lines[0].split() if lines else []


def _kibibytes(path: Path, label: str) -> int:
    for line in _lines(path):
        if line.startswith(label):
            return int(line.split()[1]) << 10
    return 0
