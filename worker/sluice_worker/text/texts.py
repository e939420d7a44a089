"""Texts as the token ids that an encoder reads."""

from array import array
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple, Protocol

from sluice_core.errors import ContextLengthExceeded, RequestError
from sluice_core.model.sentence import Sentence
from sluice_core.window import prompt_too_long

from .pieces import Check, any_number


class Encodes(Protocol):
    """Reads one text; see `api.prompts.Prompts`."""

    @property
    def num_behind(self) -> int: ...

    def encode(
        self, text: str, *, add_special_tokens: bool = True, check: Check = any_number
    ) -> list[int]: ...

    def check_ids(self, ids: Sequence[int], param: str) -> None: ...


class Read(NamedTuple):
    """A text's token ids. `num_skipped`: those of a prompt that does not count."""

    token_ids: Sequence[int]
    num_skipped: int


class TextReader:
    """Reads texts for one model, with its prompts and its length."""

    def __init__(self, prompts: Encodes, sentence: Sentence) -> None:
        self._prompts, self._sentence = prompts, sentence
        self._num_behind = prompts.num_behind

    def read(
        self,
        inputs: Sequence[str | Sequence[int]],
        most: int,
        *,
        cut: int | None,
        add_special_tokens: bool,
        prompt_name: str | None,
    ) -> list[Read]:
        """Token ids of each text. `most`: tokens that the model reads; `cut`: longer texts are cut
        to so many, None: they are refused. Raises RequestError."""
        prompt = self._prompt(prompt_name)
        skipped = 0
        if prompt and not self._sentence.include_prompt:
            ids = self._prompts.encode(prompt, add_special_tokens=add_special_tokens)
            skipped = len(ids) - self._num_behind * add_special_tokens
        check = any_number if cut is not None else partial(_check_length, most=most)
        found = []
        for given in inputs:
            ids_of: Sequence[int]
            if isinstance(given, str):
                text = prompt + given
                text = text.lower() if self._sentence.lower_case else text
                ids_of = array(
                    "i",
                    self._prompts.encode(text, add_special_tokens=add_special_tokens, check=check),
                )
                behind, num_skipped = self._num_behind * add_special_tokens, skipped
            else:
                ids_of, behind, num_skipped = given, 0, 0
            self._prompts.check_ids(ids_of, "input")
            check(len(ids_of))
            if cut is not None and len(ids_of) > min(cut, most):
                end = len(ids_of) - behind
                ids_of = [*ids_of[: max(min(cut, most) - behind, 0)], *ids_of[end:]]
            found.append(Read(ids_of, min(num_skipped, len(ids_of))))
        return found

    def _prompt(self, name: str | None) -> str:
        prompts, default = self._sentence.prompts, self._sentence.default_prompt
        if name is None:
            return prompts[default] if default is not None else ""
        if name not in prompts:
            known = ", ".join(sorted(prompts)) or "none"
            raise RequestError(
                f"prompt_name is none of this model's prompts: {known}", param="prompt_name"
            )
        return prompts[name]


def _check_length(num_at_least: int, most: int) -> None:
    if num_at_least > most:
        sentence = prompt_too_long(f"at least {num_at_least}", most)
        raise ContextLengthExceeded(sentence, param="input")
