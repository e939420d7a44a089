"""Texts as the token ids that an encoder reads."""

from array import array
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple, Protocol

from sluice_core.errors import ContextLengthExceeded, RequestError
from sluice_core.model.sentence import Sentence
from sluice_core.window import prompt_too_long
from sluice_frontend.api.pooling.texts import Pair, Text

from .pieces import Check, any_number
from .tokenizer import Around

Write = Callable[[Pair, Check], list[int]]
"""(pair, check) -> its token ids; raises what `check` raises of their number."""


class Encodes(Protocol):
    """Reads one text; see `api.prompts.Prompts`."""

    @property
    def around(self) -> Around: ...

    def encode(
        self, text: str, *, add_special_tokens: bool = True, check: Check = any_number
    ) -> list[int]: ...

    def check_ids(self, ids: Sequence[int], param: str) -> None: ...


class Read(NamedTuple):
    """A text's token ids. `num_skipped`: those of a prompt that does not count; `num_second`: the
    last ones, of a pair's second text, where the model tells these apart."""

    token_ids: Sequence[int]
    num_skipped: int
    num_second: int = 0


class TextReader:
    """Reads texts for one model, with its prompts and its length."""

    def __init__(self, prompts: Encodes, sentence: Sentence, write: Write | None = None) -> None:
        """`write`: of a model that reads pairs alone, as its chat template writes them."""
        self._prompts, self.sentence, self._write = prompts, sentence, write
        self._around = prompts.around

    def read(
        self,
        inputs: Sequence[Text],
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
        if prompt and not self.sentence.include_prompt:
            ids = self._prompts.encode(prompt, add_special_tokens=add_special_tokens)
            skipped = len(ids) - len(self._around.behind) * add_special_tokens
        found, firsts = [], dict[str, list[int]]()
        for given in inputs:
            if self._write is not None:
                read = Read(_written(self._write, given, most), 0)
            elif isinstance(given, Pair):
                read = self._pair(given, most, cut, firsts)
            elif isinstance(given, str):
                text = prompt + given
                read = self._text(text, skipped, most, cut, add_special_tokens)
            else:
                read = _cut(given, 0, 0, most, cut)
            self._prompts.check_ids(read.token_ids, "input")
            found.append(read)
        return found

    def _text(
        self, text: str, skipped: int, most: int, cut: int | None, add_special_tokens: bool
    ) -> Read:
        text = text.lower() if self.sentence.lower_case else text
        check = any_number if cut is not None else partial(_check_length, most=most)
        ids = self._prompts.encode(text, add_special_tokens=add_special_tokens, check=check)
        return _cut(
            array("i", ids), len(self._around.behind) * add_special_tokens, skipped, most, cut
        )

    def _pair(self, pair: Pair, most: int, cut: int | None, firsts: dict[str, list[int]]) -> Read:
        """Both texts with what the tokenizer puts around them. The longer one is cut first, as in
        transformers (`longest_first`). `firsts`: token ids of first texts that are known."""
        _, _, before, between, behind, is_told = self._around
        room = most - len(before) - len(between) - len(behind)
        check = any_number if cut is not None else partial(_check_length, most=room)
        encode = partial(self._prompts.encode, add_special_tokens=False, check=check)
        if pair.first not in firsts:
            firsts[pair.first] = encode(pair.first)
        first, second = firsts[pair.first], encode(pair.second)
        check(len(first) + len(second))
        if cut is not None:
            room = max(min(cut, most) - (most - room), 0)
            first, second = _shortened(first, second, room)
        ids = array("i", [*before, *first, *between, *second, *behind])
        return Read(ids, 0, len(second) + len(behind) if is_told else 0)

    def _prompt(self, name: str | None) -> str:
        prompts, default = self.sentence.prompts, self.sentence.default_prompt
        if name is None:
            return prompts[default] if default is not None else ""
        if name not in prompts:
            known = ", ".join(sorted(prompts)) or "none"
            raise RequestError(
                f"prompt_name is none of this model's prompts: {known}", param="prompt_name"
            )
        return prompts[name]


def _written(write: Write, given: Text, most: int) -> Sequence[int]:
    """A pair's token ids; it is never cut, because its template's end must stay."""
    if not isinstance(given, Pair):
        raise RequestError("this model reads pairs of texts", param="input")
    return array("i", write(given, partial(_check_length, most=most)))


def _cut(ids: Sequence[int], behind: int, skipped: int, most: int, cut: int | None) -> Read:
    """`ids`, of which the last `behind` stay when it is cut."""
    if cut is None:
        _check_length(len(ids), most)
    elif len(ids) > min(cut, most):
        end = len(ids) - behind
        ids = [*ids[: max(min(cut, most) - behind, 0)], *ids[end:]]
    return Read(ids, min(skipped, len(ids)))


def _shortened(first: list[int], second: list[int], room: int) -> tuple[list[int], list[int]]:
    """Both within `room` together."""
    short, long = sorted((len(first), len(second)))
    if short + long > room:
        short = min(short, room // 2)
        long = room - short
    if len(first) > len(second):
        return first[:long], second[:short]
    return first[:short], second[:long]


def _check_length(num_at_least: int, most: int) -> None:
    if num_at_least > most:
        sentence = prompt_too_long(f"at least {num_at_least}", most)
        raise ContextLengthExceeded(sentence, param="input")
