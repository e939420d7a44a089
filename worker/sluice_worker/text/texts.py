"""A request's texts and images as an encoder reads them: token ids, and pixels."""

import string
from array import array
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple, Protocol

from sluice_core.errors import ContextLengthExceeded, RequestError
from sluice_core.model.sentence import Sentence
from sluice_core.window import prompt_too_long
from sluice_frontend.api.pooling.images import is_data_url, read_image
from sluice_frontend.api.pooling.texts import (
    MAX_IMAGES,
    Image,
    Modality,
    Pair,
    Text,
    TextsRequest,
)

from .pieces import Check, any_number
from .tokenizer import Around

_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)
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
    last ones, of a pair's second text, where the model tells these apart. `pixels`: of an image;
    its `token_ids` are as many as its rows."""

    token_ids: Sequence[int]
    num_skipped: int
    num_second: int = 0
    pixels: bytes = b""


class Decodes(Protocol):
    """Reads images; see `api.images.ImageReader`."""

    num_rows: int

    def read(self, image: Image, number: int) -> bytes: ...


class TextReader:
    """Reads texts and images for one model, with its prompts and its length.

    `sentence`: None if it reads no texts; `images`: None if it reads no images.
    """

    def __init__(
        self,
        prompts: Encodes,
        sentence: Sentence | None,
        images: Decodes | None = None,
        *,
        pad_id: int = 0,
        write: Write | None = None,
    ) -> None:
        """`write`: of a model that reads pairs alone, as its chat template writes them."""
        self._reads_texts = sentence is not None
        self._prompts, self.sentence, self._write = prompts, sentence or Sentence(), write
        self._images, self._pad_id, self._around = images, pad_id, prompts.around

    def read(self, asked: TextsRequest, most: int, *, cut: int | None) -> list[Read]:
        """Token ids of each text, and pixels of each image. `most`: tokens that the model reads;
        `cut`: longer texts are cut to so many, None: they are refused. Raises RequestError."""
        if asked.is_chat and self._images is None:
            raise RequestError("this model reads no messages, but input", param="messages")
        add_special_tokens = asked.add_special_tokens
        prompt = self._prompt(asked.prompt_name)
        skipped = 0
        if prompt and not self.sentence.include_prompt:
            ids = self._prompts.encode(prompt, add_special_tokens=add_special_tokens)
            skipped = len(ids) - len(self._around.behind) * add_special_tokens
        found, firsts = list[Read](), dict[str, list[int]]()
        num_images = sum(self._is_image(given, asked.modality) for given in asked.inputs)
        if num_images > MAX_IMAGES:
            sentence = f"input has {num_images} images; one request may have {MAX_IMAGES}"
            raise RequestError(sentence, param="input")
        for number, given in enumerate(asked.inputs):
            if (image := self._image(given, asked.modality)) is not None:
                found.append(self._read_image(image, number))
                continue
            assert not isinstance(given, Image)
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
            found.append(self._padded(read))
        return found

    def has_images(self, asked: TextsRequest) -> bool:
        """True if one of the inputs is an image, which takes time to decode."""
        return any(self._is_image(given, asked.modality) for given in asked.inputs)

    def _is_image(self, given: Text, modality: Modality | None) -> bool:
        if not isinstance(given, str):
            return isinstance(given, Image)
        if modality is None:
            return is_data_url(given) or not self._reads_texts
        return modality == "image"

    def _image(self, given: Text, modality: Modality | None) -> Image | None:
        """The image that an input is, or None for another."""
        if self._is_image(given, modality):
            return read_image(given, "input") if isinstance(given, str) else Image(*given)
        if not self._reads_texts:
            raise RequestError("this model reads images only", param="input")
        return None

    def _read_image(self, image: Image, number: int) -> Read:
        if self._images is None:
            raise RequestError(f"input {number} is an image; this model reads texts", param="input")
        pixels = self._images.read(image, number)
        return Read(range(self._images.num_rows), 0, pixels=pixels)

    def _padded(self, read: Read) -> Read:
        """With the token for padding behind it, where the model has seen padded texts only."""
        most = self.sentence.max_seq_length
        if not self.sentence.is_padded or most is None:
            return read
        ids = array("i", read.token_ids)
        ids.extend([self._pad_id] * (most - len(ids)))
        return read._replace(token_ids=ids)

    def _text(
        self, text: str, skipped: int, most: int, cut: int | None, add_special_tokens: bool
    ) -> Read:
        text = text.lower() if self.sentence.lower_case else text
        if self.sentence.lacks_punctuation:
            text = " ".join(text.translate(_NO_PUNCTUATION).split())
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
