"""What a start on a GPU measures, and how it reads its weights."""

import os
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file
from sluice_core.contract import StepModel
from sluice_core.latency import TARGET_MARGIN, predicted_cap
from sluice_core.steptime import StepRecord, StepTimes
from sluice_worker.engine.startup import _Dummy, _Start
from sluice_worker.execution.weights import Checkpoint
from sluice_worker.scheduling.step import StepWork

LONGEST = 131_072
H100 = StepModel(a=6.0, b=0.01, c=128 * 1024 / 3.0e9, d=0.019, n=0, resid_q=1.0)
"""An 8B in bfloat16 by its bytes and products; milliseconds."""
WALK_MS = 90.0
"""What a chunk takes whose few programs read `LONGEST` slots, each of them all."""


class Estimated(_Dummy):
    """Steps that take what they would on an H100."""

    def __init__(self) -> None:
        super().__init__(SimpleNamespace(block_size=16), LONGEST)  # type: ignore[arg-type]

    def run(self, works: list[StepWork]) -> StepRecord:
        tokens = sum(work.num_tokens for work in works)
        if works[0].num_tokens == 1:
            slots = sum(work.start + 1 for work in works)
            return StepRecord(0.0, tokens, slots, 0, H100.step_ms(tokens, slots, 0))
        walked = works[0].start / LONGEST
        step_ms = max(H100.a + 0.8, 1.0 + H100.d * tokens) + WALK_MS * walked
        return StepRecord(0.0, 0, works[0].start + tokens, tokens, step_ms)


def profiled(kind: str) -> list[StepRecord]:
    start, dummy = SimpleNamespace(max_model_len=LONGEST, kind=kind), Estimated()
    steps = _Start._profile_steps(start, dummy, 256, 8192)  # type: ignore[arg-type]
    return [dummy.run(works) for works in steps]


def test_a_gpus_first_cap_is_not_that_of_the_longest_prompts_last_chunk() -> None:
    times = StepTimes()
    times.set_profile(profiled("cuda"))
    assert times.model is not None
    tail = times.model.resid_q
    cap = predicted_cap(times.model, tail, itl_ms=20.0, kv_per_seq=1024, ceiling=256)
    at_best = (TARGET_MARGIN * 20.0 - H100.a) / (H100.b + 1024 * H100.c)
    assert 0.85 * at_best < cap < 1.15 * at_best
    assert times.chunk_limit(20.0, 32, 32 * 1024) > 256


def test_a_cpus_profile_has_chunks_behind_the_longest_context() -> None:
    def behind(kind: str) -> list[int]:
        records = profiled(kind)
        return [r.num_prefill_tokens for r in records if r.num_kv_tokens == LONGEST]

    assert behind("cpu") == [32, 128]
    assert behind("cuda") == []


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    parts = {"long": torch.randn(70_000, 2), "short": torch.randn(3)}
    save_file(parts, tmp_path / "model.safetensors")
    return tmp_path


@pytest.mark.skipif(not hasattr(os, "posix_fadvise"), reason="this system takes no advice")
def test_a_tensors_bytes_are_asked_for_before_they_are_read(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[int, int]] = []
    monkeypatch.setattr(os, "posix_fadvise", lambda _, begin, size, __: asked.append((begin, size)))
    file = Checkpoint(checkpoint, torch.float32, torch.device("cpu"))
    assert asked == []
    found = file.read("long", (70_000, 2))
    assert all(begin + size == after for (begin, size), (after, _) in pairwise(asked))
    data, begin = (checkpoint / "model.safetensors").read_bytes(), asked[0][0]
    assert data[begin : begin + found.nbytes] == found.numpy().tobytes()
    assert sum(size for _, size in asked) - found.nbytes in range(128 << 10)


def test_weights_are_read_where_the_system_takes_no_advice(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(os, "posix_fadvise", raising=False)
    assert len(Checkpoint(checkpoint, torch.float32, torch.device("cpu")).read("short", (3,))) == 3
