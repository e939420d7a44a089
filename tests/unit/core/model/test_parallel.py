"""A model over several GPUs: each GPU's share, against the figures of published models."""

from dataclasses import replace
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sluice_core.model.parallel import COLLECTIVE_BYTES, ONE_GPU, Indivisible, Layout, ranks
from sluice_core.model.parallel import stage_layers as layers_of
from sluice_core.model.sizing import (
    GIB,
    MemoryPlan,
    MemoryRequest,
    ModelShape,
    advice,
    bytes_saved,
    fewest_gpus,
    host_memory_bytes,
    kv_bytes_per_token,
    plan_memory,
    weights_bytes,
)

LLAMA_70B: dict[str, object] = {
    "architectures": ["LlamaForCausalLM"],
    "num_hidden_layers": 80,
    "hidden_size": 8192,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "intermediate_size": 28672,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "torch_dtype": "bfloat16",
}
SHAPE = ModelShape.from_config(LLAMA_70B)
STORED = 141_107_412_992
"""total_size of the published index."""
MOE = ModelShape.from_config(
    {
        "architectures": ["Qwen3MoeForCausalLM"],
        "num_hidden_layers": 48,
        "hidden_size": 2048,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_experts": 128,
        "vocab_size": 151936,
        "max_position_embeddings": 40960,
        "torch_dtype": "bfloat16",
    }
)


def request(
    layout: Layout = ONE_GPU,
    *,
    total: int = 80 * GIB,
    weights: int = STORED,
    length: int = 8192,
    device: Literal["cpu", "cuda"] = "cuda",
    kv_dtype_bytes: int | None = None,
) -> MemoryRequest:
    return MemoryRequest(
        total_bytes=total,
        utilization=0.9,
        weights_bytes=weights,
        max_num_batched_tokens=2048,
        max_model_len=length,
        block_size=16,
        dtype_bytes=2,
        max_num_seqs=None,
        device=device,
        layout=layout,
        kv_dtype_bytes=kv_dtype_bytes,
    )


def plan(layout: Layout = ONE_GPU, shape: ModelShape = SHAPE, **changes: int) -> MemoryPlan:
    return plan_memory(shape, request(layout, **changes))  # type: ignore[arg-type]


def test_the_shape_alone_says_what_the_published_index_says() -> None:
    assert weights_bytes(SHAPE, 2) == STORED


@pytest.mark.parametrize(
    ("tensor", "weights_gib", "kv_bytes"),
    [
        (1, 131.4, 327_680),
        (2, 65.7, 163_840),
        (4, 32.9, 81_920),
        (8, 16.4, 40_960),
        (16, 8.4, 40_960),  # each head is stored twice
    ],
)
def test_llama_70b_is_divided_as_engines_do(tensor: int, weights_gib: float, kv_bytes: int) -> None:
    shared = plan(Layout(tensor=tensor))
    assert round(shared.weights_bytes / GIB, 1) == weights_gib
    assert shared.kv_bytes_per_token == kv_bytes
    assert shared.reserve_bytes == (COLLECTIVE_BYTES if tensor > 1 else 0)


def test_fp8_keys_and_values_take_half() -> None:
    assert plan(Layout(tensor=4), kv_dtype_bytes=1).kv_bytes_per_token == 40_960


@pytest.mark.parametrize(
    ("num_layers", "stages", "vllm", "sglang"),
    [
        (80, 2, [40, 40], [40, 40]),
        (81, 2, [41, 40], [40, 41]),
        (32, 3, [11, 11, 10], [10, 11, 11]),
        (61, 4, [15, 15, 16, 15], [15, 15, 15, 16]),
        (62, 4, [15, 16, 16, 15], [15, 15, 16, 16]),
        (63, 4, [16, 16, 16, 15], [15, 16, 16, 16]),
        (3, 3, [1, 1, 1], [1, 1, 1]),
    ],
)
def test_layers_that_are_left_over_go_where_the_engine_puts_them(
    num_layers: int, stages: int, vllm: list[int], sglang: list[int]
) -> None:
    assert layers_of(num_layers, Layout(pipeline=stages)) == vllm
    assert layers_of(num_layers, Layout(pipeline=stages, rest_last=True)) == sglang


