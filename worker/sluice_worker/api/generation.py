"""One HTTP request's sequences, from submission to each one's single outcome."""

import asyncio
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from sluice_core.errors import SluiceError
from sluice_core.port import FinishReason, Scores
from sluice_core.wire import TokenOut, unpacked
from sluice_frontend.api.generate import Completion
from sluice_frontend.api.logprobs import PackedScores
from sluice_frontend.api.response_types import Usage
from sluice_frontend.api.sse import usage
from sluice_frontend.evidence.ledger import Ledger
from sluice_frontend.evidence.requests import RequestGroup, RequestTimer

from ..text.output import OutputText, StopStrings
from .prompts import NO_ECHO, Echo


@dataclass(slots=True, eq=False)
class OpenChoice:
    """One sequence: a prompt's i-th answer. `prompt`: its token ids, as in a `Submit`.

    `echo`: the prompt, where the reply begins with it; `is_scoring`: it is nothing else.
    `finish_reason`: None until its last token was read; `is_booked`: its one outcome was counted.
    """

    index: int
    timer: RequestTimer
    output_text: OutputText
    prompt: bytes
    counts_prompt: bool
    echo: Echo = NO_ECHO
    is_scoring: bool = False
    finish_reason: FinishReason | None = None
    is_booked: bool = False
    cached_tokens: int = 0
    last_at_s: float | None = None
    """Time at which the last delivered token had reached this process."""
    prompt_scores: list[Scores] = field(default_factory=list)
    scored: PackedScores = field(default_factory=PackedScores)
    """The output's tokens with their log-probabilities, where the request asks for them."""

    @property
    def prompt_token_ids(self) -> list[int]:
        """A new list of them."""
        return unpacked(self.prompt)

    def feed(self, token: TokenOut) -> str:
        """The text that `token` adds; sets `finish_reason` if it is the last."""
        echo = ""
        if token.first is not None:
            self.cached_tokens = token.first.cached_tokens
            echo = self.echo.text
        self.finish_reason = token.finish_reason
        if self.is_scoring:  # the token itself is not told
            self.finish_reason = token.finish_reason and "length"
            return echo
        text = self.output_text.push(
            token.token_id,
            is_last=token.finish_reason is not None,
            by_token=token.finish_reason == "stop",
        )
        if token.scores is not None:
            place = len(self.echo.text) + self.output_text.place()
            self.scored.add(token.scores, [place])
        if self.output_text.stop_reason is not None:
            self.finish_reason = "stop"
        return echo + text

    def counts(self) -> Usage:
        """Its own token counts so far."""
        num_completion = len(self.output_text.token_ids)
        return usage(self.timer.num_prompt_tokens, num_completion, self.cached_tokens)


@dataclass(frozen=True, slots=True)
class Arrived:
    """A token that is on its way to the client; it reached this process at `at_s`."""

    choice: OpenChoice
    token: TokenOut
    at_cap: bool
    is_long: bool
    at_s: float


