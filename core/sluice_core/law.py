"""How a step is divided between decodes and prompts. Pure.

A long step makes every decode late once; many short ones make prompts late. A prompt that is done
early becomes a decode, and the next long step breaks it. So while prompts in time need more than
short steps give, long steps compute all of them but for their last token (they are *held*). Then
one short step lets all go. In time: Moore and Hodgson's choice, as in `ordering`.

The rules are in `RULES`: the first that applies decides. Without a deadline of first tokens, or
under first come, first served, only the first and the last apply.
"""

import math
from collections.abc import Callable, Hashable, Iterable, Sequence
from functools import cached_property
from typing import NamedTuple

from .contract import SMOOTH_SHARE
from .latency import MIN_CHUNK_TOKENS
from .ordering import Pace, Terms, arrange
from .port import EngineLimits
from .steptime import StepTimes

NOBODY: frozenset[Hashable] = frozenset()
BREAK_PRICE = 0.75
"""Requests that long steps must rescue for each that they break."""
SAFE_GAPS = 1.0
"""Gap targets between the last long step and the first deadline: a late release is late for all."""
MOST_STRETCH = 1.3
"""Most times its mean that a long step is expected to take."""
LEAST_LONG_TOKENS = 64
"""A long step with fewer prompt tokens is not worth its late gaps: the hold ends."""


class Prompt(NamedTuple):
    """A request without a first token. `left`: tokens to compute; `num_tokens`: its context when
    it has all; `due_s`: infinite without a deadline."""

    key: Hashable
    left: int
    num_tokens: int
    arrived_s: float
    due_s: float
    priority: int = 0

    def within_s(self, share: float) -> float:
        """When so much of the time from its arrival to its deadline is over; `share` is not 0."""
        return share * self.due_s + (1 - share) * self.arrived_s


class Gaps(NamedTuple):
    """A request that decodes: its tokens so far, its late gaps, and its first token: if that was
    in time, and when it came, on the clock of `StepLoad`."""

    num_made: int
    num_late: int
    is_in_time: bool
    first_s: float

    @property
    def would_break(self) -> bool:
        """True if it is smooth, and not after one more late gap."""
        allowed, then = (int(SMOOTH_SHARE * num) for num in (self.num_made, self.num_made + 1))
        return self.is_in_time and self.num_late <= allowed and self.num_late + 1 > then

    def is_good(self, at_s: float, num_more: int, itl_ms: float) -> bool:
        """True if the mean of its gaps is within the target with `num_more` of them by `at_s`."""
        num_gaps = self.num_made - 1 + num_more
        return self.is_in_time and 1e3 * (at_s - self.first_s) <= itl_ms * num_gaps


class StepLoad(NamedTuple):
    """The work that waits for a step.

    `prompts`: those that may have a place below the cap, in any order. `num_reserved`: tokens of
    the step's budget that decodes and their drafts take. `decodes`: read only where it matters.
    `may_hold`: False where held prompts would keep the KV blocks that others lack.
    """

    now_s: float
    prompts: Sequence[Prompt]
    num_decodes: int
    num_reserved: int
    kv_tokens: int
    decodes: Iterable[Gaps] = ()
    may_hold: bool = True


class Division(NamedTuple):
    """`chunk`: prompt tokens of the step, those of released prompts too. `held`: prompts that stop
    one token before their end. `is_long`: it is longer than the gap target on purpose."""

    chunk: int
    held: frozenset[Hashable] = NOBODY
    is_long: bool = False


class Rule(NamedTuple):
    """`says`: the rule in a sentence. `divide`: None where it does not apply."""

    name: str
    says: str
    divide: Callable[["_Step"], Division | None]


class Law:
    """Divides the steps of one engine whose times are `times`. It remembers who is held."""

    def __init__(self, times: StepTimes) -> None:
        self._times = times
        self.held = NOBODY

    def divide(self, limits: EngineLimits, load: StepLoad) -> Division:
        """Choose the prompt tokens of the next step, and who is held."""
        step = _Step(self._times, limits, load, self.held)
        found = (rule.divide(step) for rule in RULES)
        division = next(division for division in found if division is not None)
        self.held = division.held
        return division

    def chunk_limit(self, limits: EngineLimits, decodes: int, kv_tokens: int) -> int:
        """Prompt tokens that keep a step within the gap target, as in `StepTimes`."""
        return self._times.chunk_limit(limits.itl_ms, decodes, kv_tokens)

    def step_ms(self, decodes: int, kv_tokens: int, prompt_tokens: int) -> float | None:
        """Mean time of a step; None without a model."""
        times = self._times
        if times.model is None:
            return None
        return times.slowdown * times.step_ms(times.model, decodes, kv_tokens, prompt_tokens)

    def price_s(self, limits: EngineLimits, decodes: int, kv_tokens: int) -> float:
        """Seconds that a prompt token takes beside `decodes`, for the order of the queue."""
        most = limits.max_num_batched_tokens
        return self._times.price_s(limits.itl_ms, most, decodes, kv_tokens)


