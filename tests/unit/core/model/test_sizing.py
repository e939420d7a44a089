"""The memory arithmetic, against figures that others published for known models."""

import re
from dataclasses import replace
from math import ceil
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sluice_core.model.sizing import (
    CPU_RESERVE_BYTES,
    GIB,
    MAX_CEILING,
    MIB,
    STATISTICAL_Z,
    WORKSPACE_BYTES,
    MemoryPlan,
    MemoryRequest,
    ModelShape,
    SizingError,
    advice,
    carried_sequences,
    kv_bytes_per_token,
    most_sequences,
    overflow_share,
    plan_memory,
    resolve_dtype,
    safetensors_header_bytes,
    weights_bytes,
)
from sluice_kernels.triton.decode import MIN_SPLITS, choose_splits

LLAMA_8B: dict[str, object] = {
    "architectures": ["LlamaForCausalLM"],
    "num_hidden_layers": 32,
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "torch_dtype": "bfloat16",
}
SHAPE = ModelShape.from_config(LLAMA_8B)


def plan(
    *,
    total: int = 80 * GIB,
    utilization: float = 0.9,
    weights: int = 16_060_522_496,
    max_model_len: int = 8192,
    max_num_seqs: int | None = None,
    device: Literal["cpu", "cuda"] = "cuda",
    shape: ModelShape = SHAPE,
    dtype_bytes: int = 2,
    num_blocks: int | None = None,
    measured_activations: int = 0,
    in_a_row: bool = False,
    gathers: bool | None = None,
    budget: int = 2048,
) -> MemoryPlan:
    return plan_memory(
        shape,
        MemoryRequest(
            total_bytes=total,
            utilization=utilization,
            weights_bytes=weights,
            max_num_batched_tokens=budget,
            max_model_len=max_model_len,
            block_size=16,
            dtype_bytes=dtype_bytes,
            max_num_seqs=max_num_seqs,
            device=device,
            gathers=gathers,
            num_blocks=num_blocks,
            measured_activation_bytes=measured_activations,
            in_a_row=in_a_row,
        ),
    )


def test_llama_8b_has_the_published_kv_bytes_and_weights() -> None:
    assert kv_bytes_per_token(SHAPE, 2) == 128 << 10
    assert weights_bytes(SHAPE, 2) == 16_060_522_496  # total_size of the published index


def test_llama_8b_on_80_gib_carries_about_440k_tokens() -> None:
    fitted = plan()
    assert fitted.fits
    assert 420_000 < fitted.kv_tokens < 480_000
    assert fitted.guaranteed_seqs == fitted.kv_tokens // 8192
    assert fitted.ceiling == MAX_CEILING


def test_a_gpu_has_room_for_what_the_splits_of_a_full_batch_find() -> None:
    one, full = (plan(max_num_seqs=count).workspace_bytes for count in (1, 256))
    row_bytes = 32 * (128 + 2) * 4  # float32: each head's values, weight and peak
    for count in (1, 8, 64, 256):
        kept = count * choose_splits(count, 8, 132).num * row_bytes
        assert kept <= plan(max_num_seqs=count).workspace_bytes - WORKSPACE_BYTES["cuda"] + 2 * MIB
    assert full - one == 255 * MIN_SPLITS * row_bytes
    on_cpu = plan(device="cpu", gathers=False)
    assert on_cpu.workspace_bytes == WORKSPACE_BYTES["cpu"]


def test_70b_on_4_gib_does_not_fit_and_says_what_would() -> None:
    big = replace(SHAPE, num_layers=80, hidden_size=8192, num_heads=64, intermediate_size=28672)
    refused = plan(total=4 * GIB, weights=141 * GIB, device="cpu", shape=big)
    assert not refused.fits
    assert refused.ceiling == 0
    assert "weights 141.0 GiB" in refused.explain()
    assert "of memory instead of 4.0 GiB" in advice(refused, big)
    assert advice(plan(weights=141 * GIB), SHAPE).endswith("a GPU of 159.1 GiB.")


@pytest.mark.parametrize("weights_mib", range(3000, 9000, 377))
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_memory_that_is_advised_is_enough(
    weights_mib: int, device: Literal["cpu", "cuda"]
) -> None:
    weights = weights_mib << 20
    found = re.search(
        r"([\d.]+) GiB( of|\.)", advice(plan(total=2 * GIB, weights=weights, device=device), SHAPE)
    )
    assert found
    assert plan(total=int(float(found[1]) * GIB), weights=weights, device=device).fits


