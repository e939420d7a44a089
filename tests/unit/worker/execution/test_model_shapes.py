"""Shapes of published models, against the sizes that their index files and cards give."""

import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sluice_core.errors import StartupError
from sluice_core.model.sizing import (
    ModelShape,
    SizingError,
    activation_bytes,
    bytes_saved,
    kv_bytes_per_token,
    resolve_dtype,
    weights_bytes,
)
from sluice_worker.execution.models.config import DecoderConfig

BF16 = 2
MODELS: dict[str, tuple[dict[str, object], int, int]] = {
    # config.json, total_size of the index, bytes of keys and values per token
    "Mistral-7B-v0.1": (
        {
            "architectures": ["MistralForCausalLM"],
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "max_position_embeddings": 32768,
            "num_attention_heads": 32,
            "num_hidden_layers": 32,
            "num_key_value_heads": 8,
            "sliding_window": 4096,
            "tie_word_embeddings": False,
            "vocab_size": 32000,
        },
        14_483_464_192,
        128 << 10,
    ),
    "Qwen2.5-7B": (
        {
            "architectures": ["Qwen2ForCausalLM"],
            "hidden_size": 3584,
            "intermediate_size": 18944,
            "max_position_embeddings": 131072,
            "max_window_layers": 28,
            "num_attention_heads": 28,
            "num_hidden_layers": 28,
            "num_key_value_heads": 4,
            "sliding_window": 131072,
            "tie_word_embeddings": False,
            "use_sliding_window": False,
            "vocab_size": 152064,
        },
        15_231_233_024,
        56 << 10,
    ),
    "Qwen3-8B": (
        {
            "architectures": ["Qwen3ForCausalLM"],
            "attention_bias": False,
            "head_dim": 128,
            "hidden_size": 4096,
            "intermediate_size": 12288,
            "max_position_embeddings": 40960,
            "num_attention_heads": 32,
            "num_hidden_layers": 36,
            "num_key_value_heads": 8,
            "sliding_window": None,
            "tie_word_embeddings": False,
            "vocab_size": 151936,
        },
        16_381_470_720,
        144 << 10,
    ),
    "gemma-2-2b": (
        {
            "architectures": ["Gemma2ForCausalLM"],
            "head_dim": 256,
            "hidden_size": 2304,
            "intermediate_size": 9216,
            "max_position_embeddings": 8192,
            "num_attention_heads": 8,
            "num_hidden_layers": 26,
            "num_key_value_heads": 4,
            "vocab_size": 256000,
        },
        2 * 2_614_341_888,
        104 << 10,
    ),
    "gemma-3-1b-it": (
        {
            "architectures": ["Gemma3ForCausalLM"],
            "head_dim": 256,
            "hidden_size": 1152,
            "intermediate_size": 6912,
            "max_position_embeddings": 32768,
            "num_attention_heads": 4,
            "num_hidden_layers": 26,
            "num_key_value_heads": 1,
            "sliding_window": 512,
            "sliding_window_pattern": 6,
            "vocab_size": 262144,
        },
        2 * 999_885_952,
        26 << 10,
    ),
    "Phi-3-mini-4k-instruct": (
        {
            "architectures": ["Phi3ForCausalLM"],
            "hidden_size": 3072,
            "intermediate_size": 8192,
            "max_position_embeddings": 4096,
            "num_attention_heads": 32,
            "num_hidden_layers": 32,
            "num_key_value_heads": 32,
            "sliding_window": 2047,
            "tie_word_embeddings": False,
            "vocab_size": 32064,
        },
        7_642_159_104,
        384 << 10,
    ),
    "Mixtral-8x7B-v0.1": (
        {
            "architectures": ["MixtralForCausalLM"],
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "max_position_embeddings": 32768,
            "num_attention_heads": 32,
            "num_experts_per_tok": 2,
            "num_hidden_layers": 32,
            "num_key_value_heads": 8,
            "num_local_experts": 8,
            "sliding_window": None,
            "tie_word_embeddings": False,
            "vocab_size": 32000,
        },
        93_405_585_408,
        128 << 10,
    ),
    "Qwen3-30B-A3B": (
        {
            "architectures": ["Qwen3MoeForCausalLM"],
            "attention_bias": False,
            "decoder_sparse_step": 1,
            "head_dim": 128,
            "hidden_size": 2048,
            "intermediate_size": 6144,
            "max_position_embeddings": 40960,
            "mlp_only_layers": [],
            "moe_intermediate_size": 768,
            "norm_topk_prob": True,
            "num_attention_heads": 32,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "num_hidden_layers": 48,
            "num_key_value_heads": 4,
            "tie_word_embeddings": False,
            "use_sliding_window": False,
            "vocab_size": 151936,
        },
        61_064_245_248,
        96 << 10,
    ),
}


