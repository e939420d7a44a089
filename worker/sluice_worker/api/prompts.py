"""A request's prompts as token ids."""

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from sluice_core.errors import RequestError
from sluice_frontend.api.fit import check_length
from sluice_frontend.api.generate import Completion

from ..text.pieces import Check, any_number
from ..text.tokenizer import Around, Tokenizer

PART = 1 << 16


@dataclass(frozen=True, slots=True)
class Echo:
    """A prompt as the reply repeats it.

    `places`: the character at which each token begins, where log-probabilities are told.
    """

    text: str
    places: Sequence[int] = ()


NO_ECHO = Echo("")


class Prompts:
    """Reads prompts for one model: text by its tokenizer, ids against its vocabulary."""

    def __init__(
        self, tokenizer: Tokenizer, config: Mapping[str, object], *, parse_special: bool
    ) -> None:
        """`config`: the model's config.json. `parse_special`: True if control tokens are read in
        a prompt's text by default."""
        size = config.get("vocab_size")
        self._tokenizer = tokenizer
        self._parse_special = parse_special
        self.encode("")  # builds the encoder now, so that the first prompt does not wait
        # Rows of the embedding table: a larger token id has no meaning.
        self.vocab_size = size if isinstance(size, int) else tokenizer.vocab_size

    @property
    def around(self) -> Around:
        """As `Tokenizer.around`."""
        return self._tokenizer.around

    def read(
        self, request: Completion, keep: int | None, window: int
    ) -> tuple[list[Sequence[int]], list[Echo]]:
        """The last `keep` token ids of each prompt, and its echo in the reply. A prompt that is
        known to be over `window` is not read to its end: raises RequestError."""
        check = any_number
        if keep is None:
            check = partial(check_length, window=window, field=request.prompt_field)
        prompts = [self._token_ids(prompt, request, keep, check) for prompt in request.prompts]
        both = zip(request.prompts, prompts, strict=True)
        return prompts, [self._echo(asked, ids, request, keep) for asked, ids in both]

    def encode(
        self,
        text: str,
        *,
        add_special_tokens: bool = True,
        parse_special: bool | None = None,
        keep: int | None = None,
        check: Check = any_number,
    ) -> list[int]:
        """As `Tokenizer.encode`; `parse_special` None: as this server has it."""
        return self._tokenizer.encode(
            text,
            add_special_tokens=add_special_tokens,
            parse_special=self._parses(parse_special),
            keep=keep,
            check=check,
        )

    def _parses(self, asked: bool | None) -> bool:
        return self._parse_special if asked is None else asked

    def check_ids(self, ids: Sequence[int], param: str) -> None:
        """Raise RequestError for an id that the model has no row for."""
        # In parts: `max` of a million ids would hold up all other Python code.
        parts = (ids[at : at + PART] for at in range(0, len(ids), PART))
        highest = max(map(max, parts), default=0)
        if highest >= self.vocab_size:
            raise RequestError(
                f"token id {highest} is outside the vocabulary of {self.vocab_size}", param=param
            )

    def _token_ids(
        self, prompt: str | Sequence[int], request: Completion, keep: int | None, check: Check
    ) -> Sequence[int]:
        ids: Sequence[int]
        if isinstance(prompt, str):
            found = self.encode(
                prompt,
                add_special_tokens=request.add_special_tokens,
                parse_special=request.parse_special,
                keep=keep,
                check=check,
            )
            ids = array("i", found)
        else:
            ids = prompt
        self.check_ids(ids, request.prompt_field)  # of a text too: a tokenizer may have more tokens
        return ids if keep is None else ids[-keep:]

    def _echo(
        self,
        asked: str | Sequence[int],
        ids: Sequence[int],
        request: Completion,
        keep: int | None,
    ) -> Echo:
        """The reply's repetition of a prompt: the text as it came, unless it was cut."""
        if not request.echo:
            return NO_ECHO
        is_placed = request.sampling.engine.logprobs is not None
        skip = request.sampling.skip_special_tokens
        if isinstance(asked, str) and (keep is None or len(ids) < keep):
            text, places = asked, self._places(asked, request) if is_placed else []
        elif is_placed:
            text, places = self._tokenizer.decode_placed(ids, skip_special_tokens=skip)
        else:
            text, places = self._tokenizer.decode(ids, skip_special_tokens=skip), []
        return Echo(text, array("i", places))

    def _places(self, text: str, request: Completion) -> list[int]:
        return self._tokenizer.places_in_text(
            text,
            add_special_tokens=request.add_special_tokens,
            parse_special=self._parses(request.parse_special),
        )
