"""Greedy output equals transformers' token for token, whatever the batching."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from sluice_core.wire import Submit
from transformers import LlamaForCausalLM
from unit.worker.engine.factories import (
    PLAIN,
    VOCAB,
    create_engine,
    create_engine_of,
    create_request,
    create_requests,
    create_scheduler,
    load_decoder,
    run_all,
    save_llama,
)

LENGTHS = (1, 15, 16, 17, 63, 64, 65, 130, 300)
STEPS = 64


def reference(model: LlamaForCausalLM, requests: list[Submit]) -> dict[str, list[int]]:
    outputs = {}
    for request in requests:
        prompt = torch.tensor([request.prompt_token_ids])
        with torch.inference_mode():
            tokens = model.generate(
                prompt,
                attention_mask=torch.ones_like(prompt),
                max_new_tokens=request.max_tokens,
                do_sample=False,
                pad_token_id=0,
            )
        outputs[request.request_id] = tokens[0, prompt.shape[1] :].tolist()
    return outputs


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("llama")
    save_llama(path)
    return path


@pytest.fixture(scope="module")
def expected(checkpoint: Path) -> dict[str, list[int]]:
    model = LlamaForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    return reference(model, create_requests(LENGTHS, max_tokens=STEPS))


def test_mixed_batch_equals_transformers(checkpoint: Path, expected: dict[str, list[int]]) -> None:
    engine = create_engine(checkpoint, create_scheduler(num_blocks=128, cap=4, budget=48))
    assert run_all(engine, create_requests(LENGTHS, max_tokens=STEPS)) == expected


def test_rows_that_kernels_ask_for_change_no_token(
    checkpoint: Path, expected: dict[str, list[int]]
) -> None:
    model = load_decoder(checkpoint, kernels=replace(PLAIN, round_rows=lambda num: num + 3))
    engine = create_engine_of(model, create_scheduler(num_blocks=128, cap=4, budget=48))
    assert run_all(engine, create_requests(LENGTHS, max_tokens=STEPS)) == expected


@pytest.mark.parametrize(("cap", "budget", "block_size"), [(1, 512, 16), (9, 7, 4), (9, 512, 64)])
def test_caps_budgets_and_block_sizes_change_no_token(
    checkpoint: Path, expected: dict[str, list[int]], cap: int, budget: int, block_size: int
) -> None:
    scheduler = create_scheduler(
        num_blocks=4096 // block_size, cap=cap, budget=budget, block_size=block_size
    )
    outputs = run_all(
        create_engine(checkpoint, scheduler), create_requests(LENGTHS, max_tokens=STEPS)
    )
    assert outputs == expected


@pytest.mark.parametrize("prefix_caching", [True, False])
def test_preempted_output_equals_unpreempted(
    checkpoint: Path, expected: dict[str, list[int]], prefix_caching: bool
) -> None:
    scheduler = create_scheduler(num_blocks=24, prefix_caching=prefix_caching, policy="fcfs")
    engine = create_engine(checkpoint, scheduler)
    outputs = run_all(engine, create_requests(LENGTHS, max_tokens=STEPS))
    assert scheduler.counters.num_preemptions > 0
    assert scheduler.counters.preempted_tokens > 0
    assert outputs == expected


def test_prefix_hits_change_no_token(checkpoint: Path, expected: dict[str, list[int]]) -> None:
    engine = create_engine(checkpoint, create_scheduler(num_blocks=128))
    requests = create_requests(LENGTHS, max_tokens=STEPS)
    run_all(engine, requests)
    cold_hits = engine.scheduler.counters.prefix_hits
    assert run_all(engine, requests) == expected
    assert engine.scheduler.counters.prefix_hits >= cold_hits + 300 // 16 * 16


def test_a_prefix_that_a_burst_shares_changes_no_token(checkpoint: Path) -> None:
    shared = [(7 * i * i + i) % VOCAB for i in range(150)]
    requests = [create_request(str(i), [*shared, *range(i, 40 + i)], max_tokens=STEPS)
                for i in range(6)]  # fmt: skip
    apart = create_engine(checkpoint, create_scheduler(num_blocks=128, prefix_caching=False))
    together = create_engine(checkpoint, create_scheduler(num_blocks=128, cap=6, budget=256))
    assert run_all(together, requests) == run_all(apart, requests)
    assert together.scheduler.counters.prefix_hits >= 5 * 144


@pytest.mark.parametrize(
    "changes",
    [
        {"tie_word_embeddings": True},
        {"num_key_value_heads": 8, "head_dim": 32},
        {"attention_bias": True, "mlp_bias": True},
        {"sharded": True},
        {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 500.0}},
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 10000.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 128,
            }
        },
    ],
    ids=["tied", "multi-head", "biases", "sharded", "rope-linear", "rope-llama3"],
)
def test_each_member_of_the_family_equals_transformers(
    tmp_path: Path, changes: dict[str, object]
) -> None:
    model = save_llama(tmp_path, **changes)
    for name, parameter in model.named_parameters():  # biases start as zeros
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter, std=0.2)
    if changes.get("attention_bias"):
        model.save_pretrained(tmp_path)
    requests = create_requests((1, 17, 65, 130), max_tokens=24)
    engine = create_engine(tmp_path, create_scheduler())
    assert run_all(engine, requests) == reference(model, requests)
    assert (tmp_path / "model.safetensors.index.json").exists() == bool(changes.get("sharded"))