def shape_of(name: str, **changes: object) -> ModelShape:
    return ModelShape.from_config({**MODELS[name][0], **changes})


@pytest.mark.parametrize("name", MODELS)
def test_weights_and_kv_bytes_are_the_published_ones(name: str) -> None:
    _, weights, kv = MODELS[name]
    assert weights_bytes(shape_of(name), BF16) == weights
    assert kv_bytes_per_token(shape_of(name), BF16) == kv


def test_layers_slide_by_the_rule_of_their_family() -> None:
    mistral, gemma2, gemma3 = (
        shape_of(name) for name in ("Mistral-7B-v0.1", "gemma-2-2b", "gemma-3-1b-it")
    )
    assert mistral.windows == (4096,)
    assert [gemma2.window(layer) for layer in range(4)] == [4096, None, 4096, None]
    assert [layer for layer in range(26) if gemma3.window(layer) is None] == [5, 11, 17, 23]
    assert gemma3.windows == (512, None)
    assert shape_of("Qwen2.5-7B").windows == (None,)
    late = shape_of("Qwen2.5-7B", use_sliding_window=True, sliding_window=64, max_window_layers=20)
    assert late.sliding_layers == tuple(range(20, 28))


@pytest.mark.parametrize("name", ["Mistral-7B-v0.1", "Qwen2.5-7B", "gemma-3-1b-it"])
def test_a_window_of_no_tokens_is_none(name: str) -> None:
    """As in vLLM 0.32 (config/model.py)."""
    changes = {"use_sliding_window": True, "max_window_layers": 0} if "Qwen" in name else {}
    assert len(shape_of(name, sliding_window=9, **changes).sliding_layers) > 0
    shape = shape_of(name, sliding_window=0, **changes)
    assert (shape.sliding_window, shape.sliding_layers, shape.windows) == (None, (), (None,))


def test_a_window_that_hides_nothing_is_none_but_its_layers_are_still_told() -> None:
    shape = shape_of("gemma-3-1b-it", sliding_window=32768)
    assert shape.windows == (None,)
    assert len(shape.sliding_layers) == 22


def test_own_list_of_layers_wins_where_transformers_listens_to_it() -> None:
    kinds = ["full_attention"] * 25 + ["sliding_attention"]
    assert shape_of("gemma-3-1b-it", layer_types=kinds).sliding_layers == (25,)
    with pytest.raises(SizingError, match="layer_types differs"):
        shape_of("Phi-3-mini-4k-instruct", layer_types=["full_attention"] * 32)


def test_yarn_reaches_factor_times_the_original_length() -> None:
    yarn = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    assert shape_of("Qwen3-8B", rope_scaling=yarn).max_position == 131072
    assert shape_of("Qwen3-8B", rope_scaling={**yarn, "type": "dynamic"}).max_position == 40960


@pytest.mark.parametrize(
    ("name", "lengths"), [("Qwen3-8B", (40960, 102400)), ("gemma-3-1b-it", (32768, 32768))]
)
@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
def test_linear_scaling_reaches_factor_times_the_told_length(
    name: str, lengths: tuple[int, int], key: str
) -> None:
    """As in vLLM 0.32 (_get_and_verify_max_len), where Gemma 3 tells the scaled length."""
    linear: dict[str, object] = {"rope_type": "linear", "factor": 2.5}
    is_gemma = "gemma" in name and key == "rope_parameters"
    shape = shape_of(name, **{key: {"full_attention": linear} if is_gemma else linear})
    assert (shape.default_len, shape.max_position) == lengths


