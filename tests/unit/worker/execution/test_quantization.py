"""int8 linear layers: how much they lose, what they hold, and where they are refused."""

import json
import math
import os
import sysconfig
from pathlib import Path

import pytest
import torch
from sluice_core.model.sizing import ModelShape, bytes_saved, weights_bytes
from sluice_kernels.choose import CannotChoose, choose
from sluice_kernels.cpu.build import has_vnni
from sluice_kernels.interface import Kernels
from sluice_worker.base.config import EngineConfig, Quantization, parse
from sluice_worker.base.resources import Resources
from sluice_worker.engine.startup import start
from sluice_worker.execution.models.decoder import Decoder
from sluice_worker.execution.runner import Runner
from sluice_worker.scheduling.sequence import Sequence
from sluice_worker.scheduling.step import StepWork
from sluice_worker.text.tokenizer import Tokenizer
from unit.worker.engine.factories import create_request, load_decoder

MODEL = Path(__file__).parents[4] / "examples" / "model"
CPU = torch.device("cpu")
HAS_VNNI = has_vnni(Path("/proc/cpuinfo").read_text())


def kernels(
    quantization: Quantization | None, asked: str = "auto", dtype: torch.dtype = torch.bfloat16
) -> Kernels:
    environ = {**os.environ, "SLUICE_KERNELS": asked}
    sizes = {"max_gather_bytes": 1 << 25, "max_scores_bytes": 1 << 24}
    return choose(CPU, dtype, quantization, environ, **sizes)


def perplexity(model: Decoder, tokens: list[int]) -> float:
    runner = Runner(model, 16, 64, frozenset())
    sequence = Sequence(create_request("p", tokens), seed=0, token_ids=tokens)
    sequence.block_ids = list(range(16))
    step = runner.build([StepWork(sequence, 0, len(tokens), samples=True)])
    with torch.inference_mode():
        logits = model.logits(model.hidden(step, runner.caches)[:-1])
    loss = torch.nn.functional.cross_entropy(logits, torch.tensor(tokens[1:]))
    return math.exp(float(loss))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("asked", ["auto", "torch"])
def test_perplexity_of_the_demo_model_stays_within_one_percent(
    asked: str, dtype: torch.dtype
) -> None:
    if asked == "torch" and not HAS_VNNI:
        with pytest.raises(CannotChoose, match="VNNI"):
            kernels("w8a8", asked, dtype)
        return
    text = (Path(sysconfig.get_path("stdlib")) / "textwrap.py").read_text(encoding="utf-8")
    tokens = list(Tokenizer(MODEL).encode(text))[:1000]
    whole, narrow = (
        perplexity(load_decoder(MODEL, dtype=dtype, kernels=chosen), tokens)
        for chosen in (kernels(None, asked, dtype), kernels("w8a8", asked, dtype))
    )
    assert abs(narrow / whole - 1) < 0.01


def test_memory_is_planned_at_a_byte_for_each_weight_and_held_so() -> None:
    shape = ModelShape.from_config(json.loads((MODEL / "config.json").read_text()))
    planned = weights_bytes(shape, 2) - bytes_saved(shape, "bfloat16", "w8a8")
    held = load_decoder(MODEL, dtype=torch.bfloat16, kernels=kernels("w8a8")).num_bytes
    assert held == pytest.approx(planned, rel=0.02)
    assert planned < 0.75 * weights_bytes(shape, 2)
    assert bytes_saved(shape, "bfloat16", None) == 0


def test_the_start_plans_and_reports_what_is_held() -> None:
    config = EngineConfig(str(MODEL), dtype="bfloat16", quantization="w8a8", max_num_seqs=2)
    _, ready = start(config, lambda phase, percent: None)
    planned, measured = (m["weights_bytes"] for m in (ready.memory.planned, ready.memory.measured))
    assert measured == pytest.approx(planned, rel=0.02)


def test_experts_are_counted_each(tmp_path: Path) -> None:
    config = {
        "architectures": ["MixtralForCausalLM"],
        "hidden_size": 8,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 4,
        "num_hidden_layers": 3,
        "intermediate_size": 16,
        "vocab_size": 10,
        "max_position_embeddings": 64,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
    }
    shape = ModelShape.from_config(config)
    attention, experts = 8 * (2 * 8 + 2 * 4), 4 * 3 * 8 * 16
    outputs = 8 + 2 * 4 + 8 + 4 * (2 * 16 + 8)
    assert bytes_saved(shape, "bfloat16", "w8a8") == 3 * (attention + experts - 4 * outputs)


def test_what_cannot_run_is_refused_in_one_sentence() -> None:
    with pytest.raises(CannotChoose, match="w8a8 needs dtype"):
        kernels("w8a8", dtype=torch.float16)
    with pytest.raises(CannotChoose, match="must be one of auto, cpp, torch"):
        kernels(None, "fast")
    with pytest.raises(CannotChoose, match="SLUICE_KERNELS=cpp cannot be had.*float16"):
        kernels(None, "cpp", torch.float16)
    with pytest.raises(CannotChoose, match="w8a8 is built for CPUs only"):
        choose(
            torch.device("cuda"), torch.bfloat16, "w8a8", {}, max_gather_bytes=1, max_scores_bytes=1
        )


def test_the_flag_reaches_the_engine() -> None:
    found = parse(["--model", str(MODEL), "--quantization", "w8a8"], {})
    assert found.engine.quantization == "w8a8"


@pytest.mark.parametrize("quantization", [None, "w8a8"])
def test_a_started_worker_holds_no_second_copy_of_its_weights(
    tmp_path: Path, quantization: Quantization | None
) -> None:
    sizes = {"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 8}
    heads = {"num_attention_heads": 12, "num_key_value_heads": 4, "max_position_embeddings": 128}
    config = {"architectures": ["LlamaForCausalLM"], "vocab_size": 512, **sizes, **heads}
    (tmp_path / "config.json").write_text(json.dumps(config))
    before = Resources().resident_bytes(os.getpid())
    engine, ready = start(
        EngineConfig(
            str(tmp_path),
            dtype="bfloat16",
            load_format="dummy",
            quantization=quantization,
            max_num_seqs=1,
            max_num_batched_tokens=16,
        ),
        lambda phase, percent: None,
    )
    grown = Resources().resident_bytes(os.getpid()) - before
    weights = ready.memory.measured["weights_bytes"]
    assert weights == pytest.approx(ready.memory.planned["weights_bytes"], rel=0.01)
    assert grown < 1.2 * weights + (24 << 20)
    assert engine.runner.model.num_bytes == weights
