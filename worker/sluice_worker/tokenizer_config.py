"""What tokenizer_config.json says beside tokenizer.json, and which tokens end an output. No torch,
and no tokenizer is loaded."""

from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

from .files import GENERATION_CONFIG, read_json

NAME = "tokenizer_config.json"
TOKENIZER = "tokenizer.json"


class TokenizerConfig:
    """One checkpoint's; all of it may be missing. Raises CheckpointError for what is no JSON."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._fields = read_json(directory, NAME) if (directory / NAME).exists() else {}

    @cached_property
    def special_tokens(self) -> dict[str, str]:
        """The texts of `bos_token`, `eos_token`, ... by these names."""
        texts = {name: _text(value) for name, value in self._fields.items()}
        return {
            name: text
            for name, text in texts.items()
            if name.endswith("_token") and text is not None
        }

    @property
    def put_around(self) -> tuple[str | None, str | None] | None:
        """What comes before a text and behind it, BOS and EOS or nothing; None where tokenizer.json
        says. As transformers has it: where one of the two fields is there, both count."""
        if not self._fields.keys() & {"add_bos_token", "add_eos_token"}:
            return None
        before, behind = (
            self.special_tokens.get(f"{name}_token")
            if self._fields.get(f"add_{name}_token")
            else None
            for name in ("bos", "eos")
        )
        return before, behind

    @property
    def chat_templates(self) -> dict[str, str]:
        """Chat templates by name; one that has none is "default"."""
        given = self._fields.get("chat_template")
        if isinstance(given, str):
            return {"default": given}
        named = given if isinstance(given, list) else []
        return {
            item["name"]: item["template"]
            for item in named
            if isinstance(item, dict)
            and isinstance(item.get("name"), str)
            and isinstance(item.get("template"), str)
        }

    @property
    def eos_token_id(self) -> int | None:
        """The id of `eos_token`. A fine-tune for chats may have changed it here alone."""
        text = self.special_tokens.get("eos_token")
        if text is None:
            return None
        added = self._fields.get("added_tokens_decoder")
        for token_id, token in added.items() if isinstance(added, Mapping) else ():
            if _text(token) == text and token_id.isdecimal():
                return int(token_id)
        # Older checkpoints list no tokens beside tokenizer.json, which is long to read.
        return _id_in_tokenizer(self._directory, text)


def eos_token_ids(
    directory: Path, config: Mapping[str, object], tokenizer: TokenizerConfig
) -> frozenset[int]:
    """End-of-sequence ids: generation_config.json's if it names any, else those of `config`
    (config.json); and the tokenizer's own."""
    values = None
    if (directory / GENERATION_CONFIG).exists():
        values = read_json(directory, GENERATION_CONFIG).get("eos_token_id")
    if values is None:
        values = config.get("eos_token_id")
    ids = values if isinstance(values, list) else [values]
    found = [*ids, tokenizer.eos_token_id]
    return frozenset(i for i in found if isinstance(i, int) and not isinstance(i, bool))


def _text(token: Any) -> str | None:
    """A token's text, which stands alone or in an object's `content`."""
    text = token.get("content") if isinstance(token, Mapping) else token
    return text if isinstance(text, str) else None


def _id_in_tokenizer(directory: Path, text: str) -> int | None:
    if not (directory / TOKENIZER).exists():
        return None
    tokenizer: Mapping[str, Any] = read_json(directory, TOKENIZER)
    for token in tokenizer.get("added_tokens") or ():
        if _text(token) == text and isinstance(token.get("id"), int):
            return int(token["id"])
    return None