class Generation:
    """All sequences of one request. The engine's side calls the sinks, the client's side `take`.

    `abort` sends the engine an abort for a sequence; an ended one is ignored there.
    """

    def __init__(
        self,
        reply_id: str,
        request: Completion,
        ledger: Ledger,
        abort: Callable[[str], None],
    ) -> None:
        self.reply_id = reply_id
        self.created = int(time.time())
        self.request = request
        self.stops = StopStrings(request.sampling.stop)
        self.choices: list[OpenChoice] = []
        self._group = RequestGroup()
        self.num_open = 0
        self.has_left = False
        """True once nobody reads any more."""
        self.error: SluiceError | None = None
        self._ledger = ledger
        self._abort = abort
        self._arrived: deque[Arrived] = deque()
        self._news = asyncio.Event()

    def add(self, choice: OpenChoice) -> "ChoiceSink":
        """Take in a sequence that is about to be submitted."""
        self.choices.append(choice)
        choice.timer.group = self._group
        self.num_open += 1
        return ChoiceSink(self, choice)

    # -- the engine's side

    def arrive(self, item: Arrived) -> None:
        """Take in a token, and wake the client's side."""
        self._arrived.append(item)
        self._news.set()

    def fail(self, choice: OpenChoice, error: SluiceError) -> None:
        """Fail the request with one of its sequences, and wake the client's side."""
        if self.error is None:
            self.error = error
        if not choice.is_booked:
            self._ledger.fail(choice.timer, error, time.monotonic())
            self._end(choice, "error")
        self._news.set()

    # -- the client's side

    async def take(self) -> list[Arrived]:
        """The tokens since the last call; none once all is over. Raises what failed the request."""
        while not self._arrived:
            if self.error is not None:
                raise self.error
            if not self.num_open:
                return []
            self._news.clear()
            await self._news.wait()
        arrived = list(self._arrived)
        self._arrived.clear()
        return arrived

    def handed_over(self, item: Arrived, end: FinishReason | None, now_s: float) -> None:
        """Book a token whose bytes are at the socket, or kept if the reply is not streamed.

        `end`: the sequence's finish reason as of this token.
        """
        choice = item.choice
        if choice.is_booked:
            return
        is_drafted, choice.last_at_s = item.at_s == choice.last_at_s, item.at_s
        self._ledger.token(
            choice.timer,
            item.token.first,
            at_cap=item.at_cap,
            is_drafted=is_drafted,
            now_s=now_s,
            in_prefill=item.is_long,
        )
        if end is not None:
            num_preemptions = item.token.num_preemptions
            self._ledger.finish(
                choice.timer, end, num_preemptions, computed_s=item.at_s, now_s=now_s
            )
            self._end(choice, end)  # a stop string may end it before the engine does
            if self.num_open == 0:
                self._book_lengths()

    def _book_lengths(self) -> None:
        n = self.request.sampling.n
        lengths = [len(choice.output_text.token_ids) for choice in self.choices]
        for first in range(0, len(lengths), n):
            self._ledger.group_ended(lengths[first : first + n])

    def leave(self) -> None:
        """Free what is still running, as nobody reads any more. Safe to call at any time.

        If one sequence failed, the request has failed: the others do not count as aborted.
        """
        now_s = time.monotonic()
        self.has_left = True
        for choice in self.choices:
            if choice.is_booked:
                continue
            if self.error is not None:
                self._ledger.fail(choice.timer, self.error, now_s)
            else:
                self._ledger.leave(choice.timer, now_s)
            self._end(choice, "abort")
        self._news.set()

    def _end(self, choice: OpenChoice, reason: FinishReason) -> None:
        choice.finish_reason = reason
        choice.is_booked = True
        self.num_open -= 1
        self._abort(choice.timer.request_id)

    def counts(self) -> Usage:
        """Token counts of all choices so far; a prompt with n answers is counted once."""
        return usage(
            sum(c.timer.num_prompt_tokens for c in self.choices if c.counts_prompt),
            sum(len(c.output_text.token_ids) for c in self.choices),
            sum(c.cached_tokens for c in self.choices if c.counts_prompt),
        )


class ChoiceSink:
    """The engine client's view of one sequence (`backend.Sink`)."""

    def __init__(self, generation: Generation, choice: OpenChoice) -> None:
        self.generation = generation
        self.choice = choice

    def token(self, token: TokenOut, *, at_cap: bool, is_long: bool, now_s: float) -> None:
        """Pass the token on."""
        self.generation.arrive(Arrived(self.choice, token, at_cap, is_long, now_s))

    def prompt(self, scores: Scores) -> None:
        """Keep what is known of the prompt until the reply tells it."""
        self.choice.prompt_scores.append(scores)

    def ended(self, error: SluiceError) -> None:
        """Note that the sequence ended without a token."""
        self.generation.fail(self.choice, error)
