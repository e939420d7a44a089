"""Writes the checkpoints of examples/models that hold no weights: `python examples/make_models.py`.

too-large: a Llama of 70 billion parameters in bfloat16, by config and index only. It cannot fit.
random-60m: a Llama of 60 million parameters for `--load-format dummy`, and a tokenizer for it: all
256 bytes, so that any text can be encoded, and pairs of letters and digits, so that most of what
random weights produce is readable text.
random-texts, random-classes, random-images: a BERT of MiniLM's size that makes vectors, one that
classifies, and a small ViT that classifies images, all for `--load-format dummy`.
"""

import json
import sys
from itertools import product
from pathlib import Path
from string import ascii_lowercase, digits

from sluice_core.model.sizing import DTYPE_BYTES, ModelShape
from sluice_core.model.tasks import vector_shape
from sluice_core.model.vectors import stored_bytes
from tokenizers import AddedToken, Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel

END_OF_TEXT = "<|endoftext|>"
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "rms_norm_eps": 1e-05,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
}
TOO_LARGE = {
    **LLAMA,
    "dtype": "bfloat16",
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
    "rope_theta": 500000.0,
}
RANDOM_60M = {
    **LLAMA,
    "dtype": "float32",
    "hidden_size": 640,
    "intermediate_size": 1920,
    "num_hidden_layers": 12,
    "num_attention_heads": 10,
    "num_key_value_heads": 5,
    "head_dim": 64,
    "max_position_embeddings": 2048,
    "rope_theta": 10000.0,
    "bos_token_id": None,
    "eos_token_id": 0,
}
BERT: dict[str, object] = {
    "model_type": "bert",
    "dtype": "float32",
    "hidden_size": 384,
    "intermediate_size": 1536,
    "num_hidden_layers": 6,
    "num_attention_heads": 12,
    "max_position_embeddings": 512,
    "type_vocab_size": 2,
    "hidden_act": "gelu",
    "layer_norm_eps": 1e-12,
}
RANDOM_TEXTS = {**BERT, "architectures": ["BertModel"]}
RANDOM_CLASSES = {
    **BERT,
    "architectures": ["BertForSequenceClassification"],
    "id2label": {"0": "bad", "1": "good", "2": "odd"},
}
RANDOM_IMAGES = {
    "architectures": ["ViTForImageClassification"],
    "model_type": "vit",
    "dtype": "float32",
    "hidden_size": 192,
    "intermediate_size": 768,
    "num_hidden_layers": 12,
    "num_attention_heads": 3,
    "image_size": 224,
    "patch_size": 16,
    "hidden_act": "gelu",
    "layer_norm_eps": 1e-12,
    "id2label": {"0": "cat", "1": "dog", "2": "fox"},
}
PROCESSOR = {
    "image_processor_type": "ViTImageProcessor",
    "size": {"height": 224, "width": 224},
    "resample": 2,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
}


def tokenizer() -> Tokenizer:
    """Byte-level BPE: end of text, the 256 bytes, and every pair of letters and of digits."""
    pairs = [(a, b) for some in (ascii_lowercase, digits) for a, b in product(some, some)]
    tokens = [END_OF_TEXT, *sorted(ByteLevel.alphabet()), *("".join(pair) for pair in pairs)]
    made = Tokenizer(BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=pairs))
    made.pre_tokenizer = ByteLevel(add_prefix_space=False)
    made.decoder = ByteLevelDecoder()
    made.add_special_tokens([AddedToken(END_OF_TEXT, special=True)])
    return made


def index(config: dict[str, object]) -> dict[str, object]:
    """The index that stands for files which are not there."""
    shape = vector_shape(config) if "Llama" not in str(config) else ModelShape.from_config(config)
    size = stored_bytes(shape, DTYPE_BYTES[shape.dtype])
    return {"metadata": {"total_size": size}, "weight_map": {}}


def write(directory: Path, files: dict[str, dict[str, object]]) -> None:
    """Each of `files` as JSON."""
    directory.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (directory / name).write_text(json.dumps(content, indent=2) + "\n")


def main(root: Path) -> None:
    """All checkpoints under `root`."""
    write(
        root / "too-large",
        {"config.json": TOO_LARGE, "model.safetensors.index.json": index(TOO_LARGE)},
    )
    made = tokenizer()
    config = {**RANDOM_60M, "vocab_size": made.get_vocab_size()}
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END_OF_TEXT,
        "model_max_length": config["max_position_embeddings"],
    }
    write(
        root / "random-60m",
        {
            "config.json": config,
            "model.safetensors.index.json": index(config),
            "tokenizer_config.json": settings,
        },
    )
    made.save(str(root / "random-60m" / "tokenizer.json"), pretty=False)
    for name, bert in (("random-texts", RANDOM_TEXTS), ("random-classes", RANDOM_CLASSES)):
        config = {**bert, "vocab_size": made.get_vocab_size()}
        files = {
            "config.json": config,
            "model.safetensors.index.json": index(config),
            "tokenizer_config.json": {**settings, "model_max_length": 512},
        }
        write(root / name, files)
        made.save(str(root / name / "tokenizer.json"), pretty=False)
    write(
        root / "random-images",
        {
            "config.json": RANDOM_IMAGES,
            "model.safetensors.index.json": index(RANDOM_IMAGES),
            "preprocessor_config.json": PROCESSOR,
        },
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent / "models")
