"""A scheduler without a model: each next token is a hash of those before it, time is made up."""

import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from sluice_core.latency import MIN_CHUNK_TOKENS, NO_LIMIT
from sluice_core.law import Division, StepLoad
from sluice_core.port import EngineLimits
from sluice_core.wire import Submit
from sluice_worker.scheduling.scheduler import Scheduler
from sluice_worker.scheduling.sequence import Sequence
from sluice_worker.scheduling.speculation import Growth, few_decodes
from sluice_worker.scheduling.step import BookedToken, Step, StepWork

SEES = 3
"""Tokens that the next one depends on; few, so that texts run into loops that drafts can copy."""


def next_token(token_ids: list[int]) -> int:
    return zlib.crc32(bytes(token % 256 for token in token_ids[-SEES:])) % 5


def written(request: Submit) -> list[int]:
    """What the request's output must be, whatever the scheduler does."""
    token_ids = list(request.prompt_token_ids)
    for _ in range(request.max_tokens):
        token_ids.append(next_token(token_ids))
    return token_ids[len(request.prompt_token_ids) :]


def sample(works: Iterable[StepWork]) -> list[int]:
    """A token for each sampled position, as a runner would give it."""
    tokens = []
    for work in works:
        known = [*work.sequence.token_ids[: work.start], *work.token_ids]
        for position in range(len(known) - work.num_samples, len(known)):
            tokens.append(next_token(known[: position + 1]))
    return tokens


@dataclass(frozen=True)
class FixedLaw:
    """Chunks of up to `limit`, whatever the deadlines; `price`: seconds of a prompt token."""

    limit: Callable[[int, int], int] = lambda decodes, kv_tokens: NO_LIMIT
    price: Callable[[int, int], float] = lambda decodes, kv_tokens: 0.0

    def divide(self, limits: EngineLimits, load: StepLoad) -> Division:
        whole = max(limits.max_num_batched_tokens - load.num_reserved, 1)
        chunk = self.limit(load.num_decodes, load.kv_tokens)
        return Division(min(whole, max(chunk, MIN_CHUNK_TOKENS)))

    def chunk_limit(self, limits: EngineLimits, decodes: int, kv_tokens: int) -> int:
        return self.limit(decodes, kv_tokens)

    def step_ms(self, decodes: int, kv_tokens: int, prompt_tokens: int) -> float | None:
        return None

    def price_s(self, limits: EngineLimits, decodes: int, kv_tokens: int) -> float:
        return self.price(decodes, kv_tokens)


unlimited = FixedLaw()


def add(scheduler: Scheduler, request: Submit, now: float = 0.0) -> Sequence:
    assert scheduler.can_admit(request) is None
    sequence = Sequence(request, seed=0)
    scheduler.add(sequence, now)
    return sequence


def step(
    scheduler: Scheduler, now: float = 0.0, growth: Growth = few_decodes
) -> tuple[Step, list[BookedToken]]:
    planned = scheduler.schedule(now, unlimited, growth)
    return planned, scheduler.commit(planned, sample(planned.works), now)


def set_limits(scheduler: Scheduler, cap: int, budget: int) -> None:
    scheduler.limits = EngineLimits(scheduler.limits.epoch + 1, cap, budget)
