"""What a pod is to the world and its policies: asked to run, patched, scraped."""

from abc import ABC, abstractmethod
from collections import deque
from typing import NamedTuple

from sluice_core.contract import MemoryReport, RuntimeConfig, Slo, Waiting
from sluice_operator.tuner import PodView

from .noise import Noise
from .params import Params
from .profile import profile, profile_records
from .recording import Recording, Totals
from .trace import Request

REFIT_S = 1.0


class Outcome(NamedTuple):
    """What came of a request. `first_s`, the time of its first token, is infinite without one."""

    t_s: float
    first_s: float
    last_s: float
    num_tokens: int
    num_gaps_over: int


class Scraped(ABC):
    """One worker. `run` makes time pass, `patch` changes its cap, `view` is what is scraped."""

    _recording: type[Recording] = Recording

    def __init__(
        self,
        name: str,
        params: Params,
        slo: Slo,
        cap: int,
        epoch: int,
        start_s: float = 0.0,
        created_s: float = 0.0,
        seed: int = 0,
    ) -> None:
        self.name, self.params, self.ready_s, self.created_s = name, params, start_s, created_s
        self.noise = Noise(params, seed)
        self.profiled = profile_records(params, seed)
        self.times = profile(self.profiled)
        self.cap, self.epoch, self.slo = cap, epoch, slo
        self.terminating = False
        self._recorder = self._recording(name, start_s, start_s)
        self._recorder.ticks.start(epoch, cap, slo)
        self._recorder.engine.step_model = self.times.model
        num_blocks = params.kv_tokens // params.block_size
        self._recorder.engine.memory = MemoryReport({}, {}, num_blocks * params.block_size)
        self._prepare(start_s)

    @abstractmethod
    def _prepare(self, start_s: float) -> None:
        """Set up what is its own."""

    @property
    @abstractmethod
    def is_idle(self) -> bool:
        """Whether nothing runs or waits."""

    @property
    @abstractmethod
    def num_refused(self) -> int:
        """Requests that were turned away."""

    @property
    @abstractmethod
    def num_preemptions(self) -> int:
        """How often one had to give its blocks back."""

    @property
    def recorder(self) -> Recording:
        """The evidence up to the end of the last `run`."""
        return self._recorder

    @property
    def totals(self) -> Totals:
        """Of all closed ticks."""
        return self._recorder.totals

    @abstractmethod
    def run(self, until_s: float, arrivals: deque[Request]) -> None:
        """Let everything happen that happens up to `until_s`, the first of `arrivals` included."""

    @abstractmethod
    def patch(self, cap: int, epoch: int, now_s: float) -> None:
        """A new cap, from the next step on; the excess drains."""

    @abstractmethod
    def outcomes(self) -> tuple[list[Outcome], list[Outcome]]:
        """What came of those that ended, in that order, and how far those are that did not."""

    def view(self, now_s: float) -> PodView:
        """What the operator sees."""
        if now_s < self.ready_s:
            return PodView(self.name, False, False, None, None, self.created_s)
        recorder = self.recorder
        state = recorder.engine.snapshot
        config = RuntimeConfig(
            epoch=self.epoch,
            max_num_seqs=self.cap,
            max_num_batched_tokens=self.params.max_num_batched_tokens,
            slo=self.slo,
            overload=self.params.overload,
            scheduling_policy=self.params.order,
            ceiling=self.params.ceiling,
            running=state.running,
            waiting=Waiting(state.waiting_cap, state.waiting_kv),
            boot_id=self.name,
        )
        ready, evidence = not self.terminating, recorder.evidence(0)
        return PodView(self.name, ready, self.terminating, evidence, config, self.created_s, now_s)
