"""The class that vLLM is given. Importing this needs vLLM; `control` does all the work."""

from typing import Any

import vllm
from vllm.v1.core.sched import async_scheduler, scheduler

from .control import attach


class _Steered:
    """Stock methods, with the control's calls around them."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._sluice = attach(self, scheduler.Scheduler, vllm.__version__)

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        if self._sluice is None:
            return super().schedule(*args, **kwargs)  # type: ignore[misc]
        started_s = self._sluice.before_step()
        output = super().schedule(*args, **kwargs)  # type: ignore[misc]
        self._sluice.scheduled(output, started_s)
        return output

    def _reserve_prefill_lookahead(
        self, request: Any, num_computed_tokens: int, num_new_tokens: int
    ) -> Any:
        if self._sluice is not None:
            num_new_tokens = self._sluice.trim(request, num_computed_tokens, num_new_tokens)
        given = (request, num_computed_tokens, num_new_tokens)
        return super()._reserve_prefill_lookahead(*given)  # type: ignore[misc]

    def update_from_output(self, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        outputs = super().update_from_output(scheduler_output, *args, **kwargs)  # type: ignore[misc]
        if self._sluice is not None:
            self._sluice.ended(scheduler_output)
        return outputs


class SyncScheduler(_Steered, scheduler.Scheduler):
    """For an engine that ends each step before it schedules the next."""


class Scheduler(_Steered, async_scheduler.AsyncScheduler):
    """For all engines: where async scheduling is off, a `SyncScheduler` is made."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """`args`: vLLM's configuration first, or as `vllm_config`."""
        config = kwargs["vllm_config"] if "vllm_config" in kwargs else args[0]
        if not config.scheduler_config.async_scheduling:
            return SyncScheduler(*args, **kwargs)
        return super().__new__(cls)
