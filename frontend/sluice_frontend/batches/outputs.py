"""*rim*: the results of one batch: those that went well in one file, the others in another."""

from collections.abc import Iterator
from contextlib import ExitStack
from itertools import chain
from pathlib import Path
from typing import Annotated, Self

import msgspec
from msgspec import Meta, Struct
from sluice_core.bounded import MAX_TOKENS

from ..api.batches import BatchUsage, InputDetails, OutputDetails
from .item import Result
from .results import Results

Number = Annotated[int, Meta(ge=0, le=MAX_TOKENS)] | None


class _Details(Struct):
    cached_tokens: Number = None
    reasoning_tokens: Number = None


class _Usage(Struct):
    """Tokens in the words of any of the routes."""

    prompt_tokens: Number = None
    input_tokens: Number = None
    completion_tokens: Number = None
    output_tokens: Number = None
    prompt_tokens_details: _Details | None = None
    input_tokens_details: _Details | None = None
    completion_tokens_details: _Details | None = None
    output_tokens_details: _Details | None = None


class _Body(Struct):
    usage: _Usage | None = None


_BODY = msgspec.json.Decoder(_Body)


def tokens_of(result: Result) -> tuple[int, int, int, int]:
    """Tokens that a line read, of those cached ones, that it wrote, and of those thoughts, as its
    answer tells them."""
    try:
        body = _BODY.decode(result.response.body if result.response else b"{}")
    except (msgspec.DecodeError, RecursionError):
        body = _Body()
    told = body.usage or _Usage()
    read = told.prompt_tokens_details or told.input_tokens_details or _Details()
    wrote = told.completion_tokens_details or told.output_tokens_details or _Details()
    return (
        told.prompt_tokens or told.input_tokens or 0,
        read.cached_tokens or 0,
        told.completion_tokens or told.output_tokens or 0,
        wrote.reasoning_tokens or 0,
    )


class Outputs:
    """Both files, locked while this is entered; entering raises `Refusal`.

    `num_ok`, `num_failed` and `usage` are of all results, once those of earlier writers were read.
    """

    def __init__(self, output: Path, errors: Path) -> None:
        self._good, self._bad = Results(output), Results(errors)
        self._held = ExitStack()
        self.num_ok = self.num_failed = 0
        self._tokens: tuple[int, ...] = (0, 0, 0, 0)

    @property
    def usage(self) -> BatchUsage:
        """Tokens of all lines."""
        read, cached, wrote, thought = self._tokens
        inner = InputDetails(cached), OutputDetails(thought)
        return BatchUsage(read, inner[0], wrote, inner[1], read + wrote)

    def __enter__(self) -> Self:
        with ExitStack() as held:
            for each in (self._good, self._bad):
                held.enter_context(each)
            self._held = held.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._held.close()

    def read(self) -> Iterator[Result]:
        """The results that are there, counted; cuts off torn lines."""
        for result in chain(self._good.read(), self._bad.read()):
            self._count(result)
            yield result

    def append(self, result: Result) -> None:
        """Append a line to one of them; raises `WriteError`."""
        (self._good if result.is_ok else self._bad).append(result)
        self._count(result)

    def sync(self) -> None:
        """Have the disk keep all lines; raises `WriteError`."""
        for each in (self._good, self._bad):
            each.sync()

    def _count(self, result: Result) -> None:
        self.num_ok += result.is_ok
        self.num_failed += not result.is_ok
        told = zip(self._tokens, tokens_of(result), strict=True)
        self._tokens = tuple(a + b for a, b in told)
