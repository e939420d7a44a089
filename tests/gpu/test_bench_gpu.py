"""What the bench of the GPU says where there is none, and what it draws."""

import json
from pathlib import Path

import pytest
import torch
from bench import gpu, gpu_kernels
from bench.gpu_kernels import Point, Timing


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
    gpu.write_report("A GPU", {"decode": 0.001}, points, tmp_path)
    written = json.loads((tmp_path / "gpu.json").read_text())
    assert written["points"][1]["time_ms"] == {"median": 2.0, "smallest": 1.0, "largest": 5.0}
    assert (tmp_path / "gpu.png").read_bytes().startswith(b"\x89PNG")
    assert "83.0% of its ceiling" in gpu.told(points[1])


def test_only_what_can_fill_a_gpu_has_an_aim() -> None:
    decodes = {name for name in gpu.AIMS if name.startswith("decode")}
    sizes = ("32 x 1024", "32 x 4096", "128 x 1024", "1 x 32768")
    assert decodes == {f"decode {size}" for size in sizes}
    assert "prefill 64 at 32768" not in gpu.AIMS
    assert gpu.AIMS["prefill 8192 at 0"] == 0.5


def test_tables_name_each_page_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "randperm", lambda count, **_: torch.arange(count))
    assert gpu_kernels.tables_of([3, 1, 2]).tolist() == [[0, 1, 2], [3, 0, 0], [4, 5, 0]]