def test_experts_of_some_layers_are_counted_there_only() -> None:
    every, second = (shape_of("Qwen3-30B-A3B", decoder_sparse_step=step) for step in (1, 2))
    assert second.experts is not None
    assert second.experts.layers == tuple(range(1, 48, 2))
    sparse, dense = 128 * 2048 * (3 * 768 + 1), 3 * 2048 * 6144
    saved = weights_bytes(every, BF16) - weights_bytes(second, BF16)
    assert saved == BF16 * 24 * (sparse - dense)


def test_what_quantising_saves_of_very_many_experts_takes_no_memory_to_tell() -> None:
    many = shape_of("Qwen3-30B-A3B", num_experts=65_536)
    tracemalloc.start()
    try:
        assert bytes_saved(many, "bfloat16", "w8a8") > 14 * 10**12
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_a_step_of_experts_needs_what_one_expert_needs_not_what_all_do() -> None:
    sparse, dense = shape_of("Mixtral-8x7B-v0.1"), shape_of("Mistral-7B-v0.1")
    needed, known = (activation_bytes(shape, 2048, 16, BF16) for shape in (sparse, dense))
    assert known < needed < 1.5 * known


def test_float16_is_refused_where_it_overflows() -> None:
    with pytest.raises(SizingError, match="float16 overflows in Gemma2ForCausalLM"):
        resolve_dtype("float16", shape_of("gemma-2-2b"), on_cpu=True)
    assert resolve_dtype("float16", shape_of("Qwen3-8B"), on_cpu=True) == "float16"


@pytest.mark.parametrize(
    ("name", "changes", "sentence"),
    [
        ("Qwen3-30B-A3B", {"num_experts_per_tok": 129}, "129 is over 128 experts"),
        ("Qwen3-30B-A3B", {"mlp_only_layers": [[]]}, "mlp_only_layers must be a list"),
        ("Qwen3-8B", {"layer_types": ["full_attention"]}, "a list of 36 names"),
        ("Qwen3-8B", {"layer_types": ["chunked_attention"] * 36}, "chunked_attention is not"),
        ("Qwen3-8B", {"layer_types": ["sliding_attention"] * 36}, "there is no window"),
        ("Qwen3-8B", {"num_hidden_layers": 1 << 40}, "num_hidden_layers must be at most 1,024"),
        ("Qwen3-8B", {"hidden_size": 1 << 31}, "hidden_size must be at most 2,147,483,647"),
        ("Qwen3-30B-A3B", {"num_experts": 1 << 17}, "num_experts must be at most 65,536"),
        ("Qwen3-8B", {"attn_logit_softcapping": 50.0}, "built for Gemma 2 only"),
        ("gemma-2-2b", {"attn_logit_softcapping": -1}, "attn_logit_softcapping must be"),
        ("gemma-2-2b", {"attn_logit_softcapping": 1e9}, "is over 10,000"),
        ("Qwen2.5-7B", {"use_sliding_window": True, "max_window_layers": -1}, "max_window_layers"),
    ],
)
def test_what_cannot_be_sized_gets_one_sentence(
    name: str, changes: dict[str, object], sentence: str
) -> None:
    with pytest.raises(SizingError, match=sentence):
        shape_of(name, **changes)


SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.sampled_from(["", "yarn"])
ROPE_KEYS = ["rope_type", "type", "factor", "rope_theta", "original_max_position_embeddings"]
JSON = (
    SCALARS
    | st.lists(SCALARS, max_size=2)
    | st.dictionaries(st.sampled_from([*ROPE_KEYS, "short_factor", "beta_fast"]), SCALARS)
)
KEYS = sorted({key for config, _, _ in MODELS.values() for key in config})


@given(
    name=st.sampled_from(sorted(MODELS)),
    key=st.sampled_from([*KEYS, "rope_scaling", "rope_parameters", "layer_types", "auto_map"]),
    value=JSON,
)
def test_any_json_gives_a_config_or_one_sentence(name: str, key: str, value: object) -> None:
    try:
        config = DecoderConfig.from_json({**MODELS[name][0], key: value})
    except StartupError as refused:
        message = refused.message
    else:
        assert weights_bytes(config.shape, BF16) > 0
        message = "It is built."
    assert message.endswith(".")
