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


class _Cached(Struct):
    cached_tokens: Number = None


class _Thought(Struct):
    reasoning_tokens: Number = None


class _Told(Struct):
    """A usage in the words of any of the routes."""

    prompt_tokens: Number = None
    input_tokens: Number = None
    completion_tokens: Number = None
    output_tokens: Number = None
    prompt_tokens_details: _Cached | None = None
    input_tokens_details: _Cached | None = None
    completion_tokens_details: _Thought | None = None
    output_tokens_details: _Thought | None = None


class _Body(Struct):
    usage: _Told | None = None


def usage_of(result: Result) -> BatchUsage:
    """The tokens of a line, as its answer tells them; nothing if it does not."""
    try:
        body = msgspec.json.decode(result.response.body if result.response else b"{}", type=_Body)
    except (msgspec.DecodeError, RecursionError):
        return BatchUsage()
    told = body.usage or _Told()
    cached = told.prompt_tokens_details or told.input_tokens_details or _Cached()
    thought = told.completion_tokens_details or told.output_tokens_details or _Thought()
    num_in = told.prompt_tokens or told.input_tokens or 0
    num_out = told.completion_tokens or told.output_tokens or 0
    return BatchUsage(
        num_in,
        InputDetails(cached.cached_tokens or 0),
        num_out,
        OutputDetails(thought.reasoning_tokens or 0),
        num_in + num_out,
    )


def _sum(a: BatchUsage, b: BatchUsage) -> BatchUsage:
    return BatchUsage(
        a.input_tokens + b.input_tokens,
        InputDetails(a.input_tokens_details.cached_tokens + b.input_tokens_details.cached_tokens),
        a.output_tokens + b.output_tokens,
        OutputDetails(
            a.output_tokens_details.reasoning_tokens + b.output_tokens_details.reasoning_tokens
        ),
        a.total_tokens + b.total_tokens,
    )


class Outputs:
    """Both files, locked while this is entered; entering raises `Refusal`.

    `num_ok`, `num_failed` and `usage` are of all results, once those of earlier writers were read.
    """

    def __init__(self, output: Path, errors: Path) -> None:
        self._good, self._bad = Results(output), Results(errors)
        self._held = ExitStack()
        self.num_ok = self.num_failed = 0
        self.usage = BatchUsage()

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
        self.usage = _sum(self.usage, usage_of(result))
