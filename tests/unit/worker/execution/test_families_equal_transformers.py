"""Each architecture against transformers on a small random model: logits, greedy tokens, batching.

The reference is one forward of transformers over prompt and output together: if its best token at
each place is the one that was produced there, its greedy output is the same.
"""

from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from sluice_core.errors import UnsupportedModel
from sluice_core.model.files import read_json
from sluice_core.model.sizing import ModelShape, kv_bytes_per_token, resolve_dtype, weights_bytes
from sluice_worker.base.config import EngineConfig
from sluice_worker.engine.startup import start
from sluice_worker.execution.models.decoder import Decoder
from sluice_worker.execution.runner import Runner
from sluice_worker.scheduling.sequence import Sequence
from sluice_worker.scheduling.step import StepWork
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from unit.worker.engine.factories import (
    PLAIN,
    best_kernels,
    create_engine_of,
    create_request,
    create_requests,
    create_scheduler,
    load_decoder,
    run_all,
    small_config,
)

LENGTHS = (1, 17, 30, 40, 70)
STEPS = 20
WINDOW = 21  # ends within a page of 16
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0, 1.1, 1.3, 1.5],
    "long_factor": [1.0, 2.0, 4.0, 8.0],
}
GEMMA = {
    "head_dim": 24,
    "query_pre_attn_scalar": 48,
    "sliding_window": WINDOW,
    "tie_word_embeddings": True,
}
MOE = {
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 40,
    "head_dim": 12,
}
MODELS: dict[str, dict[str, object]] = {
    "llama-yarn": {
        "rope_parameters": {**YARN, "original_max_position_embeddings": 64},
        "max_position_embeddings": 256,
    },
    "llama-yarn-mscale": {
        "rope_parameters": {
            **YARN,
            "mscale": 0.7,
            "mscale_all_dim": 0.4,
            "beta_fast": 8.0,
            "beta_slow": 2.0,
            "truncate": False,
            "original_max_position_embeddings": 128,
        }
    },
    "llama-dynamic": {
        "rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}
    },
    "mistral": {"sliding_window": WINDOW, "head_dim": 16},
    "qwen2": {"tie_word_embeddings": True},
    "qwen2-late-window": {
        "use_sliding_window": True,
        "sliding_window": WINDOW,
        "max_window_layers": 1,
    },
    "qwen3": {"head_dim": 24, "tie_word_embeddings": True},
    "qwen3-bias": {"head_dim": 24, "attention_bias": True},
    "gemma2": {**GEMMA, "attn_logit_softcapping": 5.0, "final_logit_softcapping": 8.0},
    "gemma3_text": {
        **GEMMA,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
    },
    "phi3": {"sliding_window": WINDOW},
    "phi3-longrope-short": {
        "rope_parameters": LONGROPE,
        "original_max_position_embeddings": 128,
    },
    "phi3-longrope-long": {
        "rope_parameters": LONGROPE,
        "original_max_position_embeddings": 20,
    },
    "phi3-partial": {
        "rope_parameters": {
            **LONGROPE,
            "partial_rotary_factor": 0.75,
            "short_factor": [1.0, 1.1, 1.3],
            "long_factor": [1.0, 2.0, 4.0],
        },
        "original_max_position_embeddings": 20,
    },
    "mixtral": {"num_local_experts": 5, "num_experts_per_tok": 2, "sliding_window": WINDOW},
    "qwen3_moe": {**MOE, "norm_topk_prob": True},
    "qwen3_moe-mixed": {**MOE, "norm_topk_prob": False, "mlp_only_layers": [1]},
}


@dataclass(frozen=True)
class Pair:
    """One model: transformers', and ours of the checkpoint that transformers wrote.

    `ours` in plain torch; `fast` with the kernels that a worker would choose on this machine.
    """

    theirs: PreTrainedModel
    ours: Decoder
    fast: Decoder
    lengths: tuple[int, ...]

    def logits(self, tokens: list[int]) -> Tensor:
        with torch.inference_mode():
            found: Tensor = self.theirs(torch.tensor([tokens])).logits[0].float()
        return found


@pytest.fixture(scope="module", params=MODELS)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    name: str = request.param
    path = tmp_path_factory.mktemp(name)
    theirs = save_random(path, name.partition("-")[0], MODELS[name])
    # transformers takes longrope's short factors for what is short, so what is long goes alone.
    is_long, is_short = (name == f"phi3-{kind}" for kind in ("longrope-long", "longrope-short"))
    lengths = LENGTHS[2:] if is_long or name == "phi3-partial" else LENGTHS
    max_model_len = 128 if is_short else 512
    ours = load_decoder(path, max_model_len)
    return Pair(theirs, ours, load_decoder(path, max_model_len, kernels=best_kernels()), lengths)


def save_random(path: Path, model_type: str, changes: dict[str, object]) -> PreTrainedModel:
    """All weights are random, also of norms and biases, which transformers makes constants."""
    torch.manual_seed(11)
    config = AutoConfig.for_model(model_type, **small_config(changes))
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter += 0.3 * torch.randn_like(parameter)
    is_sharded = "num_experts_per_tok" in changes
    model.save_pretrained(path, max_shard_size="200KB" if is_sharded else "5GB")
    assert (path / "model.safetensors.index.json").exists() == is_sharded
    return model