def test_the_plan_is_of_the_stage_with_least_room() -> None:
    """The last has head and logits; with one layer more, the first is the fuller."""
    even = plan(Layout(pipeline=2))
    assert even.stage == 2
    assert even.explain().startswith("GPU of stage 2 of 2: 0.9 x 80.0 GiB - weights 65.7 GiB")
    odd = replace(SHAPE, num_layers=81)
    stored = weights_bytes(odd, 2)
    assert plan_memory(odd, request(Layout(pipeline=2), weights=stored)).stage == 1
    last = Layout(pipeline=2, rest_last=True)
    assert plan_memory(odd, request(last, weights=stored)).stage == 2
    both = plan(Layout(tensor=4, pipeline=2))
    assert both.explain().startswith("GPU of stage 2 of 2, tensor parallel 4: 0.9 x")
    assert plan(Layout(tensor=4)).explain().startswith("Each GPU, tensor parallel 4: 0.9 x")
    assert plan().explain().startswith("0.9 x 80.0 GiB - weights 131.4 GiB")


def test_only_the_last_stage_has_logits() -> None:
    stages = [rank.shape.vocab_size for rank in ranks(SHAPE, Layout(pipeline=3))]
    assert stages == [0, 0, 128256]


def test_logits_and_the_residual_stream_are_whole_on_each_gpu() -> None:
    logits = 256 * 128256 * 10
    norm = (2 * 2 + 4) * 8192
    for tensor in (1, 2, 8):
        qkv = (64 + 2 * 8) // tensor * 128
        widest = max(2 * qkv + 64 // tensor * 128, 3 * 28672 // tensor)
        assert plan(Layout(tensor=tensor)).activation_bytes == logits + 2048 * (norm + 2 * widest)


def test_experts_are_divided_and_their_router_is_not() -> None:
    stored = weights_bytes(MOE, 2)
    router = 48 * 128 * 2048 * 2
    (half,) = ranks(MOE, Layout(tensor=2))
    assert abs(half.weights_bytes(stored, 2) - (stored + router) / 2) < 1e-3 * stored


def test_a_vocabulary_is_padded_before_it_is_divided() -> None:
    odd = replace(SHAPE, vocab_size=100, num_layers=1)
    (rank,) = ranks(odd, Layout(tensor=8))
    rows = 2 * (128 // 8) * 8192 * 2
    layers = weights_bytes(odd, 2) - 2 * 100 * 8192 * 2
    assert rows < rank.weights_bytes(weights_bytes(odd, 2), 2) < rows + 1.01 * layers / 8


@pytest.mark.parametrize(
    ("layout", "shape", "why"),
    [
        (Layout(tensor=3), SHAPE, "tensor parallel 3 does not divide num_attention_heads 64."),
        (Layout(tensor=5), replace(MOE, num_heads=40), "does not divide the experts' width 768."),
        (Layout(tensor=4), replace(SHAPE, intermediate_size=30), "intermediate_size 30."),
        (Layout(tensor=4), replace(SHAPE, num_heads=12, num_kv_heads=6), "num_key_value_heads 6."),
        (Layout(pipeline=81), SHAPE, "pipeline parallel 81 is over num_hidden_layers 80."),
    ],
)  # fmt: skip
def test_what_no_engine_can_divide_is_refused(layout: Layout, shape: ModelShape, why: str) -> None:
    with pytest.raises(Indivisible) as refused:
        plan_memory(shape, request(layout))
    assert str(refused.value).endswith(why)


def test_advice_names_the_fewest_gpus_that_are_enough() -> None:
    long = request(length=32768)
    assert fewest_gpus(SHAPE, request()) == 2
    assert fewest_gpus(SHAPE, long) == 4  # two hold the weights, but no sequence
    tight, roomy = plan(Layout(tensor=2), length=32768), plan(Layout(tensor=4), length=32768)
    assert (tight.fits, roomy.fits) == (False, True)
    said = advice(tight, SHAPE, 4)
    assert " or 4 GPUs or GPUs of 8" in said
    assert advice(plan(length=32768), SHAPE) == "It would fit with a GPU of 158.8 GiB."
    assert fewest_gpus(SHAPE, replace(long, layout=Layout(pipeline=2))) == 4
    assert fewest_gpus(SHAPE, request(total=8 * GIB)) is None
    assert fewest_gpus(SHAPE, request(device="cpu")) is None
    assert fewest_gpus(replace(SHAPE, num_heads=63, num_kv_heads=63), long) is None


def test_each_gpu_of_a_pod_loads_through_a_process_of_its_own() -> None:
    widest = 128256 * 8192 * 2
    assert host_memory_bytes(SHAPE, 2, 4) >= 4 * (3 * GIB + widest)
    assert host_memory_bytes(SHAPE, 2, 1) == host_memory_bytes(SHAPE, 2)


def test_weights_that_an_engine_quantises_as_it_loads_are_smaller_but_for_the_tables() -> None:
    tables = 2 * 128256 * 8192
    linear = STORED // 2 - tables
    for method, bits in (("fp8", 8), ("bitsandbytes", 4.5)):
        kept = STORED - bytes_saved(SHAPE, "bfloat16", method)
        assert kept == pytest.approx(2 * tables + linear * bits / 8, rel=1e-3)


SHAPES = st.builds(
    lambda layers, kv, group, dim, width, vocab, tied: replace(
        SHAPE,
        num_layers=layers,
        hidden_size=64 * kv * group,
        num_heads=kv * group,
        num_kv_heads=kv,
        head_dim=dim,
        intermediate_size=width * 16,
        vocab_size=vocab,
        tie_word_embeddings=tied,
    ),
    st.integers(1, 96),
    st.sampled_from([1, 2, 4, 8, 16]),
    st.sampled_from([16, 32]),
    st.sampled_from([64, 80, 128]),
    st.integers(1, 2000),
    st.integers(1, 300_000),
    st.booleans(),
)
TENSORS = st.sampled_from([1, 2, 4, 8, 16])


@given(SHAPES, TENSORS, st.integers(1, 8), st.booleans(), st.floats(0.25, 1.5))
def test_all_parts_together_are_no_less_than_the_whole(
    shape: ModelShape, tensor: int, pipeline: int, last: bool, stored: float
) -> None:
    """Also for weights that are stored smaller than the shape says."""
    pipeline = min(pipeline, shape.num_layers)
    whole = int(stored * weights_bytes(shape, 2))
    parts = list(ranks(shape, Layout(tensor=tensor, pipeline=pipeline, rest_last=last)))
    assert sum(tensor * part.weights_bytes(whole, 2) for part in parts) >= whole * 0.9999
    kept = sum(tensor * kv_bytes_per_token(part.shape, 2) for part in parts)
    assert kept >= kv_bytes_per_token(shape, 2)
    assert sum(part.shape.num_layers for part in parts) == shape.num_layers


@given(SHAPES, st.sampled_from([1, 2, 4, 8]), st.floats(0.25, 1.5))
def test_more_gpus_never_make_a_share_larger(shape: ModelShape, tensor: int, stored: float) -> None:
    tables = (1 if shape.tie_word_embeddings else 2) * shape.vocab_size * shape.hidden_size * 2
    weights = int(tables + stored * (weights_bytes(shape, 2) - tables))
    one, more = (
        plan_memory(shape, request(Layout(tensor=each), weights=weights))
        for each in (tensor, 2 * tensor)
    )
    padding = 2 * 64 * shape.hidden_size * 2
    assert more.weights_bytes <= one.weights_bytes + padding
    assert more.kv_bytes_per_token <= one.kv_bytes_per_token
    assert more.activation_bytes <= one.activation_bytes


@given(SHAPES, st.integers(1, 1 << 40))
def test_one_gpu_has_all(shape: ModelShape, stored: int) -> None:
    (rank,) = ranks(shape, ONE_GPU)
    assert rank.shape == shape
    assert rank.weights_bytes(stored, 2) == stored
