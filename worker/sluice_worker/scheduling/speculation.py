"""N-gram speculation: it guesses that repeated words have the same continuation as before. Pure.

A guess (draft) is verified in one step with the decode that it continues. Each of its positions is
sampled greedily; the longest prefix that the model itself would have written is kept. The output
equals that of plain decoding; only its speed depends on the guesses.

A request speculates only while its recent drafts were right. Otherwise drafts are still made and
compared with the tokens of plain decoding. Such a probe costs microseconds and no forward pass, and
it notices a text that begins to copy.
"""

from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as Seq

from sluice_core.wire import Submit

from ..base.config import NgramSpeculation

MIN_ACCEPTANCE = 0.8
"""Share of accepted drafted tokens above which a request speculates."""
WINDOW_TOKENS = 32
"""Drafted tokens behind the share; the next draft notices the end of a copy."""
MIN_JUDGED_TOKENS = 8
"""Fewer drafted tokens say nothing: one lucky guess is not a habit."""
SHORT_DRAFT = 2
"""Tokens of a draft after a wrong one; each right one doubles it. So a false start costs little."""
INDEXED_PER_STEP = 512
"""Tokens of all prompts looked through per step (about 1 ms), so that no step waits for more."""
MAX_GROWTH = 2.0
"""Drafts may make a step this many times as long: requests without drafts wait for it too."""
MIN_GAIN = 1.25
"""Least predicted ratio of tokens per second with drafts to those without."""

Growth = Callable[[int, int, int], float]
"""(decodes, kv_tokens, drafted tokens) of a step -> its predicted time over that without drafts."""


def is_eligible(request: Submit) -> bool:
    """True if each token is the likeliest after those before it, so a draft can be verified.

    Logit edits that depend on earlier tokens must see the draft; scores would be of drafts.
    """
    return request.temperature == 0.0 and request.sampling.is_plain


def few_decodes(decodes: int, kv_tokens: int, drafted: int) -> float:
    """`Growth` without a step model: up to four decodes count as memory-bound."""
    return 1.0 if decodes <= 4 else float("inf")


def draft_length(most: int, num_drafting: int, decodes: int, growth: Callable[[int], float]) -> int:
    """Tokens that each of `num_drafting` sequences may draft in a step of `decodes`; 0: none.

    A memory-bound step computes more rows in almost the same time; a compute-bound one does not.
    `growth` (of all drafted tokens) tells which it is.
    """
    for length in range(most, 0, -1):
        drafted = length * num_drafting
        slower = growth(drafted)
        gain = (decodes + MIN_ACCEPTANCE * drafted) / decodes
        if slower <= MAX_GROWTH and gain >= MIN_GAIN * slower:
            return length
    return 0


def num_right(drafts: Seq[int], sampled: Seq[int | None]) -> int:
    """Number of leading drafts that equal the sampled tokens."""
    for position, (draft, token) in enumerate(zip(drafts, sampled, strict=False)):
        if draft != token:
            return position
    return len(drafts)


class Drafter:
    """One request's guesses and their success.

    `_source` is the place in the text that is being copied; its token is the next guess. It moves
    on with each token, even a different one, so it follows a copy with a changed word. Another
    place is looked up only after a wrong guess.
    """

    def __init__(self, config: NgramSpeculation) -> None:
        self._most = config.num_speculative_tokens
        self._length = min(SHORT_DRAFT, self._most)
        self._sizes = range(config.prompt_lookup_max, config.prompt_lookup_min - 1, -1)
        self._follows: dict[tuple[int, ...], int] = {}  # n-gram -> position after its last one
        self._num_indexed = 0
        self._has_caught_up = False
        self._source: int | None = None
        self._num_following = 0
        self._probe: tuple[int, ...] = ()
        self._probe_hits = 0
        self._window: deque[tuple[int, int]] = deque()
        self._num_drafted = 0
        self._num_accepted = 0

    @property
    def is_on(self) -> bool:
        """True if recent drafts were right often enough."""
        enough = self._num_drafted >= MIN_JUDGED_TOKENS
        return enough and self._num_accepted > MIN_ACCEPTANCE * self._num_drafted

    def draft(self, token_ids: Seq[int], most: int) -> tuple[int, ...]:
        """At most `most` tokens that may follow, or none; none until `see` has caught up."""
        if self._source is None or not self._num_following:
            return ()
        return _copy(token_ids, self._source, min(most, self._length))

    def judge(self, num_drafted: int, num_accepted: int) -> None:
        """Learn from a draft that was verified, or a probe that was compared."""
        self._probe = ()
        longer = 2 * self._length if num_accepted == num_drafted else SHORT_DRAFT
        self._length = min(longer, self._most)
        self._window.append((num_drafted, num_accepted))
        self._num_drafted += num_drafted
        self._num_accepted += num_accepted
        while self._num_drafted - self._window[0][0] >= WINDOW_TOKENS:
            drafted, accepted = self._window.popleft()
            self._num_drafted -= drafted
            self._num_accepted -= accepted

    def see(self, token_ids: Seq[int], most: int = INDEXED_PER_STEP) -> int:
        """Read the sequence after each step. Returns the number of tokens read, up to `most`.

        Once it has caught up it stays so at no cost, as a step adds few tokens.
        """
        num_new = 0 if self._has_caught_up else len(token_ids) - self._num_indexed
        if num_new > most:
            self._index(token_ids, self._num_indexed + most)
            return most
        self._has_caught_up = True
        for token in token_ids[self._num_indexed :] if self._source is not None else ():
            self._follow(token_ids, token)
        self._index(token_ids, len(token_ids))
        if not self._num_following:
            self._look_up(token_ids)
        if not self._probe:
            self._probe = self.draft(token_ids, self._most)
            self._probe_hits = 0
        return num_new

    def _follow(self, token_ids: Seq[int], token: int) -> None:
        assert self._source is not None
        is_right = token_ids[self._source] == token
        self._num_following = self._num_following + 1 if is_right else 0
        self._source += 1
        if self._probe:
            is_hit = self._probe[self._probe_hits] == token
            self._probe_hits += is_hit
            if not is_hit or self._probe_hits == len(self._probe):
                self.judge(len(self._probe), self._probe_hits)

    def _index(self, token_ids: Seq[int], end: int) -> None:
        for position in range(self._num_indexed, end):
            for size in self._sizes:
                if position >= size:
                    self._follows[tuple(token_ids[position - size : position])] = position
        self._num_indexed = end

    def _look_up(self, token_ids: Seq[int]) -> None:
        """Go to the last place with the same words before it, the longest n-gram first."""
        for size in self._sizes:
            found = self._follows.get(tuple(token_ids[-size:]))
            if found is not None:
                self._source, self._num_following = found, size
                return


def _copy(token_ids: Seq[int], start: int, count: int) -> tuple[int, ...]:
    """`count` tokens from `start` on; a copy that reaches the end continues with itself."""
    copied = list(token_ids[start : start + count])
    for position in range(len(copied), count):
        copied.append(copied[position - (len(token_ids) - start)])
    return tuple(copied)