def logits_in_chunks(model: Decoder, prompt: list[int], bounds: tuple[int, ...]) -> Tensor:
    """Logits of all places, computed chunk by chunk over pages in no order."""
    runner = Runner(model, 16, 16, frozenset())
    sequence = Sequence(create_request("r", prompt), seed=0, token_ids=prompt)
    sequence.block_ids = [7, 2, 9, 0, 12, 5]
    found = []
    for begin, end in pairwise(bounds):
        step = runner.build([StepWork(sequence, begin, end - begin, samples=True)])
        step = replace(step, sampled_rows=torch.arange(end - begin))
        with torch.inference_mode():
            found.append(model.logits(model.hidden(step, runner.caches)[step.sampled_rows]))
    return torch.cat(found)


@pytest.mark.parametrize("bounds", [(0, 90), (0, 33, 34, 50, 51, 52, 90)], ids=["whole", "chunks"])
def test_logits_equal_transformers(pair: Pair, bounds: tuple[int, ...]) -> None:
    prompt = create_request("logits", 90).prompt_token_ids
    for model in (pair.ours, pair.fast):
        found = logits_in_chunks(model, prompt, bounds)
        torch.testing.assert_close(found, pair.logits(prompt), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("is_fast", [False, True], ids=["plain", "fast"])
def test_greedy_tokens_equal_transformers_however_they_are_batched(
    pair: Pair, is_fast: bool
) -> None:
    requests = create_requests(pair.lengths, max_tokens=STEPS)
    model = pair.fast if is_fast else pair.ours
    alone = run_all(
        create_engine_of(model, create_scheduler(cap=1, budget=512, prefix_caching=False)),
        requests,
    )
    for request in requests:
        output = alone[request.request_id]
        logits = pair.logits(request.prompt_token_ids + output)
        assert logits.argmax(dim=-1)[-1 - STEPS : -1].tolist() == output
    batched = create_scheduler(cap=4, budget=19, block_size=4, num_blocks=128)
    assert run_all(create_engine_of(model, batched), requests) == alone
    preempting = create_scheduler(num_blocks=6, max_model_len=96)
    assert run_all(create_engine_of(model, preempting), requests) == alone
    assert preempting.counters.num_preemptions > 0


@pytest.mark.parametrize("name", ["mistral", "qwen3", "gemma2", "gemma3_text", "qwen3_moe"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_strays_from_float32_no_further_than_transformers(
    tmp_path: Path, name: str, dtype: torch.dtype
) -> None:
    theirs = save_random(tmp_path, name, {**MODELS[name], "initializer_range": 0.08})
    prompt = create_request("logits", 60).prompt_token_ids
    single = load_decoder(tmp_path)
    exact = Pair(theirs, single, single, ()).logits(prompt)
    half = tmp_path / "half"
    theirs.to(dtype).save_pretrained(half)
    if dtype == torch.float16 and name.startswith("gemma"):
        with pytest.raises(UnsupportedModel, match="float16 overflows"):
            start(EngineConfig(model=str(half), dtype="float16"), lambda phase, percent: None)
        return
    assert getattr(torch, resolve_dtype("auto", shape_of(half), on_cpu=False)) == dtype
    ours, fast = (load_decoder(half, dtype=dtype, kernels=k) for k in (PLAIN, best_kernels(dtype)))
    # Not `theirs` itself, whose rotary frequencies have lost their precision.
    reread = AutoModelForCausalLM.from_pretrained(half, dtype=dtype, attn_implementation="eager")
    theirs_strayed = Pair(reread, ours, fast, ()).logits(prompt) - exact
    for model in (ours, fast):
        strayed = logits_in_chunks(model, prompt, (0, 33, 34, 60)) - exact
        # Most rows, not all: one whose experts change by a hair strays by a mile, in either.
        assert strayed.norm(dim=1).median() <= 1.2 * theirs_strayed.norm(dim=1).median()


@pytest.mark.parametrize("name", MODELS)
def test_memory_is_planned_as_it_is_held(tmp_path: Path, name: str) -> None:
    theirs = save_random(tmp_path, name.partition("-")[0], MODELS[name])
    shape, model = shape_of(tmp_path), load_decoder(tmp_path)
    assert weights_bytes(shape, 4) == 4 * sum(p.numel() for p in theirs.parameters())
    repeated = shape.num_layers * (shape.num_heads + shape.num_kv_heads - 2) * shape.head_dim
    assert model.num_bytes == weights_bytes(shape, 4) + 4 * repeated * shape.family.qk_norm
    runner = Runner(model, 15, 16, frozenset())  # and one block more, which pads
    assert runner.num_bytes == 16 * 16 * kv_bytes_per_token(shape, 4)


def shape_of(path: Path) -> ModelShape:
    return ModelShape.from_config(read_json(path, "config.json"))
