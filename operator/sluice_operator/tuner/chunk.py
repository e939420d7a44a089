"""The token budget of a step that the inter-token target allows, for engines that fix it at their
start.

A new budget restarts the pods. So the first one is taken as soon as it is known, and later ones at
most once a day, and only if they differ by much.
"""

from math import floor, inf, log2

from sluice_core.latency import TARGET_MARGIN, StepLaw

from . import constants as k
from .context import Context, effective_cap
from .types import ChunkBudget, ChunkLimits, Targets


def allowed_chunk(law: StepLaw, targets: Targets, cap: int, limits: ChunkLimits) -> int | None:
    """The largest budget whose step beside `cap` decodes holds the inter-token target with the
    usual margin, within `limits`, to two binary digits. None without a target, or if a prompt
    token costs nothing. `law`: a result of `StepLaw.at_context`."""
    if targets.itl_ms is None:
        return None
    room_ms = TARGET_MARGIN * targets.itl_ms - law.step_ms(cap, 0, 0)
    tokens = room_ms / law.d if law.d > 0 else inf
    return None if tokens == inf else max(limits.least, min(_rounded(tokens), limits.most))


def _rounded(tokens: float) -> int:
    """`tokens` rounded down to 2**n or 3 * 2**n, so that a new fit seldom gives a new value."""
    if tokens < 2:
        return 0
    half: int = 1 << (floor(log2(tokens)) - 1)
    return floor(tokens / half) * half


def proposed_chunk(context: Context) -> int | None:
    """The budget that the step model allows beside the decodes that ran; None if it is unknown."""
    if context.model is None:
        return None
    ran = effective_cap(context.seen.cap, context.recent_ticks)
    limits = context.seen.limits.chunk or ChunkLimits()
    return allowed_chunk(context.model.law, context.seen.targets, ran, limits)


def next_budget(context: Context) -> ChunkBudget | None:
    """The budget for the pods' engines, from the kept one and what the model allows now. None while
    the engines' own one will do, and for another model, device or target than it was kept for."""
    seen, known = context.seen, context.past.chunk_budget
    limits = seen.limits.chunk
    if limits is None:
        return None
    key = f"{limits.key}|{seen.targets.itl_ms}"
    known = known if known is not None and known.key == key else None
    allowed = proposed_chunk(context) if context.fixed_chunk else None
    if allowed is None or not limits.may_roll or seen.targets.mode == "Advisory":
        return known
    tokens, time_s = (known.tokens, known.time_s) if known else (running_budget(context), -inf)
    small, large = sorted((tokens, allowed))
    is_better = large >= k.CHUNK_DIFFERS * small and seen.now - time_s >= k.CHUNK_KEPT_S
    return ChunkBudget(allowed, seen.now, key) if is_better else known


def running_budget(context: Context) -> int:
    """The largest token budget of the pods that run this epoch."""
    configs = [pod.view.config for pod in context.acked]
    return max((c.max_num_batched_tokens for c in configs if c is not None), default=0)
