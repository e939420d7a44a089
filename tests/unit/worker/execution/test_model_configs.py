"""What of config.json the decoder takes, in the spellings of its years, and what it refuses."""

import math

import pytest
import torch
from sluice_core.errors import CheckpointError, StartupError, UnsupportedModel
from sluice_core.model.architecture import ModelShape, resolve_dtype
from sluice_worker.execution.models.config import DecoderConfig
from sluice_worker.execution.models.rope import Rope
from sluice_worker.execution.models.rotary import read_rotary

SMALL: dict[str, object] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "max_position_embeddings": 4096,
    "num_attention_heads": 4,
    "num_hidden_layers": 6,
    "num_key_value_heads": 2,
    "vocab_size": 100,
}


def config_json(name: str, **changes: object) -> dict[str, object]:
    return {**SMALL, "architectures": [f"{name}ForCausalLM"], **changes}


def config_of(name: str, **changes: object) -> DecoderConfig:
    return DecoderConfig.from_json(config_json(name, **changes))


def test_old_and_new_spellings_of_two_ropes_are_the_same() -> None:
    old = config_of(
        "Gemma3",
        rope_theta=2e6,
        rope_local_base_freq=3e4,
        rope_scaling={"rope_type": "linear", "factor": 8.0},
    )
    new = config_of(
        "Gemma3",
        rope_parameters={
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 2e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 3e4},
        },
    )
    assert old == new
    assert (old.rope.theta, old.rope.kind, old.rope.factor) == (2e6, "linear", 8.0)
    assert (old.sliding_rope.theta, old.sliding_rope.kind) == (3e4, "default")
    silent = config_of("Gemma3")
    assert (silent.rope.theta, silent.sliding_rope.theta) == (1e6, 1e4)


def test_defaults_of_an_architecture_are_transformers() -> None:
    gemma = config_of("Gemma2")
    assert gemma.shape.tie_word_embeddings
    assert (gemma.shape.attention_softcap, gemma.logit_softcap) == (50.0, 30.0)
    assert (gemma.attention_scale, gemma.embedding_scale) == (256**-0.5, 8.0)
    assert config_of("Gemma2", final_logit_softcapping=None).logit_softcap is None
    assert config_of("Mixtral").rope.theta == 1e6
    assert config_of("Mixtral").norm_topk_prob
    assert not config_of("Qwen3Moe", num_experts=8).norm_topk_prob
    assert config_of("Qwen3").shape.head_dim == 128
    assert config_of("Phi3").norm_eps == 1e-5


FACTORS = {"short_factor": [1.0] * 8, "long_factor": [4.0] * 8}


@pytest.mark.parametrize("kind", ["longrope", "su", "yarn"])
def test_longrope_takes_the_factors_of_the_longest_sequence_that_is_served(kind: str) -> None:
    scaling = {"type": kind, **FACTORS}

    def served(max_model_len: int | None) -> Rope:
        scaled = {**scaling, "original_max_position_embeddings": 1024}
        config = config_json("Phi3", rope_scaling=scaled)
        return DecoderConfig.from_json(config, max_model_len).rope

    assert served(1024).factors == (1.0,) * 8
    assert served(1025).factors == (4.0,) * 8
    assert served(None) == served(1024), "as vLLM: one set serves all, and most are short"
    shape = ModelShape.from_config(
        config_json("Phi3", rope_scaling={**scaling, "original_max_position_embeddings": 1024})
    )
    assert (shape.default_len, shape.max_position) == (1024, 4096)
    whole = served(4096)
    assert whole.magnitude == pytest.approx(math.sqrt(1 + math.log(4) / math.log(1024)))


def test_a_scaling_that_is_added_to_a_newer_config_comes_first() -> None:
    """As transformers has it: it replaces all of the newer field."""
    plain = {"rope_type": "default", "rope_theta": 1e6}
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096}
    found = config_of("Qwen3", rope_parameters=plain, rope_scaling={**yarn, "rope_theta": 1e6})
    assert (found.rope.kind, found.rope.theta, found.rope.factor) == ("yarn", 1e6, 4.0)
    assert found.shape.max_position == 16384
    assert config_of("Qwen3", rope_parameters=plain).shape.max_position == 4096
    with pytest.raises(UnsupportedModel, match="rope_scaling replaces rope_parameters, and names"):
        config_of("Qwen3", rope_parameters=plain, rope_scaling=yarn)
    kinds = {"full_attention": {"rope_theta": 2e6}, "sliding_attention": {"rope_theta": 3e4}}
    linear = {"rope_type": "linear", "factor": 8.0}
    gemma = config_of("Gemma3", rope_parameters=kinds, rope_scaling=linear)
    assert (gemma.rope.kind, gemma.rope.theta, gemma.rope.factor) == ("linear", 2e6, 8.0)
    assert (gemma.sliding_rope.kind, gemma.sliding_rope.theta) == ("default", 3e4)