def test_advice_names_a_window_that_then_fits() -> None:
    tight = plan(total=20 * GIB, max_model_len=131072)
    assert not tight.fits
    assert f"max_model_len {tight.kv_tokens}" in advice(tight, SHAPE)
    assert plan(total=20 * GIB, max_model_len=tight.kv_tokens).fits


def test_a_fixed_number_of_blocks_must_fit_too() -> None:
    most = plan().num_blocks
    assert plan(num_blocks=most).ceiling == plan().ceiling
    over = plan(num_blocks=2 * most)
    assert not over.fits
    bytes_needed = (over.fixed_bytes + over.kv_tokens * over.kv_bytes_per_token) / 0.9
    size = ceil(10 * bytes_needed / GIB) / 10
    assert f"with {most} blocks or a GPU of {size:.1f} GiB" in advice(over, SHAPE)
    assert not plan(total=4 * GIB, num_blocks=most).fits


def test_where_too_few_blocks_were_fixed_no_memory_is_advised() -> None:
    few = plan(num_blocks=100, max_model_len=8192)
    assert not few.fits
    assert advice(few, SHAPE) == "It would fit with max_model_len 1600 or 512 blocks."
    assert plan(num_blocks=512).fits


@pytest.mark.parametrize("utilization", [0.05, 0.1, 0.2])
def test_the_share_that_is_advised_is_enough_and_no_more(utilization: float) -> None:
    said = advice(plan(utilization=utilization), SHAPE)
    found = re.search(r"gpu_memory_utilization ([\d.]+) or a GPU", said)
    assert found, said
    assert plan(utilization=float(found[1])).fits
    assert not plan(utilization=float(found[1]) - 0.01).fits


def test_no_share_is_advised_that_leaves_the_machine_nothing() -> None:
    assert "utilization" not in advice(plan(total=4 * GIB), SHAPE)


def test_advice_names_bfloat16_only_where_it_helps() -> None:
    full = plan(total=26 * GIB, weights=2 * 16_060_522_496, dtype_bytes=4)
    assert "bfloat16" in advice(full, SHAPE)
    assert "bfloat16" not in advice(plan(total=10 * GIB), SHAPE)


def test_small_model_in_a_1_gib_pod_fits_beside_the_reserve() -> None:
    small = replace(SHAPE, num_layers=6, hidden_size=256, num_heads=8, num_kv_heads=4, head_dim=32)
    small = replace(small, intermediate_size=704, vocab_size=2048, max_position=512)
    fitted = plan(total=GIB, weights=16 * MIB, max_model_len=512, device="cpu", shape=small)
    assert fitted.fits
    assert fitted.reserve_bytes == CPU_RESERVE_BYTES
    assert sum(fitted.as_dict().values()) - fitted.total_bytes <= fitted.usable_bytes


def test_no_more_sequences_than_tokens_of_a_step() -> None:
    assert plan(budget=16).ceiling == 16


def test_layers_in_a_row_leave_more_for_the_kv_cache() -> None:
    # Stream, what is added to it, a row's norm and the MLP: (3 * 4096 + 14336) * 2 bytes a token.
    apart, in_a_row = plan(device="cpu"), plan(device="cpu", in_a_row=True, gathers=False)
    logits = MAX_CEILING * 128256 * 10
    assert in_a_row.activation_bytes == 2048 * 2 * (3 * 4096 + 14336) + logits
    assert in_a_row.activation_bytes < apart.activation_bytes
    assert in_a_row.workspace_bytes < apart.workspace_bytes
    assert in_a_row.kv_tokens > apart.kv_tokens


def test_kernels_that_read_pages_where_they_lie_leave_more_for_the_kv_cache() -> None:
    gathering = plan(max_model_len=131072, gathers=True)
    reading = plan(max_model_len=131072)
    # A sequence's keys and values of one of 32 layers, and a chunk's mask over all its past.
    taken = (131072 << 17) // 32 + 2048 * 131072 * 2
    assert taken == GIB
    splits = MAX_CEILING * 32 * MIN_SPLITS * (128 + 2) * 4  # which plain torch has none of
    assert gathering.workspace_bytes - reading.workspace_bytes == taken - splits
    more = (taken - splits) >> 17
    assert more - 16 < reading.kv_tokens - gathering.kv_tokens <= more + 16


def test_measured_activations_count_where_they_are_more() -> None:
    formula = plan().activation_bytes
    assert plan(measured_activations=formula - 1) == plan()
    assert plan(measured_activations=formula + GIB).activation_bytes == formula + GIB
    assert plan(measured_activations=formula + GIB).kv_tokens < plan().kv_tokens


