"""What single steps take beside their mean and its noise: hiccups, stalls, unrehearsed sizes."""

from bisect import bisect_left
from math import inf
from random import Random

from sluice_worker.execution.gpu.capture import graph_sizes

from .params import Params

_SIZES = graph_sizes(1 << 20)
FIRST_SPREAD = 0.2
"""Share by which `first_size_ms` varies to both sides."""


class Delays:
    """Delays of a pod's steps, reproducible by `seed`; each kind is drawn by itself."""

    def __init__(self, params: Params, seed: int) -> None:
        self._params = params
        self._hiccups, self._stalls, self._firsts = (
            Random(f"{kind} {seed}")  # noqa: S311 - a simulation
            for kind in ("hiccups", "stalls", "first sizes")
        )
        self._met: set[tuple[bool, int]] = set()
        self._stall_s = 0.0
        self._stall = self._next_stall()

    def ms(self, decodes: int, prefill_tokens: int, step_ms: float, now_s: float) -> float:
        """Delay of a step of `step_ms` that starts at `now_s`; calls must be in order of time."""
        own_ms = self._hiccup_ms() + self._first_ms(decodes, prefill_tokens)
        return own_ms + self._stalled_ms(now_s, now_s + (step_ms + own_ms) / 1e3)

    def _hiccup_ms(self) -> float:
        params = self._params
        if not params.hiccup_share or self._hiccups.random() >= params.hiccup_share:
            return 0.0
        return params.hiccup_ms

    def _first_ms(self, decodes: int, prefill_tokens: int) -> float:
        if not self._params.first_size_ms:
            return 0.0
        rows = decodes + prefill_tokens
        size = bool(prefill_tokens), rows if prefill_tokens else bisect_left(_SIZES, rows)
        if size in self._met:
            return 0.0
        self._met.add(size)
        return self._params.first_size_ms * self._firsts.uniform(1 - FIRST_SPREAD, 1 + FIRST_SPREAD)

    def _stalled_ms(self, start_s: float, end_s: float) -> float:
        """Stalls in the step from `start_s` to `end_s`, which end later by them."""
        stalled_s = 0.0
        while self._stall[0] < end_s + stalled_s:
            at_s, lasts_s = self._stall
            stalled_s += max(0.0, at_s + lasts_s - max(at_s, start_s))
            self._stall = self._next_stall()
        return 1e3 * stalled_s

    def _next_stall(self) -> tuple[float, float]:
        """When it begins, and the seconds that it lasts."""
        params = self._params
        if not params.stall_every_s:
            return inf, 0.0
        self._stall_s += self._stalls.expovariate(1 / params.stall_every_s)
        return self._stall_s, self._stalls.uniform(*params.stall_ms) / 1e3
