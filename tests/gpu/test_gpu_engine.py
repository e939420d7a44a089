"""A whole engine on Triton kernels writes the tokens of the plain one; on a GPU by CUDA graphs."""

import pytest
import torch
from gpu.paged import DEVICE
from sluice_core.port import EngineLimits
from sluice_core.steptime import StepTimes
from sluice_core.wire import Submit, packed
from sluice_core.work import Sampling
from sluice_kernels.plain import PlainKernels
from sluice_kernels.triton.kernels import TritonKernels
from sluice_worker.engine.loop import Engine
from sluice_worker.execution.gpu.runner import GpuRunner
from sluice_worker.execution.models.config import DecoderConfig
from sluice_worker.execution.models.decoder import Decoder
from sluice_worker.execution.runner import Runner
from sluice_worker.execution.weights import random_weights
from sluice_worker.scheduling.blocks import BlockPool
from sluice_worker.scheduling.scheduler import Scheduler

SMALL = {
    "vocab_size": 199,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
}
MODELS: dict[str, dict[str, object]] = {
    "llama": {"architectures": ["LlamaForCausalLM"], "model_type": "llama"},
    "qwen3": {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"},
    "gemma2": {
        "architectures": ["Gemma2ForCausalLM"],
        "model_type": "gemma2",
        "sliding_window": 9,
        "attn_logit_softcapping": 2.0,
        "final_logit_softcapping": 8.0,
        "query_pre_attn_scalar": 12,
        "tie_word_embeddings": True,
    },
}


def outputs(engine: Engine) -> dict[str, list[int]]:
    """Three requests of which the last arrives late and needs the host to sample."""
    found: dict[str, list[int]] = {}
    for turn in range(100):
        if turn in (0, 1, 3):
            name = str(turn)
            prompt = [(7 * turn + i * i) % 199 for i in range(4 + 6 * turn)]
            found[name] = []
            biased = Sampling(logit_bias={3: 1.0}) if turn == 3 else Sampling()
            request = Submit(name, packed(prompt), 4, 0.0, 0, True, [], 0, 0.0, sampling=biased)
            engine.submit(request, 0.0)
        report, failed = engine.step() if engine.has_work else (None, [])
        assert failed == []
        for token in report.tokens if report else ():
            found[token.request_id].append(token.token_id)
    return found


@pytest.mark.parametrize("name", MODELS)
def test_engine_on_triton_writes_the_plain_engines_tokens(name: str) -> None:
    config = DecoderConfig.from_json({**SMALL, **MODELS[name]})
    read = random_weights(3, torch.float32, DEVICE)
    plain = Runner(Decoder(config, read, PlainKernels(1 << 20, 1 << 20)), 16, 16, frozenset())
    read = random_weights(3, torch.float32, DEVICE)
    on_triton = Decoder(config, read, TritonKernels(2, 1))
    sizes = {"ceiling": 4, "max_model_len": 128, "activation_bytes": 1 << 20}
    triton = GpuRunner(on_triton, 16, 16, frozenset(), **sizes)
    found = []
    for runner, num_ahead in ((plain, 0), (triton, 1)):
        pool = BlockPool(16, 16, prefix_caching=True)
        limits = EngineLimits(0, 4, 18)
        scheduler = Scheduler(pool, limits, max_model_len=128, vocab_size=199, num_ahead=num_ahead)
        found.append(outputs(Engine(scheduler, runner, StepTimes())))
    assert found[0] == found[1]
    captures = DEVICE.type == "cuda" and config.shape.experts is None
    assert sorted(triton._decodes._graphs) == ([1, 2, 4] if captures else [])
    assert all(len(tokens) == 4 for tokens in found[0].values())
