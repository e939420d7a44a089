"""Step times relative to their mean: independent noise, interference, a leak."""

from random import Random

import numpy as np

from .params import Params

_BLOCK = 4096


class Noise:
    """Factors on step times, reproducible by `seed` in any use."""

    def __init__(self, params: Params, seed: int) -> None:
        self._params = params
        self._normal = np.random.default_rng(seed)
        self._interference = Random(seed)  # noqa: S311 - a simulation
        self._factors: list[float] = []
        self._interference_s = (0.0, 0.0)

    def step_ms(self, mean_ms: float, now_s: float) -> float:
        """Time of a step of `mean_ms` that starts at `now_s`; calls must be in order of time."""
        return mean_ms * self.factor(now_s)

    def factor(self, now_s: float) -> float:
        """Factor of the step that starts at `now_s`; calls must be in order of time."""
        if not self._factors:
            self._factors = self.factors()
        factor = self._factors.pop()
        if self._params.interference_every_s:
            factor *= self._interference_factor(now_s)
        return factor * (1 + self._params.leak_per_hour * now_s / 3600)

    def factors(self) -> list[float]:
        """The next factors without interference and leak, to be used from the last to the first."""
        block: list[float] = np.exp(
            self._params.noise * self._normal.standard_normal(_BLOCK)
        ).tolist()
        return block

    def interference(self) -> tuple[float, float]:
        """Start and end of the next interference; never called if there is none."""
        start_s = self._interference_s[1] + self._interference.expovariate(
            1 / self._params.interference_every_s
        )
        end_s = start_s + self._interference.expovariate(1 / self._params.interference_mean_s)
        self._interference_s = (start_s, end_s)
        return self._interference_s

    def _interference_factor(self, now_s: float) -> float:
        while now_s >= self._interference_s[1]:
            self.interference()
        return self._params.interference_factor if now_s >= self._interference_s[0] else 1.0
