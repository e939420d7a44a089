"""The architectures that the one decoder runs, each described by its differences from Llama.

Pure and standard library only: the memory arithmetic and the decoder read the same table. The facts
are transformers' (modeling_* and configuration_* of version 5.23).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class ExpertNames:
    """Names of a mixture of experts: in config.json, and of its tensors under a layer."""

    count: tuple[str, ...]
    width: str
    block: str
    gate: str
    up: str
    down: str


@dataclass(frozen=True, slots=True)
class Family:
    """The differences of one architecture from Llama.

    defaults: values that transformers assumes for keys missing in config.json.
    attention_bias: on q, k, v and output if `attention_bias` says so, on q, k and v, or nowhere.
    slides: the layers that see `sliding_window` tokens: all; those from `max_window_layers` on; or
    all but every `sliding_window_pattern`-th. `layer_types` overrides the last two.
    gemma: norms multiply by 1 + weight in float32, also after attention and MLP. Embeddings are
    scaled by the root of their width, scores by that of `query_pre_attn_scalar`.
    fused: the checkpoint holds q, k, v as one tensor, and gate, up as one.
    """

    defaults: Mapping[str, object]
    attention_bias: Literal["config", "qkv", "none"] = "none"
    mlp_bias: bool = False
    slides: Literal["never", "all", "late", "periodic"] = "never"
    qk_norm: bool = False
    gemma: bool = False
    attention_softcap: bool = False
    local_rope: bool = False
    partial_rotary: bool = False
    fused: bool = False
    experts: ExpertNames | None = None


_QWEN = {"num_key_value_heads": 32, "max_window_layers": 28, "use_sliding_window": False}
_MISTRAL = {"num_key_value_heads": 8, "sliding_window": 4096}
_GEMMA = {
    "num_key_value_heads": 4,
    "head_dim": 256,
    "tie_word_embeddings": True,
    "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
}

FAMILIES: Mapping[str, Family] = {
    "LlamaForCausalLM": Family({}, attention_bias="config", mlp_bias=True),
    "MistralForCausalLM": Family(_MISTRAL, slides="all"),
    "Qwen2ForCausalLM": Family(
        {**_QWEN, "sliding_window": 4096}, attention_bias="qkv", slides="late"
    ),
    "Qwen3ForCausalLM": Family(
        {**_QWEN, "sliding_window": 4096, "head_dim": 128},
        attention_bias="config",
        slides="late",
        qk_norm=True,
    ),
    "Gemma2ForCausalLM": Family(
        {
            **_GEMMA,
            "sliding_window_pattern": 2,
            "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0,
        },
        attention_bias="config",
        slides="periodic",
        gemma=True,
        attention_softcap=True,
    ),
    "Gemma3ForCausalLM": Family(
        {**_GEMMA, "sliding_window_pattern": 6, "rope_theta": 1e6, "rope_local_base_freq": 1e4},
        attention_bias="config",
        slides="periodic",
        qk_norm=True,
        gemma=True,
        local_rope=True,
    ),
    "Phi3ForCausalLM": Family(
        {"rms_norm_eps": 1e-5}, slides="all", partial_rotary=True, fused=True
    ),
    "MixtralForCausalLM": Family(
        {
            "num_key_value_heads": 8,
            "rms_norm_eps": 1e-5,
            "rope_theta": 1e6,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "norm_topk_prob": True,
        },
        slides="all",
        experts=ExpertNames(
            ("num_local_experts",), "intermediate_size", "block_sparse_moe", "w1", "w3", "w2"
        ),
    ),
    "Qwen3MoeForCausalLM": Family(
        {
            "num_key_value_heads": 4,
            "use_sliding_window": False,
            "sliding_window": 4096,
            "moe_intermediate_size": 768,
            "num_experts_per_tok": 8,
            "norm_topk_prob": False,
            "decoder_sparse_step": 1,
        },
        attention_bias="config",
        slides="all",
        qk_norm=True,
        experts=ExpertNames(
            ("num_experts", "num_local_experts"),
            "moe_intermediate_size",
            "mlp",
            "gate_proj",
            "up_proj",
            "down_proj",
        ),
    ),
}
