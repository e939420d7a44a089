"""Arrivals and figures of `static_batches`. Pure."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from random import Random
from statistics import median
from typing import NamedTuple

from sluice.measure.client import Outcome, exact_quantile_ms

ONE, CONTINUOUS, STATIC, BATCH = "one by one", "continuous", "static", "sluice batch"
BLOCK, WINDOW = 64, 1024
"""Tokens of a KV block, and of the model's window."""
BURST = (8, 40)


class Timed(NamedTuple):
    """A request: seconds from the start, and its tokens."""

    start_s: float
    prompt: int
    output: int


class Answer(NamedTuple):
    """A request and its end."""

    timed: Timed
    outcome: Outcome

    @property
    def first_s(self) -> float:
        """Seconds from the start of the run to its first token."""
        return self.timed.start_s + self.outcome.ttft_s

    @property
    def end_s(self) -> float:
        """Seconds from the start of the run to its end."""
        return self.timed.start_s + self.outcome.total_s


@dataclass(frozen=True, slots=True)
class Row:
    """One contender on one trace. `tokens_per_s`: generated, until the last answer. `cpu_s`: of the
    engine's process. `padding_share`: of the tokens that its steps computed. `unused_share`: of the
    KV slots that were held; `unused_of_windows`: the same if each row held slots for the whole
    window, as without pages. `formula_gain`: of static batches, by `sluice bench`, from this run.
    """

    trace: str
    contender: str
    repeat: int
    seconds: float
    tokens_per_s: float
    p50_first_ms: float | None
    p99_first_ms: float | None
    p50_end_ms: float | None
    p99_end_ms: float | None
    unused_share: float | None
    unused_of_windows: float | None
    cpu_s: float = 0.0
    padding_share: float = 0.0
    formula_gain: float | None = None

    @property
    def told(self) -> str:
        """A line of the log."""
        return (
            f"{self.repeat + 1} {self.trace}; {self.contender}: {self.tokens_per_s:.0f} tokens/s, "
            f"{self.cpu_s:.1f} CPU-s, padding {self.padding_share:.0%}"
        )


def bursts(rng: Random, num: int, per_s: float, sizes: tuple[int, int] = BURST) -> list[float]:
    """Starts of `num` requests: bursts, each followed by a pause that makes it `per_s`."""
    starts: list[float] = []
    at_s = 0.0
    while len(starts) < num:
        size = min(rng.randint(*sizes), num - len(starts))
        starts += [at_s] * size
        at_s += size / per_s
    return starts


def padding_share(made: Mapping[str, float]) -> float:
    """The share of computed tokens that were rows of padding. `made`: tokens by kind."""
    computed = sum(made[kind] for kind in ("decode", "prefill", "draft", "padding"))
    return made["padding"] / computed if computed else 0.0


def row_of(
    trace: str, contender: str, repeat: int, answers: Sequence[Answer], seconds: float
) -> Row:
    """The figures that the client sees, and those of the KV slots, which follow from them."""
    firsts, ends = zip(*((a.outcome.ttft_s, a.outcome.total_s) for a in answers), strict=True)
    is_static = contender.startswith(STATIC)
    batches = list(batches_of(answers)) if is_static else [[answer] for answer in answers]
    return Row(
        trace,
        contender,
        repeat,
        seconds,
        tokens_per_s=sum(answer.outcome.num_tokens for answer in answers) / seconds,
        p50_first_ms=exact_quantile_ms(firsts, 0.5),
        p99_first_ms=exact_quantile_ms(firsts, 0.99),
        p50_end_ms=exact_quantile_ms(ends, 0.5),
        p99_end_ms=exact_quantile_ms(ends, 0.99),
        unused_share=unused_share(batches, lambda tokens: -(-tokens // BLOCK) * BLOCK),
        unused_of_windows=unused_share(batches, lambda _: WINDOW),
    )


def batch_row(trace: str, repeat: int, timed: Sequence[Timed], seconds: float) -> Row:
    """`sluice batch`, whose file of results has no times."""
    tokens_per_s = sum(one.output for one in timed) / seconds
    return Row(trace, BATCH, repeat, seconds, tokens_per_s, None, None, None, None, None, None)


def batches_of(answers: Sequence[Answer]) -> Iterator[list[Answer]]:
    """The static batches of a run: a batch's first tokens come before its end, and those of the
    next after it."""
    batch: list[Answer] = []
    for answer in sorted(answers, key=lambda answer: answer.first_s):
        if batch and answer.first_s > max(other.end_s for other in batch):
            yield batch
            batch = []
        batch.append(answer)
    if batch:
        yield batch


def unused_share(batches: Sequence[Sequence[Answer]], held: Callable[[int], int]) -> float:
    """The share of KV slots, over all steps, that held no token of a sequence that still ran. An
    ended row holds its slots to the end of its batch. `held`: slots for so many tokens."""
    used = total = 0
    for batch in batches:
        longest = max(answer.timed.output for answer in batch)
        for answer in batch:
            _, prompt, output = answer.timed
            used += output * prompt + output * (output + 1) // 2
            total += sum(held(prompt + step) for step in range(1, output + 1))
            total += (longest - output) * held(prompt + output)
    return 1 - used / total if total else 0.0


def of(rows: Sequence[Row], trace: str) -> dict[str, list[Row]]:
    """The runs on a trace by contender, in the order of the first repeat."""
    found: dict[str, list[Row]] = {}
    for row in rows:
        if row.trace == trace:
            found.setdefault(row.contender, []).append(row)
    return found


def middle(rows: Sequence[Row], name: str) -> float:
    """The median of a figure; one that was never measured counts as 0."""
    return median(getattr(row, name) or 0.0 for row in rows)
