"""A scheduler that behaves as vLLM's, as far as `sluice_vllm` uses it; steps may overlap.

Its loops are those of `vllm/v1/core/sched/scheduler.py` (0.32) with blocks of KV tokens, without
all that `sluice_vllm` never meets.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum, auto
from types import SimpleNamespace
from typing import Any

CEILING, TOKENS = 32, 512


class Status(Enum):
    """vLLM's, as far as it matters."""

    WAITING = auto()
    RUNNING = auto()
    PREEMPTED = auto()


@dataclass(eq=False)
class Request:
    """A request of vLLM's. `num_cached`: tokens that it finds in the prefix cache.

    `num_output_placeholders`: of its tokens in steps under way; `num_stale_output_tokens`: those
    that were under way when it was preempted.
    """

    request_id: str
    prompt: int = 100
    num_computed_tokens: int = 0
    is_prefill_chunk: bool = False
    num_preemptions: int = 0
    arrival_time: float = 0.0
    priority: int = 0
    sampling_params: Any = None
    max_tokens: int = 16
    num_cached: int = 0
    num_output_tokens: int = 0
    num_output_placeholders: int = 0
    num_stale_output_tokens: int = 0
    status: Status = Status.WAITING

    @property
    def num_tokens(self) -> int:
        return self.prompt + self.num_output_tokens

    @property
    def is_complete(self) -> bool:
        """True if its last token is under way."""
        ahead = self.num_computed_tokens + 2 - self.num_output_placeholders
        return self.num_output_placeholders > 0 and ahead >= self.prompt + self.max_tokens


def _as_it_is(request: Request, num_computed: int, num_new: int) -> int:
    return num_new


@dataclass
class Scheduler:
    """vLLM's. `trim`: what is asked for the tokens of a prompt. `num_blocks`: of `block_size`."""

    running: list[Request] = field(default_factory=list)
    waiting: deque[Request] = field(default_factory=deque)
    requests: dict[str, Request] = field(default_factory=dict)
    max_num_running_reqs: int = CEILING
    max_num_active_reqs: int = CEILING
    max_num_scheduled_tokens: int = TOKENS
    num_spec_tokens: int = 0
    max_model_len: int = 2048
    block_size: int = 16
    num_blocks: int = 1000
    num_prefill_lookahead: int = 0
    trim: Callable[[Request, int, int], int] = _as_it_is
    scheduler_config: Any = field(
        default_factory=lambda: SimpleNamespace(enable_chunked_prefill=True)
    )

    def __post_init__(self) -> None:
        self.cache_config = SimpleNamespace(num_gpu_blocks=self.num_blocks)
        self.kv_cache_manager: Any = self
        self.num_empty = 0
        self._blocks: dict[Request, int] = {}

    @property
    def usage(self) -> float:
        """Of the KV cache."""
        return sum(self._blocks.values()) / self.num_blocks

    def get_request_counts(self) -> tuple[int, int]:
        return len(self.running), len(self.waiting)

    def get_num_unfinished_requests(self) -> int:
        return len(self.running) + len(self.waiting)

    def come(self, *requests: Request) -> None:
        self.waiting.extend(requests)
        self.requests.update({request.request_id: request for request in requests})

    def abort(self, request: Request) -> None:
        (self.waiting if request in self.waiting else self.running).remove(request)
        self._leave(request)

    def schedule(self) -> Any:
        """As `Scheduler.schedule`, then `_update_after_schedule`."""
        self._budget, self._numbers = self.max_num_scheduled_tokens, dict[str, int]()
        self._preempted = list[str]()
        self._serve_running()
        if not self._preempted:
            self._admit()
        total = sum(self._numbers.values())
        self.num_empty += not total
        sampled = [name for name, count in self._numbers.items() if self._advance(name, count)]
        return SimpleNamespace(
            num_scheduled_tokens=self._numbers,
            total_num_scheduled_tokens=total,
            preempted_req_ids=set(self._preempted),
            sampled=sampled,
        )

    def end(self, output: Any) -> None:
        """As `update_from_output`: who sampled has a token, and ends with its last one."""
        for name in output.sampled:
            request = self.requests.get(name)
            if request is None:
                continue
            request.num_output_tokens += 1
            if request.num_stale_output_tokens:
                request.num_stale_output_tokens -= 1
            else:
                request.num_output_placeholders -= 1
            if request.num_output_tokens >= request.max_tokens:
                self.abort(request)

    def _serve_running(self) -> None:
        place = 0
        while place < len(self.running) and self._budget > 0:
            request = self.running[place]
            place += 1
            ready = request.num_tokens + request.num_output_placeholders
            count = min(ready - request.num_computed_tokens, self._budget)
            count = self._reserve(request, request.num_computed_tokens, count)
            if count and not request.is_complete:
                while not (fits := self._allocate(request, count)):
                    victim = self.running.pop()
                    self._preempt(victim)
                    if victim is request:
                        break
                if not fits:
                    return
                self._take(request, count)

    def _admit(self) -> None:
        skipped = list[Request]()
        while self._budget > 0 and self.waiting and len(self.running) < self.max_num_active_reqs:
            request = self.waiting[0]
            if request.num_stale_output_tokens:
                skipped.append(self.waiting.popleft())
                continue
            computed = request.num_computed_tokens or request.num_cached
            count = min(request.num_tokens - computed, self._budget)
            count = self._reserve(request, computed, count)
            if not count or not self._allocate(request, computed + count):
                break
            self.running.append(self.waiting.popleft())
            request.status, request.num_computed_tokens = Status.RUNNING, computed
            self._take(request, count)
        self.waiting.extendleft(reversed(skipped))

    def _reserve(self, request: Request, computed: int, count: int) -> int:
        """`_reserve_prefill_lookahead`, with what stands before it."""
        count = self.trim(request, computed, count)
        remaining = request.num_tokens - computed - count
        if 0 < remaining < self.num_prefill_lookahead:
            count -= self.num_prefill_lookahead - remaining
        return max(count, 0)

    def _take(self, request: Request, count: int) -> None:
        self._numbers[request.request_id] = count
        self._budget -= count

    def _advance(self, name: str, count: int) -> bool:
        """Book its tokens; True if it samples."""
        request = self.requests[name]
        request.num_computed_tokens += count
        ready = request.num_tokens + request.num_output_placeholders
        request.is_prefill_chunk = request.num_computed_tokens < ready
        request.num_output_placeholders += not request.is_prefill_chunk
        return not request.is_prefill_chunk

    def _allocate(self, request: Request, count: int) -> bool:
        has = self._blocks.get(request, 0)
        needs = -(-(request.num_computed_tokens + count) // self.block_size)
        if sum(self._blocks.values()) - has + needs > self.num_blocks:
            return False
        self._blocks[request] = max(needs, has)
        return True

    def _preempt(self, request: Request) -> None:
        del self._blocks[request]
        request.status, request.num_computed_tokens = Status.PREEMPTED, 0
        request.num_stale_output_tokens = request.num_output_placeholders
        request.num_output_placeholders = 0
        request.num_preemptions += 1
        self.waiting.appendleft(request)
        self._preempted.append(request.request_id)

    def _leave(self, request: Request) -> None:
        self._blocks.pop(request, None)
        del self.requests[request.request_id]
