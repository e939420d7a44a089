"""Bursts in virtual time: what the budget does to gaps and to throughput, beside vLLM's own.

Steps cost what the measured ones of an 88M model on two processors do, with noise and hiccups.
"""

import random
from collections import deque
from dataclasses import dataclass

import pytest
from sluice_core.steptime import StepRecord
from sluice_core.wire import EngineLimits
from sluice_vllm.budget import Budget

CAP, TOKENS = 16, 2048
STEP_MS, DECODE_MS, KV_MS, PREFILL_MS = 12.0, 0.8, 0.0003, 0.2
TARGET_MS = 44.0


@dataclass(eq=False)
class Request:
    """One of a burst; `last_s`: of its newest token."""

    at_s: float
    prompt: int
    output: int
    computed: int = 0
    made: int = 0
    last_s: float = 0.0


class Machine:
    """vLLM's scheduling of `requests`, with the budget of each step by `budget`, or its own."""

    def __init__(self, requests: list[Request], budget: Budget | None) -> None:
        self._coming, self._budget = deque(requests), budget
        self._noise = random.Random(7)
        self.now_s, self.gaps_ms = 0.0, list[float]()
        self._waiting, self._running = deque[Request](), list[Request]()
        self._num_tokens = sum(request.output for request in requests)

    def tokens_per_s(self) -> float:
        """All requests, to their ends."""
        while self._coming or self._waiting or self._running:
            if not self._waiting and not self._running:
                self.now_s = max(self.now_s, self._coming[0].at_s)
            while self._coming and self._coming[0].at_s <= self.now_s:
                self._waiting.append(self._coming.popleft())
            self._step()
        return self._num_tokens / self.now_s

    def _step(self) -> None:
        decodes = [r for r in self._running if r.computed >= r.prompt]
        chunks = [r for r in self._running if r.computed < r.prompt]
        kv_tokens = sum(r.prompt + r.made for r in decodes)
        limits = EngineLimits(0, CAP, TOKENS, itl_ms=TARGET_MS)
        budget = TOKENS
        if self._budget is not None and (chunks or self._waiting):
            budget = self._budget.tokens(limits, len(decodes), kv_tokens)
        left = budget - len(decodes)
        while left > 0 and self._waiting and len(self._running) < CAP:
            self._running.append(self._waiting.popleft())
            chunks.append(self._running[-1])
            left -= chunks[-1].prompt
        prefill = 0
        for request in chunks:
            count = min(request.prompt - request.computed, budget - len(decodes) - prefill)
            request.computed += count
            prefill += count
        self._pass(decodes, kv_tokens + len(decodes) + prefill, prefill)
        for request in [*decodes, *(r for r in chunks if r.computed >= r.prompt)]:
            if request.made:
                self.gaps_ms.append(1e3 * (self.now_s - request.last_s))
            request.made, request.last_s = request.made + 1, self.now_s
        self._running = [r for r in self._running if r.made < r.output]

    def _pass(self, decodes: list[Request], kv_tokens: int, prefill: int) -> None:
        step_ms = STEP_MS + DECODE_MS * len(decodes) + KV_MS * kv_tokens + PREFILL_MS * prefill
        step_ms *= self._noise.gauss(1.0, 0.03)
        if self._noise.random() < 0.003:
            step_ms += 15.0
        self.now_s += step_ms / 1e3
        if self._budget is not None:
            self._budget.learn(StepRecord(self.now_s, len(decodes), kv_tokens, prefill, step_ms))


def bursts(num: int, every_s: float) -> list[Request]:
    lengths = random.Random(1)
    return [
        Request(burst * every_s, lengths.randint(64, 768), lengths.randint(32, 128))
        for burst in range(num)
        for _ in range(CAP)
    ]


@pytest.mark.parametrize("every_s", [8.0, 4.0, 2.0])
def test_bursts_keep_the_target_and_the_throughput(every_s: float) -> None:
    stock, steered = Machine(bursts(6, every_s), None), Machine(bursts(6, every_s), Budget())
    assert steered.tokens_per_s() >= 0.94 * stock.tokens_per_s()
    p99_ms = [sorted(each.gaps_ms)[int(0.99 * len(each.gaps_ms))] for each in (stock, steered)]
    assert p99_ms[1] <= 1.1 * TARGET_MS
    assert p99_ms[1] <= 0.5 * p99_ms[0]
