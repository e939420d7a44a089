"""Where the library of C++ kernels comes from, and what stands in for it."""

import ctypes
import os
import platform
import re
import subprocess
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from sluice_kernels import choose as choosing
from sluice_kernels.choose import choose
from sluice_kernels.cpu import build
from sluice_kernels.cpu.build import (
    BuildTarget,
    CannotBuild,
    cache_directories,
    has_vnni,
    loaded,
    recipe_of,
    usable_targets,
)
from sluice_kernels.interface import Kernels

CPUINFO = Path("/proc/cpuinfo").read_text()
FLAGS = "flags\t\t: fpu avx2 fma f16c bmi2 movbe avx512f avx512bw avx512cd avx512dq avx512vl"


def test_vnni_of_256_bits_is_none_of_avx512() -> None:
    assert not has_vnni(FLAGS)
    assert has_vnni(FLAGS + " avx_vnni")
    assert not has_vnni(FLAGS + " avx_vnni", in_avx512=True)
    assert has_vnni(FLAGS + " avx512_vnni", in_avx512=True)


@pytest.mark.parametrize(("extra", "is_rounded"), [(" avx512_vnni", True), ("", False)])
def test_rows_are_rounded_where_products_of_bytes_are_onednns(
    monkeypatch: pytest.MonkeyPatch, extra: str, is_rounded: bool
) -> None:
    """Without VNNI they are our own, for which nothing is made anew."""
    told = SimpleNamespace(read_text=lambda: FLAGS + extra)
    monkeypatch.setattr(choosing, "Path", lambda _: told)
    sizes = {"max_gather_bytes": 1, "max_scores_bytes": 1}
    bytes_, plain = (
        choose(torch.device("cpu"), torch.bfloat16, quantization, os.environ, **sizes)
        for quantization in ("w8a8", None)
    )
    assert (bytes_.round_rows(515) != 515) == is_rounded
    assert plain.round_rows(515) == 515


def chosen(environ: dict[str, str], dtype: torch.dtype = torch.float32) -> Kernels:
    return choose(torch.device("cpu"), dtype, None, environ, max_gather_bytes=1, max_scores_bytes=1)


def library(target: BuildTarget, directories: Sequence[Path]) -> Path:
    """Where it is found or built, never opened: a test may truncate the file."""
    return loaded(_there, recipe_of(target), directories, (build.BUILT,))


def _there(path: Path) -> Path:
    path.stat()
    return path


@pytest.fixture
def plain_target() -> BuildTarget:
    """What any machine can compile for."""
    return BuildTarget("any", frozenset(), ("-O0",))


@pytest.mark.parametrize(
    ("cpuinfo", "names"),
    [
        (f"processor: 0\n{FLAGS} avx512_vnni avx512_bf16\n", ["avx512_bf16", "avx512", "avx2"]),
        (
            f"{FLAGS} avx512_vnni avx512_bf16 amx_bf16 amx_tile amx_int8\n",
            ["amx_bf16", "avx512_bf16", "avx512", "avx2"],
        ),
        (f"{FLAGS}\n", ["avx512", "avx2"]),
        ("flags : sse2 avx avx2\n", []),
        ("", []),
    ],
)
def test_only_what_the_processor_can_run_is_offered_best_first(
    cpuinfo: str, names: list[str]
) -> None:
    assert [target.name for target in usable_targets("x86_64", cpuinfo)] == names
    assert usable_targets("riscv64", cpuinfo) == []


