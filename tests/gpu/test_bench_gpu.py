"""What the bench of the GPU says where there is none, and what it draws."""

import json
from pathlib import Path

import pytest
import torch
from bench import gpu
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
