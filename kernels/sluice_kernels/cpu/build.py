"""The C++ kernels as a shared library: found, or built at first use. Needs no torch.

    python -m sluice_kernels.cpu.build DIRECTORY

builds them for every instruction set of this architecture, for images without a compiler at run
time. The library exchanges addresses and numbers only, so it depends on no version of torch or
Python. Its name is a hash of the sources, the flags and the instruction set.
"""

import contextlib
import hashlib
import os
import platform
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

SOURCES = Path(__file__).parent
BUILT = SOURCES / "built"
COMPILER = "g++"
FLAGS = ("-std=c++17", "-O3", "-fPIC", "-pthread", "-fno-math-errno", "-fno-trapping-math")
BUILD_TIMEOUT_S = 120
T = TypeVar("T")


class CannotBuild(Exception):
    """There are no C++ kernels here; the message is one sentence."""


@dataclass(frozen=True, slots=True)
class BuildTarget:
    """An instruction set: the flags of /proc/cpuinfo that it needs, and the compiler's for it."""

    name: str
    needs: frozenset[str]
    flags: tuple[str, ...]

    @property
    def has_byte_products(self) -> bool:
        """True if the library multiplies bytes with VNNI."""
        return "avx512_vnni" in self.needs


_V3 = frozenset({"avx2", "fma", "f16c", "bmi2", "movbe"})
_V4 = _V3 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}
_BF16 = _V4 | {"avx512_bf16", "avx512_vnni"}
_BF16_FLAGS = ("-march=x86-64-v4", "-mavx512bf16", "-mavx512vnni")
TARGETS: Mapping[str, tuple[BuildTarget, ...]] = {
    "x86_64": (
        BuildTarget(
            "amx_bf16",
            _BF16 | {"amx_tile", "amx_bf16", "amx_int8"},
            (*_BF16_FLAGS, "-mamx-tile", "-mamx-bf16", "-mamx-int8"),
        ),
        BuildTarget("avx512_bf16", _BF16, _BF16_FLAGS),
        BuildTarget("avx512", _V4, ("-march=x86-64-v4",)),
        BuildTarget("avx2", _V3, ("-march=x86-64-v3",)),
    )
}
"""For each architecture, best first."""


_VNNI = {"avx512_vnni", "avx_vnni"}


def usable_targets(machine: str, cpuinfo: str) -> list[BuildTarget]:
    """The targets that a machine with this /proc/cpuinfo text can run, best first."""
    features = _features(cpuinfo)
    return [target for target in TARGETS.get(machine, ()) if target.needs <= features]


def has_vnni(cpuinfo: str, *, in_avx512: bool = False) -> bool:
    """True if the CPU adds four products of bytes in 32 bits. `in_avx512`: only AVX512's counts."""
    return not _features(cpuinfo).isdisjoint({"avx512_vnni"} if in_avx512 else _VNNI)


def _features(cpuinfo: str) -> set[str]:
    lines = (line for line in cpuinfo.splitlines() if line.startswith("flags"))
    return set(next(lines, "").partition(":")[2].split())


@dataclass(frozen=True, slots=True)
class Recipe:
    """How a library is made of all the C++ sources in a folder."""

    name: str
    sources: Path
    flags: tuple[str, ...]

    def files(self, suffix: str) -> list[Path]:
        """The sources of that kind."""
        return sorted(self.sources.glob(f"*{suffix}"))

    def file_name(self) -> str:
        """A name that differs for other sources, flags or processors."""
        digest = hashlib.sha256(repr((self.flags, platform.machine())).encode())
        for source in (*self.files(".cpp"), *self.files(".h")):
            digest.update(source.read_bytes())
        return f"{self.name}-{digest.hexdigest()[:16]}.so"


def recipe_of(target: BuildTarget) -> Recipe:
    """The recipe of the kernels for `target`."""
    return Recipe(target.name, SOURCES, (*FLAGS, *target.flags))


def loaded(
    load: Callable[[Path], T],
    recipe: Recipe,
    directories: Sequence[Path],
    finished: Sequence[Path] = (),
) -> T:
    """The result of `load` on the library, found in `finished` or `directories`. Otherwise the
    library is built in the first of `directories` that allows it, as is one that does not load.

    Raises CannotBuild.
    """
    for directory in (*finished, *filter(_is_ours, directories)):
        path = directory / recipe.file_name()
        with contextlib.suppress(OSError):
            return load(path)
    problem = "no directory of the cache can be written to"
    for directory in filter(_is_writable, directories):
        try:
            return load(build(recipe, directory))
        except OSError as error:  # no space, or nothing there may be executed
            problem = f"the library cannot be built in {directory}, or not be loaded: {error}"
    raise CannotBuild(problem)


def _is_ours(directory: Path) -> bool:
    """True if no other user can write there: a library found there will be executed."""
    try:
        found = [directory.lstat(), directory.parent.stat()]
    except OSError:
        return False
    return all(s.st_uid in (0, os.getuid()) and not s.st_mode & stat.S_IWOTH for s in found)


def _is_writable(directory: Path) -> bool:
    try:
        for made in (directory.parent, directory):  # the mode is of the last one only
            made.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError:
        return False
    return _is_ours(directory) and os.access(directory, os.W_OK)


def cache_directories(environ: Mapping[str, str]) -> list[Path]:
    """Directories for built libraries, the user's cache first. None is created or read here: an
    image holds built libraries, and needs no temporary directory."""
    home, cache = environ.get("HOME"), environ.get("XDG_CACHE_HOME")
    found = [Path(cache)] if cache else [Path(home) / ".cache"] if home else []
    temporary = Path(environ.get("TMPDIR") or "/tmp") / f"sluice-{os.getuid()}"  # noqa: S108
    return [*(path / "sluice" / "kernels" for path in found), temporary / "kernels"]


def build(recipe: Recipe, directory: Path) -> Path:
    """Compile it into `directory`; CannotBuild with the compiler's first error."""
    path, sources = directory / recipe.file_name(), recipe.files(".cpp")
    with tempfile.TemporaryDirectory(dir=directory) as made:
        objects = [Path(made) / f"{source.stem}.o" for source in sources]
        for source, output in zip(sources, objects, strict=True):
            _compile([*recipe.flags, "-c", str(source), "-o", str(output)])
        whole = Path(made) / path.name
        _compile(["-shared", *map(str, objects), "-o", str(whole)])
        with whole.open("rb+") as file:
            os.fsync(file)  # else a crash may leave a truncated file of the right name
        whole.replace(path)  # another process may build the same at the same time
    return path


def _compile(arguments: Sequence[str]) -> None:
    try:
        subprocess.run(
            [COMPILER, *arguments],
            check=True,
            capture_output=True,
            text=True,
            timeout=BUILD_TIMEOUT_S,
        )
    except FileNotFoundError as error:
        raise CannotBuild(f"there is no {COMPILER}") from error
    except subprocess.TimeoutExpired as error:
        raise CannotBuild(f"{COMPILER} took over {BUILD_TIMEOUT_S} s") from error
    except subprocess.CalledProcessError as error:
        told = [line for line in error.stderr.splitlines() if "error" in line] or ["no reason told"]
        raise CannotBuild(f"{COMPILER} failed: {told[0][:200]}") from error


def main(arguments: Sequence[str]) -> int:
    """Build everything for this architecture into the directory that is given."""
    (directory,) = map(Path, arguments)
    directory.mkdir(parents=True, exist_ok=True)
    for target in TARGETS.get(platform.machine(), ()):
        print(build(recipe_of(target), directory))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