def test_a_library_is_built_once_and_found_again(
    tmp_path: Path, plain_target: BuildTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("no directory can be made below a file")
    directories = [blocked / "kernels", tmp_path / "kernels"]
    built = library(plain_target, directories)
    assert built.parent == directories[1]
    assert [path.name for path in directories[1].iterdir()] == [built.name]
    monkeypatch.setattr(build, "COMPILER", "no-such-compiler")
    assert library(plain_target, directories) == built
    other = BuildTarget("any", frozenset(), ("-DOTHER",))
    with pytest.raises(CannotBuild, match="there is no no-such-compiler"):
        library(other, directories)
    monkeypatch.setattr(build, "BUILT", directories[1])  # as an image has it
    assert library(plain_target, []) == built
    with pytest.raises(CannotBuild, match="no directory of the cache can be written to"):
        library(other, [])


def test_what_does_not_compile_says_the_first_error(tmp_path: Path) -> None:
    with pytest.raises(CannotBuild, match=r"g\+\+ failed: .*error"):
        build.build(recipe_of(BuildTarget("wrong", frozenset(), ("-march=none",))), tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_library_that_somebody_else_owns_is_not_loaded(
    tmp_path: Path, plain_target: BuildTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs = library(plain_target, [tmp_path / "theirs"])
    if os.getuid() == 0:
        os.chown(theirs.parent, 54321, 54321)  # root's own are everybody's
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    with pytest.raises(CannotBuild):
        library(plain_target, [theirs.parent])


@pytest.mark.parametrize("umask", [0o022, 0o002, 0])
def test_a_cache_is_its_owners_whatever_the_umask(
    tmp_path: Path, plain_target: BuildTarget, umask: int
) -> None:
    before = os.umask(umask)
    try:
        made = library(plain_target, [tmp_path / "sluice" / "kernels"])
    finally:
        os.umask(before)
    assert library(plain_target, [made.parent]) == made


@pytest.mark.parametrize("folder", ["cache", "cache/kernels"])
def test_a_folder_that_others_may_write_to_is_passed_by(
    tmp_path: Path, plain_target: BuildTarget, folder: str
) -> None:
    open_one, ours = tmp_path / "cache" / "kernels", tmp_path / "ours" / "kernels"
    made = library(plain_target, [open_one])
    (tmp_path / folder).chmod(0o777)
    found = library(plain_target, [open_one, ours])
    assert (made.parent, found.parent) == (open_one, ours)


def test_where_a_library_cannot_be_loaded_from_the_next_directory_is_tried(
    tmp_path: Path, plain_target: BuildTarget
) -> None:
    """A home that is mounted noexec, or full, is no reason to do without."""
    barred, ours = tmp_path / "barred" / "kernels", tmp_path / "ours" / "kernels"

    def load(path: Path) -> Path:
        if path.is_relative_to(barred):
            raise OSError("failed to map segment from shared object")
        return _opened(path)

    recipe = recipe_of(plain_target)
    assert loaded(load, recipe, [barred, ours]).parent == ours
    with pytest.raises(CannotBuild, match="barred.*failed to map segment"):
        loaded(load, recipe, [barred])


def test_nothing_temporary_is_needed_where_an_image_holds_the_library(tmp_path: Path) -> None:
    """A container whose disk is read-only has no temporary directory at all."""
    nowhere = str(tmp_path / "nowhere")
    paths = cache_directories({"TMPDIR": nowhere})
    assert [str(path) for path in paths] == [f"{nowhere}/sluice-{os.getuid()}/kernels"]


def test_a_library_that_cannot_be_loaded_is_built_again(
    tmp_path: Path, plain_target: BuildTarget
) -> None:
    recipe, directories = recipe_of(plain_target), [tmp_path / "ours" / "kernels"]
    path = library(plain_target, directories)
    path.write_bytes(b"")
    assert loaded(_opened, recipe, directories) == path
    assert path.stat().st_size > 0


def _opened(path: Path) -> Path:
    ctypes.CDLL(str(path))
    return path


def test_caches_are_the_users_own_and_then_a_temporary_one() -> None:
    own = f"sluice-{os.getuid()}/kernels"
    assert cache_directories({"XDG_CACHE_HOME": "/x", "HOME": "/h"})[0] == Path("/x/sluice/kernels")
    assert cache_directories({"HOME": "/h"})[0] == Path("/h/.cache/sluice/kernels")
    assert [str(path) for path in cache_directories({})][0].endswith(own)


def test_plain_torch_stands_in_and_the_name_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    environ = {"HOME": str(tmp_path), "TMPDIR": str(tmp_path)}
    assert chosen({**environ, "SLUICE_KERNELS": "torch"}).name == "torch"
    assert "have no float16" in chosen(environ, torch.float16).name
    if not usable_targets(platform.machine(), CPUINFO):
        pytest.skip("no instruction set that the C++ kernels are made for")
    monkeypatch.setattr(build, "COMPILER", "no-such-compiler")
    monkeypatch.setattr(build, "BUILT", tmp_path)
    assert chosen(environ).name == "torch (there is no no-such-compiler)"


@pytest.mark.skipif(platform.machine() != "x86_64", reason="registers are told by their x86 names")
@pytest.mark.parametrize("target", build.TARGETS["x86_64"], ids=lambda target: target.name)
def test_the_sums_of_a_product_stay_in_registers(target: BuildTarget, tmp_path: Path) -> None:
    """Stored after each word of a row, products of bytes took twice as long: no result shows it."""
    library = build.build(recipe_of(target), tmp_path)
    command = ["objdump", "-d", "-C", "--no-show-raw-insn", str(library)]
    listing = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    functions = re.findall(r"^[0-9a-f]+ <(.*::block<.*)>:\n((?:.+\n)+)", listing, re.M)
    assert len(functions) > 60
    product = re.compile(r"vpdpbusd|vdpbf16ps|vfmadd231ps|vpmaddwd")
    stored = re.compile(r"vmov\w+\s+%[yz]mm\d+,.*\(%r[sb]p\)")
    for name, body in functions:
        lines = body.splitlines()
        places = [number for number, line in enumerate(lines) if product.search(line)]
        assert places, name
        assert not any(map(stored.search, lines[places[0] : places[-1]])), name