class _Step:
    """What the rules read of one step; times in ms from now."""

    def __init__(
        self, times: StepTimes, limits: EngineLimits, load: StepLoad, before: frozenset[Hashable]
    ) -> None:
        self.times, self.limits, self.load, self.before = times, limits, load, before
        self.whole = max(limits.max_num_batched_tokens - load.num_reserved, 1)
        self.base = self.room(load.num_decodes, load.kv_tokens)
        if self.base <= MIN_CHUNK_TOKENS and not self._unexpired:
            self.base = min(self.whole, max(self.base, times.worthwhile))

    def room(self, decodes: int, kv_tokens: int) -> int:
        """The chunk that keeps a step within the target, at least the smallest."""
        limit = self.times.chunk_limit(self.limits.itl_ms, decodes, kv_tokens)
        return min(self.whole, max(limit, MIN_CHUNK_TOKENS))

    def fixed_ms(self, decodes: int, kv_tokens: int) -> float:
        """Mean time of a step with a chunk, without the chunk's tokens."""
        model = self.times.model
        assert model is not None
        plain_ms = model.step_ms(decodes, kv_tokens, 0) + self.times.tail.chunk_ms
        return max(self.times.slowdown * plain_ms, 1e-3)

    @cached_property
    def token_ms(self) -> float:
        """Mean time of a prompt token."""
        assert self.times.model is not None
        return max(self.times.slowdown * self.times.model.d, 1e-6)

    @cached_property
    def now_fixed_ms(self) -> float:
        return self.fixed_ms(self.load.num_decodes, self.load.kv_tokens)

    @cached_property
    def safe_ms(self) -> float:
        return SAFE_GAPS * (self.limits.itl_ms or 0.0)

    def due_ms(self, prompt: Prompt) -> float:
        """Time until its first token is due."""
        return 1e3 * (prompt.due_s - self.load.now_s)

    def in_time(self, token_ms: float, early_ms: float = 0.0, share: float = 1.0) -> list[Prompt]:
        """Prompts that can be in time if each token takes so long, by deadline; the fewest are
        left out. `share`: of the time from arrival to deadline."""
        prompts, early_s = self.load.prompts, early_ms / 1e3
        terms = [
            Terms(p.priority, p.within_s(share) - early_s, p.arrived_s, p.left) for p in prompts
        ]
        return [prompts[i] for i in arrange(terms, self.load.now_s, Pace(token_ms / 1e3))[0]]

    @cached_property
    def rescuable(self) -> list[Prompt]:
        """Those in time in the longest steps, with time left for a release."""
        return self._rescuable(1.0)

    def _rescuable(self, share: float) -> list[Prompt]:
        token_ms = self.token_ms + self.now_fixed_ms / self.whole
        return self.in_time(token_ms, self.safe_ms + self.now_fixed_ms, share)

    @property
    def ends_in_its_share(self) -> bool:
        """True if a hold of all `rescuable` ends within `hold_share`. Long steps of one that is cut
        short would be for nothing."""
        share = self.limits.hold_share
        return share == 1 or (share > 0 and len(self._rescuable(share)) == len(self.rescuable))

    @cached_property
    def is_long(self) -> bool:
        """True if long steps rescue more requests than they break, beyond what short ones break."""
        if (
            not self.load.num_decodes
            or self.is_calm(self._unexpired)
            or self.is_calm(self.rescuable)
        ):
            return False
        if self._breaks_anyway:
            return bool(self.rescuable)
        num_rescued = len(self.rescuable) - len(self.in_time(self._short(self.rescuable)[0]))
        return num_rescued > BREAK_PRICE * self._num_broken

    @property
    def _num_broken(self) -> int:
        """Decodes that long steps for all `rescuable` break: smooth ones, and those whose mean gap
        rises over the target."""
        num_tokens = sum(prompt.left for prompt in self.rescuable)
        num_steps = math.ceil(num_tokens / self.whole)
        now_s, itl_ms = self.load.now_s, self.limits.itl_ms or math.inf
        end_s = now_s + (num_steps * self.now_fixed_ms + num_tokens * self.token_ms) / 1e3
        return sum(
            gaps.would_break
            or (gaps.is_good(now_s, 0, itl_ms) and not gaps.is_good(end_s, num_steps, itl_ms))
            for gaps in self.load.decodes
        )

    @cached_property
    def _breaks_anyway(self) -> bool:
        """True if a chunk's launch alone breaks the gap target, and what decodes does not. Then one
        long step is better than many short ones."""
        num, kv_tokens = self.load.num_decodes, self.load.kv_tokens
        limit = self.times.chunk_limit(self.limits.itl_ms, num, kv_tokens)
        launch = self.times.slowdown * self.times.tail.chunk_ms / self.token_ms
        return num > 0 and limit < MIN_CHUNK_TOKENS <= limit + launch

    @cached_property
    def _unexpired(self) -> list[Prompt]:
        now_s = self.load.now_s
        known = (p for p in self.load.prompts if now_s < p.due_s < math.inf)
        return sorted(known, key=lambda prompt: prompt.due_s)

    @cached_property
    def chunk(self) -> int:
        return self.whole if self.is_long else self.base

    def is_calm(self, prompts: list[Prompt]) -> bool:
        """True if short steps compute all of `prompts` in time, even beside all as decodes."""
        if self._breaks_anyway and any(prompt.left > 1 for prompt in prompts):
            return False
        token_ms, fixed_ms = self._short(prompts)
        todo = 0
        for prompt in prompts:
            todo += prompt.left - 1
            if prompt.left > 1 and todo * token_ms > self.due_ms(prompt) - 2 * fixed_ms:
                return False
        return True

    def _short(self, prompts: list[Prompt]) -> tuple[float, float]:
        """Time of a prompt token in short steps beside all of `prompts` as decodes, and of such a
        step without its chunk."""
        fixed_ms, room = self.fixed_ms(*self.joined(prompts)), self.room(*self.joined(prompts))
        return self.token_ms + fixed_ms / room, fixed_ms

    def joined(self, prompts: list[Prompt]) -> tuple[int, int]:
        """Decodes and KV tokens once all `prompts` decode too."""
        num_tokens = sum(prompt.num_tokens for prompt in prompts)
        return self.load.num_decodes + len(prompts), self.load.kv_tokens + num_tokens

    def long_tokens(self, prompts: list[Prompt]) -> int:
        """Prompt tokens of a step that leaves time for the release of all `prompts`."""
        assert self.times.model is not None
        release_ms = self.fixed_ms(*self.joined(prompts)) + self.token_ms * len(prompts)
        until_s = min(prompt.within_s(self.limits.hold_share) for prompt in prompts)
        left_ms = 1e3 * (until_s - self.load.now_s) - self.safe_ms - release_ms
        stretch = max(min(self.times.model.resid_q, MOST_STRETCH), 1.0)
        return int((left_ms / stretch - self.now_fixed_ms) / self.token_ms)


