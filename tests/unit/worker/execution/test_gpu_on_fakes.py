"""A worker's start on a GPU of fake tensors, and the steps that it takes then."""

import json
import random
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
from sluice_core.contract import StepModel
from sluice_core.latency import predicted_cap
from sluice_core.work import Sampling
from sluice_worker.base.config import EngineConfig
from sluice_worker.engine import startup
from sluice_worker.engine.loop import Engine
from sluice_worker.engine.startup import start
from sluice_worker.execution.gpu.capture import first_sizes, graph_sizes, padded_size
from sluice_worker.execution.gpu.runner import GpuRunner
from sluice_worker.scheduling.step import StepWork
from unit.worker.engine.factories import create_request
from unit.worker.engine.fake_gpu import Trace, fake_gpu

MODELS: dict[str, dict[str, object]] = {
    "qwen3": {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"},
    "gemma2": {
        "architectures": ["Gemma2ForCausalLM"],
        "model_type": "gemma2",
        "sliding_window": 64,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
        "query_pre_attn_scalar": 128,
    },
}
SHAPE = {
    "vocab_size": 512,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": True,
}
CEILING = 40


def serve(engine: Engine) -> None:
    """Requests come in bursts while others decode; each third is greedy, each third is cut."""
    chance = random.Random(2)
    limits = engine.scheduler.limits
    engine.scheduler.limits = msgspec.structs.replace(limits, cap=CEILING)
    for number in range(16):
        cut = Sampling(top_p=0.9, top_k=20) if number % 3 == 0 else None
        request = create_request(
            str(number),
            chance.randint(1, 300),
            max_tokens=chance.randint(1, 12),
            temperature=0.8 * (number % 3 < 2),
            sampling=cut,
        )
        assert engine.submit(request, 0.0) is None
        if number in (0, 2, 5, 9, 10):  # bursts of one, two, three and four
            assert engine.step()[1] == []
    while engine.has_work:
        assert engine.step()[1] == []


@pytest.fixture(params=MODELS)
def traced(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Trace:
    """What a start does, and the steps behind it."""
    (tmp_path / "config.json").write_text(json.dumps(SHAPE | MODELS[request.param]))
    config = EngineConfig(
        str(tmp_path), dtype="bfloat16", load_format="dummy", max_num_seqs=CEILING
    )
    with fake_gpu(monkeypatch) as trace:
        engine, ready = start(config, lambda *_: None)
        assert ready.kernels == "triton"
        trace.is_ready = True
        serve(engine)
        engine.runner.clear([1, 2, 3])
    return trace


def test_graphs_read_nothing_of_the_host_and_steps_wait_for_nothing_but_tokens(
    traced: Trace,
) -> None:
    assert traced.touched == []
    # The small ones for the profile, then all.
    assert traced.num_captures == len(first_sizes(CEILING)) + len(graph_sizes(CEILING))


def test_no_kernel_is_compiled_in_a_capture_or_once_a_worker_is_ready(traced: Trace) -> None:
    assert traced.compiled
    assert traced.late == []


def test_steps_of_all_sizes_have_run_before_a_worker_is_ready(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(SHAPE | MODELS["qwen3"]))
    config = EngineConfig(str(tmp_path), dtype="bfloat16", load_format="dummy", max_num_seqs=4)
    sizes, execute = [], GpuRunner.execute

    def noted(self: GpuRunner, works: list[StepWork]) -> list[int | None]:
        sizes.append(sum(work.num_tokens for work in works))
        return execute(self, works)

    monkeypatch.setattr(GpuRunner, "execute", noted)
    with fake_gpu(monkeypatch):
        start(config, lambda *_: None)
    expected = graph_sizes(config.max_num_batched_tokens)[::-1]
    assert sizes[-len(expected) :] == expected


def test_the_first_cap_is_that_of_decodes_by_the_graphs_of_the_runner_that_serves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without its graph a decode takes as long as a chunk here."""
    (tmp_path / "config.json").write_text(json.dumps(SHAPE | MODELS["qwen3"]))
    config = EngineConfig(
        str(tmp_path), dtype="bfloat16", load_format="dummy", max_num_seqs=256, itl_ms=20.0
    )
    now_s, decoded_on, execute = 0.0, set[GpuRunner](), GpuRunner.execute
    clock = SimpleNamespace(monotonic=lambda: now_s, process_time=lambda: now_s)
    monkeypatch.setattr(startup, "time", clock)

    def timed(self: GpuRunner, works: list[StepWork]) -> list[int | None]:
        nonlocal now_s
        tokens, graphs = sum(work.num_tokens for work in works), self._decodes._graphs
        is_decode = tokens == len(works)
        if is_decode:
            decoded_on.add(self)
        is_graph = is_decode and padded_size(tokens, graphs) in graphs
        now_s += (5 + 0.05 * tokens if is_graph else 17 + 0.0213 * tokens) / 1e3
        return execute(self, works)

    monkeypatch.setattr(GpuRunner, "execute", timed)
    with fake_gpu(monkeypatch):
        engine, ready = start(config, lambda *_: None)
    assert decoded_on == {engine.runner}
    truth = StepModel(5.0, 0.05, 0.0, 0.0213, 0, 1.0)
    fits = predicted_cap(truth, 1.0, itl_ms=20.0, kv_per_seq=0.0, ceiling=256)
    assert 1 < ready.cap == fits
