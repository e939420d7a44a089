"""Random Llama checkpoints that every peer can load: seeded, bf16, with a tokenizer for all.

Two things make runs comparable. Prompts are token ids, so no peer's tokenizer is in the time. And
the head's rows of control and byte tokens are zero, so that greedy decoding (the largest of 7,933
random logits is above 0) never ends a text early and never picks half a character, which some
servers would hold back: each token is one event of a stream.
"""

import itertools
import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from bench.peers.traces import FIRST_TEXT_ID, VOCAB_SIZE
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers

CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "sluice" / "peers"
"""Where checkpoints and peers are kept, unless another place is given."""
WINDOW = 4096
CONTROL = ("<unk>", "<s>", "</s>")
SPACE = "\u2581"


@dataclass(frozen=True, slots=True)
class Llama:
    """Sizes of a model; heads of 64, not tied."""

    name: str
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    intermediate_size: int
    head_dim: int = 64

    def config(self) -> dict[str, Any]:
        """config.json."""
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_size": self.hidden_size,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "intermediate_size": self.intermediate_size,
            "vocab_size": VOCAB_SIZE,
            "max_position_embeddings": WINDOW,
            "rms_norm_eps": 1e-5,
            "rope_theta": 10000.0,
            "hidden_act": "silu",
            "attention_bias": False,
            "mlp_bias": False,
            "tie_word_embeddings": False,
            "bos_token_id": CONTROL.index("<s>"),
            "eos_token_id": CONTROL.index("</s>"),
            "dtype": "bfloat16",
            "torch_dtype": "bfloat16",
        }

    def shapes(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Each tensor's name and shape, as transformers names them."""
        hidden, inner = self.hidden_size, self.intermediate_size
        query, kv = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        yield "model.embed_tokens.weight", (VOCAB_SIZE, hidden)
        for layer in range(self.num_layers):
            at = f"model.layers.{layer}."
            yield at + "input_layernorm.weight", (hidden,)
            yield at + "self_attn.q_proj.weight", (query, hidden)
            yield at + "self_attn.k_proj.weight", (kv, hidden)
            yield at + "self_attn.v_proj.weight", (kv, hidden)
            yield at + "self_attn.o_proj.weight", (hidden, query)
            yield at + "post_attention_layernorm.weight", (hidden,)
            yield at + "mlp.gate_proj.weight", (inner, hidden)
            yield at + "mlp.up_proj.weight", (inner, hidden)
            yield at + "mlp.down_proj.weight", (hidden, inner)
        yield "model.norm.weight", (hidden,)
        yield "lm_head.weight", (VOCAB_SIZE, hidden)

    def flops(self, prompt_tokens: int, output_tokens: int) -> float:
        """Multiplications and additions of one request: products and causal attention.

        The last token is never computed on; logits only of tokens that are sampled from.
        """
        matrices = sum(
            shape[0] * shape[1]
            for name, shape in self.shapes()
            if len(shape) == 2 and name not in ("model.embed_tokens.weight", "lm_head.weight")
        )
        computed = prompt_tokens + output_tokens - 1
        seen = computed * (computed + 1) / 2
        attention = 4 * self.num_layers * self.num_heads * self.head_dim * seen
        head = 2 * output_tokens * VOCAB_SIZE * self.hidden_size
        return 2.0 * matrices * computed + attention + head


MODELS = {
    "88M": Llama("88M", 768, 12, 12, 4, 2048),
    "500M": Llama("500M", 1536, 16, 24, 8, 5120),
}


def tokenizer() -> Tokenizer:
    """Llama 2's kind (BPE with byte fallback) over made-up syllables, which every peer reads."""
    pieces = [*CONTROL, *(f"<0x{byte:02X}>" for byte in range(256))]
    letters = [SPACE, *(chr(code) for code in range(ord("a"), ord("z") + 1))]
    pairs = list(itertools.product(letters, letters[1:]))
    triples = (((a + b), c) for (a, b), c in itertools.product(pairs, letters[1:]))
    pieces += letters
    merges = pairs + list(itertools.islice(triples, VOCAB_SIZE - len(pieces) - len(pairs)))
    pieces += ["".join(merge) for merge in merges]
    vocabulary = {piece: token_id for token_id, piece in enumerate(pieces)}
    built = Tokenizer(
        models.BPE(vocabulary, merges, unk_token=CONTROL[0], fuse_unk=True, byte_fallback=True)
    )
    built.normalizer = normalizers.Sequence(
        [normalizers.Prepend(SPACE), normalizers.Replace(" ", SPACE)]
    )
    built.decoder = decoders.Sequence(
        [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    built.add_special_tokens([AddedToken(piece, special=True) for piece in CONTROL])
    return built


def tensors(llama: Llama, seed: int = 0) -> dict[str, torch.Tensor]:
    """bf16 weights, normal with deviation 0.02; norms are 1."""
    generator = torch.Generator().manual_seed(seed)
    made = {}
    for name, shape in llama.shapes():
        if len(shape) == 1:
            made[name] = torch.ones(shape, dtype=torch.bfloat16)
        else:
            drawn = torch.empty(shape).normal_(0.0, 0.02, generator=generator)
            made[name] = drawn.to(torch.bfloat16)
    made["lm_head.weight"][:FIRST_TEXT_ID] = 0
    return made


def write(llama: Llama, root: Path) -> Path:
    """The checkpoint's directory below `root`; made once."""
    directory = root / llama.name
    if directory.is_dir():
        return directory
    print(f"  checkpoint {llama.name}: random weights, seed 0", flush=True)
    half = directory.with_suffix(".half")
    shutil.rmtree(half, ignore_errors=True)
    half.mkdir(parents=True)
    (half / "config.json").write_text(json.dumps(llama.config(), indent=1))
    tokenizer().save(str(half / "tokenizer.json"))
    about = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": WINDOW,
        "bos_token": "<s>",
        "eos_token": "</s>",
        "unk_token": "<unk>",
        "clean_up_tokenization_spaces": False,
    }
    (half / "tokenizer_config.json").write_text(json.dumps(about, indent=1))
    save_file(tensors(llama), str(half / "model.safetensors"), metadata={"format": "pt"})
    half.rename(directory)
    return directory
