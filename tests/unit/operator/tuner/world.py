"""The simulator's pods and world (`sluice.simulate`), with the faults that a tuner meets."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from random import Random

from msgspec import structs
from research.policies import Replay
from sluice.simulate import world
from sluice.simulate.delays import Delays
from sluice.simulate.noise import Noise
from sluice.simulate.params import Params
from sluice.simulate.pod import SimulatedPod
from sluice.simulate.trace import Request
from sluice_core.contract import Slo, Tick
from sluice_operator.tuner import PodView
from sluice_operator.tuner.types import Targets


class Shape(Params, frozen=True):
    """What a pod is made of. Its hiccups are stalls of a CPU quota.

    `reports_model`: whether evidence carries the step model. `slow_when_busy`: factor on steps at a
    quarter of the cap and above.
    """

    reports_model: bool = True
    slow_when_busy: float = 1.0


Route = Callable[[Sequence[SimulatedPod], Random], SimulatedPod]
"""Chooses the pod of the next connection."""


class Quota(Delays):
    """Counts the seconds of `delays`, a pod's stalls. `is_over`: there are no more."""

    def __init__(self, delays: Delays) -> None:
        self._inner, self.stalled_s, self.is_over = delays, 0.0, False

    def ms(self, decodes: int, prefill_tokens: int, step_ms: float, now_s: float) -> float:
        if self.is_over:
            return 0.0
        stalled_ms = self._inner.ms(decodes, prefill_tokens, step_ms, now_s)
        self.stalled_s += stalled_ms / 1e3
        return stalled_ms


class Slowed(Noise):
    """The noise of `pod`, and what slows it down."""

    def __init__(self, pod: "Pod", noise: Noise) -> None:
        self._pod, self._inner = pod, noise

    def factor(self, now_s: float) -> float:
        return self._inner.factor(now_s) * self._pod.slowness * self._pod.busy_factor


class Pod(SimulatedPod):
    """`is_deaf`: it misses what is sent to it; `is_silent`: it answers nothing at all."""

    params: Shape
    slowness = 1.0
    is_deaf = is_silent = False
    _said: PodView | None = None

    def meet_faults(self) -> None:
        """Let its faults take effect, which are those of its `params` at first."""
        self.quota = self.delays = Quota(self.delays)
        self.noise = Slowed(self, self.noise)

    @property
    def busy_factor(self) -> float:
        """Factor on its steps now."""
        return self.params.slow_when_busy if 4 * self.num_running >= self.cap else 1.0

    @property
    def num_running(self) -> int:
        return len(self.scheduler.running)

    @property
    def num_waiting(self) -> int:
        return self.recorder.engine.load.waiting

    @property
    def ticks(self) -> list[Tick]:
        return self.recorder.ticks.after(0)

    def patch(self, cap: int, epoch: int, now_s: float) -> None:
        if not (self.is_deaf or self.is_silent):
            super().patch(cap, epoch, now_s)

    def judge_by(self, slo: Slo) -> None:
        """The targets were edited."""
        self.slo, self.scheduler.limits = slo, self._limits()
        self.recorder.ticks.configure(self.epoch, self.cap, slo)

    def view(self, now_s: float) -> PodView:
        """What the operator sees of this pod: of a silent one, what it last said."""
        if self._said is None or not self.is_silent:
            self._said = super().view(now_s)
            if not self.params.reports_model and self._said.evidence is not None:
                evidence = structs.replace(self._said.evidence, step_model=None)
                self._said = replace(self._said, evidence=evidence)
        return replace(self._said, terminating=self.terminating)

    def _advance(self, now_s: float) -> None:
        if self.recorder.ticks.is_due(now_s):
            self.recorder.advance(now_s, now_s, self.quota.stalled_s)


class World(world.World):
    """Such pods under a trace, for a `Loop`. `route`: as the simulator's own if it is None."""

    pods: list[Pod]  # type: ignore[assignment]
    gone: list[Pod]  # type: ignore[assignment]

    def __init__(
        self,
        shape: Shape,
        targets: Targets,
        trace: Iterable[Request],
        *,
        cap: int,
        replicas: int = 1,
        seed: int = 0,
        route: Route | None = None,
    ) -> None:
        params = structs.replace(shape, overload=targets.overload, min_replicas=replicas)
        super().__init__(params, targets, list(trace), Replay(cap, ()), seed, Pod)
        self._route_of, self._random = route, Random(seed)

    def add_pod(self, cold_start_s: float) -> None:
        super().add_pod(cold_start_s)
        self.pods[-1].meet_faults()

    def choose(self, serving: Sequence[SimulatedPod]) -> SimulatedPod:
        if self._route_of is None:
            return super().choose(serving)
        return self._route_of(serving, self._random)

    def patch(self) -> None:
        """Send cap and epoch to the pods that do not run them, as each pass of the rim does."""
        for pod in self.pods:
            if (pod.cap, pod.epoch) != (self.cap, self.epoch):
                pod.patch(self.cap, self.epoch, max(self.now, pod.ready_s))

    def set_targets(self, targets: Targets) -> None:
        """Edit the targets live."""
        self.targets = targets
        self.slo = Slo(targets.ttft_ms, targets.itl_ms, targets.e2e_ms)
        for pod in self.pods:
            pod.judge_by(self.slo)
