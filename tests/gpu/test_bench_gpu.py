"""What the bench of the GPU says where there is none, and what it draws."""

import json
from pathlib import Path

import pytest
import torch
from bench import gpu, gpu_engine, gpu_kernels
from bench.gpu_kernels import KernelTime, Point, Timing
from bench.gpu_memory import Bytes


def test_without_a_gpu_the_bench_says_so_in_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    monkeypatch.setattr("sys.argv", ["bench.gpu", "--out", str(tmp_path)])
    assert gpu.main() == 1
    told = capsys.readouterr().out
    assert told.count("\n") == told.count(".") == 1
    assert "no CUDA GPU" in told
    assert list(tmp_path.iterdir()) == []


def test_the_report_is_json_and_a_picture(tmp_path: Path) -> None:
    times = Timing.of([2.0, 1.0, 5.0])
    points = [
        Point("copy", times, 3.0, "TB/s"),
        Point("decode 1 x 1024", times, 2.5, "TB/s", 0.83),
        Point("batch 32", times, 4100.0, "tokens/s", 0.74),
    ]
    results = gpu.Results("A GPU", errors={"decode": 0.001}, points=points)
    gpu.write_report(results, tmp_path)
    written = json.loads((tmp_path / "gpu.json").read_text())
    assert written["points"][1]["time_ms"] == {"median": 2.0, "smallest": 1.0, "largest": 5.0}
    assert (tmp_path / "gpu.png").read_bytes().startswith(b"\x89PNG")
    assert "| decode | 0.00100 |" in (tmp_path / "gpu-measured.md").read_text()
    assert "83.0% of its ceiling" in gpu.told(points[1])
    assert results.wrong == []


def fails() -> float:
    raise RuntimeError("no room\nfor it")


def test_what_fails_is_told_and_the_rest_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def point(name: str) -> Point:
        kernels = (KernelTime("_decode", 32, 640.0),)
        return Point(name, Timing.of([2.0]), 3.0, "TB/s", 0.5, kernels)

    jobs = [("bad", fails), ("good", lambda: point("good"))]
    checks = [("worse", fails), ("far", lambda: float("inf")), ("near", lambda: 0.001)]
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(gpu, "checks", lambda: iter(checks))
    monkeypatch.setattr(gpu, "copy_point", lambda _: point("copy"))
    monkeypatch.setattr(gpu, "matmul_point", lambda _: point("matmul"))
    monkeypatch.setattr(gpu, "engine_jobs", lambda *_: iter(jobs))
    results = gpu.Results("A GPU")
    part = gpu.Part(results, 1, tmp_path)
    part.measure("checks")
    part.measure("engine")
    assert results.wrong == ["far", "worse", "bad"]
    written = json.loads((tmp_path / "gpu.json").read_text())
    failed = {"name": "bad", "error": "RuntimeError: no room"}
    assert written["failed"] == [failed | {"name": "worse"}, failed]
    assert written["errors"] == {"far": None, "near": 0.001}
    assert [point["name"] for point in written["points"]] == ["copy", "matmul", "good"]
    assert written["points"][2]["kernels"] == [{"name": "_decode", "calls": 32, "time_us": 640.0}]
    told = gpu.page(results)
    assert "| bad | RuntimeError: no room |" in told
    assert "| `_decode` | 32 | 640.0 |" in told
    assert "FAILED: RuntimeError: no room" in capsys.readouterr().out


def test_a_part_that_is_not_done_in_time_keeps_what_it_had(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A real process, which the limit ends before it has begun."""
    monkeypatch.setenv("PYTHONPATH", "tests")
    found, why = gpu.run_part("small", 0.2, True, tmp_path)
    assert found is None
    assert why == "it was not done after 0 s"
    gpu.write_json(gpu.Results("A GPU", errors={"near": 0.001}), tmp_path)
    found, _ = gpu.run_part("small", 0.2, True, tmp_path)
    assert found is not None
    assert found.errors == {"near": 0.001}


def test_an_error_of_the_memory_plan_is_a_share_of_all() -> None:
    results = gpu.Results("A GPU")
    sizes = {"weights": (600, 600), "activation": (50, 20), "kv_cache": (380, 380)}
    results.memory = [Bytes(name, *pair) for name, pair in sizes.items()]
    assert results.error_of(results.memory[1]) == pytest.approx(0.03)
    assert results.wrong == []
    results.memory.append(Bytes("in use", 1100, 1060))
    assert results.wrong == ["in use"]


def test_kernels_are_summed_by_name_and_the_least_as_one() -> None:
    calls = [(f"k{number}", float(number)) for number in range(20)] + [("k3", 100.0)]
    found = gpu_engine.summed(calls)
    assert found[0] == KernelTime("k3", 2, 103.0)
    assert len(found) == gpu_engine.MOST_KERNELS + 1
    assert found[-1] == KernelTime("all others", 4, 0.0 + 1.0 + 2.0 + 4.0)


def test_only_what_can_fill_a_gpu_has_an_aim() -> None:
    decodes = {name for name in gpu.AIMS if name.startswith("decode")}
    sizes = ("32 x 1024", "32 x 4096", "128 x 1024", "1 x 32768")
    assert decodes == {f"decode {size}" for size in sizes}
    assert "prefill 64 at 32768" not in gpu.AIMS
    assert gpu.AIMS["prefill 8192 at 0"] == 0.5


def test_tables_name_each_page_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "randperm", lambda count, **_: torch.arange(count))
    assert gpu_kernels.tables_of([3, 1, 2]).tolist() == [[0, 1, 2], [3, 0, 0], [4, 5, 0]]
