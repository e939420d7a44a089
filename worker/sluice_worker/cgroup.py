"""How long the kernel held this container back for its CPU quota."""

from pathlib import Path

CGROUP = Path("/sys/fs/cgroup")
SELF = Path("/proc/self/cgroup")


def throttled_s(root: Path = CGROUP, membership: Path = SELF) -> float:
    """Seconds throttled since the cgroup began; 0 where there is no quota to read.

    cgroup v2 counts microseconds (throttled_usec), v1 nanoseconds (throttled_time).
    """
    for path in _candidates(root, membership):
        try:
            fields = dict(line.split() for line in path.read_text().splitlines())
            if "throttled_usec" in fields:
                return int(fields["throttled_usec"]) / 1e6
            if "throttled_time" in fields:
                return int(fields["throttled_time"]) / 1e9
        except (OSError, ValueError):
            continue  # not this layout
    return 0.0


def _candidates(root: Path, membership: Path) -> list[Path]:
    """cpu.stat of our own cgroup, then of the root, which is ours inside a cgroup namespace."""
    try:
        lines = membership.read_text().splitlines()
    except OSError:
        lines = []
    paths = []
    for line in lines:
        _, _, rest = line.partition(":")
        controllers, _, group = rest.partition(":")
        if controllers == "":
            paths.append(root / group.lstrip("/") / "cpu.stat")
        elif "cpu" in controllers.split(","):
            paths.append(root / controllers / group.lstrip("/") / "cpu.stat")
            paths.append(root / "cpu" / group.lstrip("/") / "cpu.stat")
    return [*paths, root / "cpu.stat", root / "cpu" / "cpu.stat", root / "cpu,cpuacct" / "cpu.stat"]
