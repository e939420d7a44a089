"""The fields of tokenizer_config.json that tokenizer.json lacks, and the end tokens of outputs. No
torch, and no tokenizer is loaded.

Files override each other as in transformers 5.23 (`PreTrainedTokenizerBase._from_pretrained`).
"""

import re
from collections.abc import Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

from sluice_core.errors import CheckpointError
from sluice_core.model.files import GENERATION_CONFIG, is_there, read_json

NAME = "tokenizer_config.json"
TOKENIZER = "tokenizer.json"
SPECIAL = "special_tokens_map.json"
ADDED = "added_tokens.json"
Token = Mapping[str, Any]
"""A token's text (`content`) and flags, as the files have it."""
_EXTRA = ("extra_special_tokens", "additional_special_tokens")
_ID = re.compile("[0-9]{1,9}")


class TokenizerConfig:
    """One checkpoint's; all of it may be missing. Raises CheckpointError for invalid JSON.

    `lists_tokens`: True if it lists the added tokens. Otherwise the older files added_tokens.json
    and special_tokens_map.json are read.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._fields = self._read(NAME)
        self.lists_tokens = self._fields.get("added_tokens_decoder") is not None
        self.list_file = NAME if self.lists_tokens else ADDED
        self._map = {} if self.lists_tokens else self._read(SPECIAL)

    def _read(self, name: str) -> Mapping[str, Any]:
        return read_json(self._directory, name) if is_there(self._directory, name) else {}

    @property
    def tells_pairs(self) -> bool:
        """True if a model gets kinds of tokens, as `model_input_names` or the class says."""
        named = self._fields.get("model_input_names")
        if isinstance(named, list):
            return "token_type_ids" in named
        return str(self._fields.get("tokenizer_class", "")).startswith("Bert")

    @cached_property
    def named_special(self) -> dict[str, Token]:
        """Special tokens by their names: `bos_token`, `eos_token`, ..."""
        given = {**self._fields, **self._map}
        named = {name: value for name, value in given.items() if name.endswith("_token")}
        for extra in self._extra:
            named |= extra if isinstance(extra, Mapping) else {}
        tokens = {name: _token(value) for name, value in named.items()}
        return {name: token for name, token in tokens.items() if token is not None}

    @cached_property
    def extra_special(self) -> list[Token]:
        """Special tokens without a name."""
        lists = (extra for extra in self._extra if isinstance(extra, list))
        tokens = (_token(value) for values in lists for value in values)
        return [token for token in tokens if token is not None]

    @property
    def _extra(self) -> Iterator[Any]:
        return (fields.get(name) for fields in (self._fields, self._map) for name in _EXTRA)

    @cached_property
    def special_tokens(self) -> dict[str, str]:
        """The texts of `bos_token`, `eos_token`, ... by these names."""
        return {name: token["content"] for name, token in self.named_special.items()}

    @cached_property
    def added_tokens(self) -> dict[int, Token]:
        """The added tokens that `list_file` lists, by id and in that order."""
        listed = self._listed() if self.lists_tokens else self._listed_before()
        return dict(sorted(listed.items()))

    def _listed(self) -> dict[int, Token]:
        given = self._fields["added_tokens_decoder"]
        tokens = given.items() if isinstance(given, Mapping) else [("", given)]
        read = {token_id: _token(value) for token_id, value in tokens if _ID.fullmatch(token_id)}
        listed = {int(token_id): token for token_id, token in read.items() if token is not None}
        if len(listed) < len(tokens):
            raise CheckpointError(f"{NAME}: added_tokens_decoder must hold tokens by their ids.")
        return listed

    def _listed_before(self) -> dict[int, Token]:
        given = self._read(ADDED)
        if not all(isinstance(token_id, int) and token_id >= 0 for token_id in given.values()):
            raise CheckpointError(f"{ADDED}: must hold an id for each token.")
        tokens = [*self.named_special.values(), *self.extra_special]
        special = {token["content"] for token in tokens}
        return {i: {"content": text, "special": text in special} for text, i in given.items()}

    @property
    def put_around(self) -> tuple[str | None, str | None] | None:
        """The tokens before and behind a text, BOS and EOS, or None for each; None if the config
        has neither field. If it has one of the two fields, both count."""
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
        """Chat templates by name; one without a name is "default"."""
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
        """The id of `eos_token`. A fine-tune for chats may have changed it only here."""
        text = self.special_tokens.get("eos_token")
        if text is None:
            return None
        listed = {token["content"]: token_id for token_id, token in self.added_tokens.items()}
        if self.lists_tokens and text in listed:  # reading tokenizer.json is slow
            return listed[text]
        found = _id_in_tokenizer(self._directory, text)
        return listed.get(text) if found is None else found


def eos_token_ids(
    directory: Path, config: Mapping[str, object], tokenizer: TokenizerConfig
) -> frozenset[int]:
    """End-of-sequence ids: the tokenizer's own, and those of generation_config.json, or of `config`
    (config.json) if it names none."""
    values = None
    if is_there(directory, GENERATION_CONFIG):
        values = read_json(directory, GENERATION_CONFIG).get("eos_token_id")
    if values is None:
        values = config.get("eos_token_id")
    ids = values if isinstance(values, list) else [values]
    found = [*ids, tokenizer.eos_token_id]
    return frozenset(i for i in found if isinstance(i, int) and not isinstance(i, bool))


def _token(value: Any) -> Token | None:
    """A token from a text, or from an object's `content`; None for any other value."""
    token = {"content": value} if isinstance(value, str) else value
    return token if isinstance(token, Mapping) and isinstance(token.get("content"), str) else None


def _id_in_tokenizer(directory: Path, text: str) -> int | None:
    """The id of a text in tokenizer.json, as an added token or in its vocabulary."""
    if not is_there(directory, TOKENIZER):
        return None
    tokenizer: Mapping[str, Any] = read_json(directory, TOKENIZER)
    for token in tokenizer.get("added_tokens") or ():
        if isinstance(token, Mapping) and token.get("content") == text:
            return token["id"] if isinstance(token.get("id"), int) else None
    model = tokenizer.get("model")
    vocabulary = model.get("vocab") if isinstance(model, Mapping) else None
    if isinstance(vocabulary, list):  # Unigram's: pairs of text and score
        texts = [pair[0] if isinstance(pair, list) and pair else None for pair in vocabulary]
        return texts.index(text) if text in texts else None
    found = vocabulary.get(text) if isinstance(vocabulary, Mapping) else None
    return found if isinstance(found, int) else None