def _whole(step: _Step) -> Division | None:
    is_bound = step.times.model is not None and step.limits.itl_ms is not None
    return None if is_bound else Division(step.base)


def _hold(step: _Step) -> Division | None:
    load = step.load
    if not (load.may_hold and load.prompts) or (load.num_decodes and not step.is_long):
        return None
    prompts = step.rescuable
    if not prompts or step.is_calm(prompts) or not step.ends_in_its_share:
        return None
    fits = step.long_tokens(prompts)
    if fits < LEAST_LONG_TOKENS:
        return None
    held = frozenset(prompt.key for prompt in prompts)
    return Division(min(step.chunk, fits), held, is_long=load.num_decodes > 0)


def _release(step: _Step) -> Division | None:
    held = [p for p in step.load.prompts if p.key in step.before and step.due_ms(p) > 0]
    if not held:
        return None
    free = [prompt for prompt in held if prompt.left <= 1]
    room_ms = min(map(step.due_ms, held)) - step.safe_ms / 2 - step.now_fixed_ms
    beside = step.times.chunk_limit(step.limits.itl_ms, *step.joined(free))
    fits = min(step.chunk, room_ms / step.token_ms, len(free) + max(beside, 0))
    return Division(min(step.whole, max(len(free) or MIN_CHUNK_TOKENS, math.floor(fits))))


def _long(step: _Step) -> Division | None:
    return Division(step.whole, is_long=True) if step.is_long else None


def _short(step: _Step) -> Division:
    return Division(step.base)


RULES = (
    Rule("whole", "Without a gap target or a step model, a step takes all that it may.", _whole),
    Rule(
        "hold",
        "If prompts can be in time in long steps only, long steps compute them but for their last "
        "token.",
        _hold,
    ),
    Rule("release", "When a hold ends, all held prompts end in one short step.", _release),
    Rule(
        "long",
        "If long steps rescue enough requests but leave no time for a hold, they are long.",
        _long,
    ),
    Rule("short", "Else a chunk keeps the step within the gap target.", _short),
)