def test_users_maximum_bounds_the_ceiling() -> None:
    assert plan(max_num_seqs=7).ceiling == 7


@given(total=st.integers(1, 200 * GIB), asked=st.one_of(st.none(), st.integers(1, 4096)))
def test_no_plan_spends_more_than_it_has(total: int, asked: int | None) -> None:
    made = plan(total=total, max_num_seqs=asked)
    kv_bytes = made.kv_tokens * made.kv_bytes_per_token
    assert made.kv_tokens == 0 or made.fixed_bytes + kv_bytes <= made.usable_bytes
    assert made.fits == (made.ceiling >= 1)
    assert made.ceiling >= min(made.guaranteed_seqs, most_sequences(asked, 2048)) or not made.fits
    assert made.explain()


@given(tokens=st.integers(1, 1 << 24), mean=st.floats(1, 8192), sigma=st.floats(0, 8192))
def test_what_is_carried_fits_with_its_spread_and_one_more_does_not(
    tokens: int, mean: float, sigma: float
) -> None:
    n = carried_sequences(tokens, mean, sigma)
    assert n * mean + STATISTICAL_Z * sigma * n**0.5 <= tokens * (1 + 1e-9)
    n += 1
    assert n * mean + STATISTICAL_Z * sigma * n**0.5 > tokens * (1 - 1e-9)


def test_as_many_sequences_are_carried_as_overflow_in_one_percent_of_the_moments() -> None:
    carried = carried_sequences(100_000, 500.0, 250.0)
    assert overflow_share(carried, 100_000, 500.0, 250.0) <= 0.01
    assert overflow_share(carried + 1, 100_000, 500.0, 250.0) > 0.009
    assert overflow_share(200, 100_000, 500.0, 250.0) == pytest.approx(0.5)
    assert overflow_share(201, 100_000, 500.0, 0.0) == 1.0
    assert overflow_share(0, 100_000, 500.0, 250.0) == 0.0


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"architectures": ["BertModel"]}, "architecture BertModel is not supported"),
        ({"architectures": None}, "architectures must be a list of one name"),
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"vocab_size": -4}, "vocab_size must be a positive integer"),
        ({"num_hidden_layers": True}, "num_hidden_layers must be a positive integer"),
        ({"num_key_value_heads": 5}, "not a multiple of num_key_value_heads"),
        ({"torch_dtype": "int4"}, "dtype must be one of"),
    ],
)
def test_config_that_cannot_be_sized_gets_one_sentence(
    change: dict[str, object], sentence: str
) -> None:
    with pytest.raises(SizingError, match=sentence):
        ModelShape.from_config({**LLAMA_8B, **change})


def test_impossible_numbers_are_refused() -> None:
    with pytest.raises(SizingError, match="max_position_embeddings 131072"):
        plan(max_model_len=131073)
    large = replace(SHAPE, num_heads=2**31 - 1, head_dim=2**31 - 1)
    cases: tuple[dict[str, Any], ...] = (
        {"shape": large}, {"num_blocks": 10**13}, {"weights": -(1 << 64)},
    )  # fmt: skip
    for sizes in cases:
        with pytest.raises(SizingError, match="sizes of over 1024 PiB"):
            plan(**sizes)
    with pytest.raises(SizingError, match="dtype int8"):
        resolve_dtype("int8", SHAPE, on_cpu=True)


def test_header_bytes_follow_the_run_dtype_for_floats_only() -> None:
    header: dict[str, object] = {
        "__metadata__": {"format": "pt"},
        "a": {"dtype": "F32", "shape": [10, 10], "data_offsets": [0, 400]},
        "b": {"dtype": "I64", "shape": [3], "data_offsets": [400, 424]},
    }
    assert safetensors_header_bytes(header, None) == 424
    assert safetensors_header_bytes(header, 2) == 224
    with pytest.raises(SizingError, match="tensor c"):
        safetensors_header_bytes({"c": {"dtype": "Q9", "shape": []}}, None)
    # A product of hundreds of thousands takes minutes.
    with pytest.raises(SizingError, match="tensor d has an impossible shape"):
        safetensors_header_bytes({"d": {"dtype": "F32", "shape": 9 * [2]}}, None)


def test_dtype_of_either_spelling_is_read_and_auto_follows_it() -> None:
    newer = {**LLAMA_8B, "torch_dtype": None, "dtype": "float16"}
    assert ModelShape.from_config(newer).dtype == "float16"
    assert resolve_dtype("auto", SHAPE, on_cpu=True) == "bfloat16"
    assert resolve_dtype("float32", SHAPE, on_cpu=True) == "float32"
