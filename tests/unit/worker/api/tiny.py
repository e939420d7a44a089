"""A checkpoint directory small enough to make in a test: no tensors, `--load-format dummy`."""

import json
from pathlib import Path

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

VOCAB_SIZE = 384
TEXT = ["def add(a, b):\n    return a + b\n", "for item in range(10):\n    print(item)\n"] * 4


def write_tokenizer(path: Path) -> None:
    """A byte-level BPE with one control token, as the demo's is."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=["<|end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXT, trainer)
    tokenizer.save(str(path))


def write_checkpoint(directory: Path, *, max_position: int = 512, hidden_size: int = 64) -> Path:
    """config.json and tokenizer.json of a Llama with two layers; returns the directory."""
    directory.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": hidden_size,
        "intermediate_size": 2 * hidden_size,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": hidden_size // 4,
        "vocab_size": VOCAB_SIZE,
        "max_position_embeddings": max_position,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": True,
        "bos_token_id": None,
        "eos_token_id": 0,
        "torch_dtype": "float32",
    }
    (directory / "config.json").write_text(json.dumps(config))
    write_tokenizer(directory / "tokenizer.json")
    return directory
