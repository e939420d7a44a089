"""A worker's start on a GPU, and what it serves then. Without one there is nothing to compile."""

import json
import random
from pathlib import Path

import msgspec
import pytest
from gpu.paged import DEVICE
from sluice_core.wire import Submit, packed
from sluice_core.work import Sampling
from sluice_worker.base.config import EngineConfig
from sluice_worker.engine.startup import start
from sluice_worker.execution.gpu.capture import graph_sizes
from sluice_worker.execution.gpu.runner import GpuRunner
from triton import knobs

SHAPE = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 512,
    "hidden_size": 1024,
    "intermediate_size": 2048,
    "num_hidden_layers": 2,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
}


@pytest.mark.skipif(DEVICE.type != "cuda", reason="needs a GPU")
def test_no_kernel_is_compiled_once_a_worker_is_ready(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled: list[str] = []
    hook = "jit_post_compile_hook"
    monkeypatch.setattr(knobs.runtime, hook, lambda **made: compiled.append(made["fn"].name))
    (tmp_path / "config.json").write_text(json.dumps(SHAPE))
    config = EngineConfig(str(tmp_path), dtype="bfloat16", load_format="dummy", itl_ms=50.0)
    engine, ready = start(config, lambda *_: None)
    assert compiled
    assert isinstance(engine.runner, GpuRunner)
    assert sorted(engine.runner._decodes._graphs) == graph_sizes(ready.ceiling)
    compiled.clear()
    limits = engine.scheduler.limits
    engine.scheduler.limits = msgspec.structs.replace(limits, cap=ready.ceiling)
    chance = random.Random(1)
    for number in range(400):
        prompt = [chance.randrange(512) for _ in range(chance.randint(1, 700))]
        temperature = chance.choice([0.0, 0.8])
        cut = Sampling(top_p=0.9 if number > 300 and number % 4 == 0 else 1.0)
        asked = Submit(
            str(number),
            packed(prompt),
            chance.randint(1, 90),
            temperature,
            number,
            True,
            [],
            0,
            0.0,
            sampling=cut,
        )
        engine.submit(asked, 0.0)
    while engine.has_work:
        _, failed = engine.step()
        assert failed == []
    assert compiled == []
    assert engine.scheduler.check_integrity() is None
