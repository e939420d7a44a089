"""Small random encoders as transformers and sentence-transformers write them."""

import json
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedModel, PreTrainedTokenizerFast

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"abcdefghijklmnopqrstuvwxyz"]
VOCAB = 64
SMALL: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 48,
}
POSITIONS = {"max_position_embeddings": 66}
DISTIL = {"dim": 32, "n_layers": 3, "n_heads": 4, "hidden_dim": 48}
MODERN = {"local_attention": 8, "global_attn_every_n_layers": 2, "max_position_embeddings": 64}
MODERN |= {"pad_token_id": 0, "cls_token_id": 2, "sep_token_id": 3, "bos_token_id": 2}
CONFIGS: dict[str, dict[str, Any]] = {
    "Bert": SMALL | POSITIONS,
    "Roberta": SMALL | POSITIONS | {"pad_token_id": 1, "type_vocab_size": 1},
    "XLMRoberta": SMALL | POSITIONS | {"pad_token_id": 1, "type_vocab_size": 1},
    "MPNet": SMALL | POSITIONS | {"pad_token_id": 1},
    "DistilBert": DISTIL | {"vocab_size": VOCAB, "max_position_embeddings": 64},
    "ModernBert": SMALL | MODERN | {"eos_token_id": 3},
    "NomicBert": SMALL | {"max_position_embeddings": 64},
}
"""All read texts of 64 tokens."""


def random_model(name: str, kind: str = "Model", **changes: Any) -> PreTrainedModel:
    """A model of the family `name` whose parameters are all random, biases and norms too."""
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**{**CONFIGS[name], **changes})
    model: PreTrainedModel = getattr(transformers, f"{name}{kind}")(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.2)
    return model.eval()


def save_tokenizer(directory: Path, *, tells_pairs: bool = False) -> None:
    """One token a letter, between [CLS] and [SEP]. `tells_pairs`: the second of two texts has a
    kind of its own."""
    tokenizer = Tokenizer(models.WordLevel(dict(zip(WORDS, range(99), strict=False)), "[UNK]"))
    tokenizer.normalizer = normalizers.Sequence([])
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    ends = [("[CLS]", 2), ("[SEP]", 3)]
    tokenizer.post_processor = processors.TemplateProcessing(
        "[CLS] $A [SEP]", "[CLS]:0 $A:0 [SEP]:0 $B:1 [SEP]:1", ends
    )
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="[PAD]",
        unk_token="[UNK]",
        cls_token="[CLS]",
        sep_token="[SEP]",
        mask_token="[MASK]",
    )
    fast.save_pretrained(directory)
    if tells_pairs:
        path = directory / "tokenizer_config.json"
        names = ["input_ids", "token_type_ids", "attention_mask"]
        told = json.loads(path.read_text()) | {"model_input_names": names}
        path.write_text(json.dumps(told))
