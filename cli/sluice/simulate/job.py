"""A request in a simulated pod, what came of it, and a step under way."""

from dataclasses import dataclass
from typing import NamedTuple

from sluice_worker.evidence import Flight

from .pages import Holding
from .trace import Request


@dataclass(slots=True, eq=False)
class Job:
    """A request in a pod. While it decodes, before step s it has `base` + s tokens."""

    request: Request
    flight: Flight
    holding: Holding
    tokens: int
    computed: int = 0
    trusted: int = 0
    generated: int = 0
    order: int = 0
    cached_tokens: int = 0
    num_preemptions: int = 0
    wait_cap_s: float = 0.0
    wait_kv_s: float = 0.0
    queued_at: tuple[float, float] = (0.0, 0.0)
    is_decoding: bool = False
    base: int = 0
    joined_at: int = 0
    ends_at: int = 0
    first_growth: int = 0
    slow_before: int = 0


class Outcome(NamedTuple):
    """What came of a request. `first_s`, the time of its first token, is infinite without one."""

    t_s: float
    first_s: float
    last_s: float
    num_tokens: int
    num_gaps_over: int


@dataclass(slots=True)
class Step:
    """A step under way; `chunks`: tokens computed of each sequence that does not decode yet."""

    started_s: float
    ends_s: float
    step_ms: float
    epoch: int
    num_decodes: int
    num_kv_tokens: int
    num_prefill_tokens: int
    num_running: int
    at_cap: bool
    chunks: list[tuple[Job, int]]