def test_a_float16_checkpoint_runs_as_bfloat16_where_float16_is_no_good() -> None:
    llama, gemma = (
        ModelShape.from_config(config_json(name, torch_dtype="float16"))
        for name in ("Llama", "Gemma2")
    )
    assert resolve_dtype("auto", llama, on_cpu=True) == "bfloat16"
    assert resolve_dtype("auto", llama, on_cpu=False) == "float16"
    assert resolve_dtype("auto", gemma, on_cpu=False) == "bfloat16"
    assert resolve_dtype("float16", llama, on_cpu=True) == "float16"


def test_dynamic_scaling_does_not_set_in_where_sequences_may_go() -> None:
    scaling = {"type": "dynamic", "factor": 4.0}
    assert config_of("Llama", rope_scaling=scaling).rope == config_of("Llama").rope


def test_dimensions_that_do_not_turn_stay_as_they_are() -> None:
    rotary = read_rotary(Rope(theta=1e4, dims=4, magnitude=1.5), 8, torch.device("cpu"))
    turns = rotary.at(torch.tensor([0, 7]))
    assert torch.equal(turns[:, :, 2:], torch.ones(2, 1, 2, dtype=torch.complex64))
    assert torch.allclose(turns[:, :, :2].abs(), torch.tensor(1.5))


@pytest.mark.parametrize(
    ("name", "changes", "sentence"),
    [
        ("Qwen2", {"attention_bias": True}, "attention_bias is not built for Qwen2"),
        ("Qwen2", {"use_mrope": True}, "use_mrope is not built"),
        ("Mistral", {"mlp_bias": True}, "mlp_bias is not built"),
        ("Llama", {"sliding_window": 64}, "sliding_window is not built"),
        ("Gemma3", {"use_bidirectional_attention": True}, "use_bidirectional_attention is not"),
        ("Gemma3", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping is built for Gemma 2"),
        ("Gemma3", {"rope_parameters": {"rope_theta": 5.0}}, "must name the kinds of layers"),
        ("Qwen3", {"final_logit_softcapping": 30.0}, "final_logit_softcapping is built for Gemma"),
        ("Qwen3", {"rope_parameters": {"full_attention": {}}}, "full_attention of rotary"),
        ("Qwen3", {"rope_scaling": {"mrope_section": [1]}}, "mrope_section of rotary"),
        ("Qwen3", {"partial_rotary_factor": 0.5}, "partial_rotary_factor must be 1"),
        ("Phi3", {"partial_rotary_factor": 0.2}, "partial_rotary_factor turns 3 dimensions"),
        ("Phi3", {"partial_rotary_factor": 0.5, "head_dim": 97}, "head_dim 97 is odd"),
        ("Gemma2", {"hidden_activation": "relu"}, "hidden_activation must be one of silu"),
        ("Phi3", {"auto_map": {"AutoModelForCausalLM": "a.Phi3V"}}, "auto_map names code"),
        ("Gemma3", {"architectures": ["Gemma3ForConditionalGeneration"]}, "is not supported"),
    ],
)
def test_what_is_not_built_is_refused_in_one_sentence(
    name: str, changes: dict[str, object], sentence: str
) -> None:
    with pytest.raises(UnsupportedModel, match=sentence) as refused:
        config_of(name, **changes)
    assert "\n" not in refused.value.message


@pytest.mark.parametrize(
    ("scaling", "sentence"),
    [
        ({"type": "linear"}, "factor of rope type linear is missing"),
        ({"type": "llama3", "factor": 8, "high_freq_factor": 1}, "high_freq_factor must be over"),
        ({"type": "longrope", "short_factor": [1.0]}, "short_factor must be a list of 8 numbers"),
        ({"type": "longrope", "short_factor": [0] * 8}, "short_factor must be a positive number"),
        ({"type": "su", "short_factor": [None] * 8}, "short_factor must be a list of 8 numbers"),
        ({"type": "yarn", "factor": 4, "rope_theta": 1}, "rope_theta or the original length"),
        ([], "rope_scaling must be an object"),
    ],
)
def test_rotary_settings_that_make_no_sense_are_named(scaling: object, sentence: str) -> None:
    with pytest.raises(CheckpointError, match=sentence):
        config_of("Llama", rope_scaling=scaling)


def test_own_classes_in_auto_map_are_no_reason_to_refuse() -> None:
    auto_map = {
        "AutoConfig": "configuration_phi3.Phi3Config",
        "AutoModelForCausalLM": "modeling_phi3.Phi3ForCausalLM",
    }
    assert config_of("Phi3", auto_map=auto_map) == config_of("Phi3")
    other = auto_map | {"AutoTokenizer": "Xenova/gpt-4o"}  # as Phi-4-mini's
    assert config_of("Phi3", auto_map=other) == config_of("Phi3")
    with pytest.raises(StartupError, match="auto_map names code"):
        config_of("Llama", auto_map=auto_map)
