"""Pods, the arrivals spread over them, and the policy: in slices of virtual time."""

from collections import deque
from collections.abc import Callable, Sequence
from random import Random
from typing import Protocol

from sluice_core.contract import Slo
from sluice_operator.tuner import Targets

from .params import Params
from .pod import SimulatedPod
from .profile import first_cap, profile, profile_records
from .recording import Totals
from .trace import Request

DRAIN_S = 600.0
"""Seconds that a run may go on after the last arrival; open requests then count as missed."""


class Policy(Protocol):
    """It sets cap and replicas. `first_cap`: None for the prediction of a pod's profile."""

    first_cap: int | None
    every_s: float

    def decide(self, world: "World") -> None:
        """Look at the world at `world.now`, and change it."""


class World:
    """One service under one trace. After `run`, all results are read from it."""

    def __init__(
        self,
        params: Params,
        targets: Targets,
        trace: Sequence[Request],
        policy: Policy,
        seed: int,
        pod_type: type[SimulatedPod] = SimulatedPod,
    ) -> None:
        self.params, self.targets, self.trace, self.policy = params, targets, trace, policy
        self.slo = Slo(targets.ttft_ms, targets.itl_ms, targets.e2e_ms)
        self.now, self.epoch = 0.0, 1
        records = profile_records(params, seed) if pod_type.is_profiled else []
        first = profile(params, records)
        self.cap = policy.first_cap or first_cap(first, self.slo, params.ceiling)
        self.first_cap = self.cap
        self.cap_changes: list[tuple[float, int]] = []
        self.replica_changes: list[tuple[float, int]] = []
        self.num_lost = 0
        self.pod_seconds = 0.0
        self.totals = Totals()
        self.pods: list[SimulatedPod] = []
        self.gone: list[SimulatedPod] = []
        self._pod_type = pod_type
        self._routing, self._seeds = Random(seed), Random(~seed)  # noqa: S311 - a simulation
        self._arrivals = deque(trace)
        self._inboxes: dict[str, deque[Request]] = {}
        for _ in range(params.min_replicas):
            self.add_pod(0.0)

    @property
    def replicas(self) -> int:
        return sum(not pod.terminating for pod in self.pods)

    def run(self, watch: "Callable[[World], None] | None" = None) -> None:
        """Run until everything is answered, or `DRAIN_S` after the last arrival; `watch` is called
        after each slice of time."""
        end_s = self.trace[-1].t_s + DRAIN_S if self.trace else 0.0
        while self.now < end_s and (self._arrivals or not all(pod.is_idle for pod in self.pods)):
            self.advance(self.now + self.policy.every_s)
            self.policy.decide(self)
            if watch is not None:
                watch(self)
        for pod in self.pods:
            pod.run(self.now + 2.0, deque())
            self.pod_seconds += self.now - pod.created_s
        for pod in self.pods + self.gone:
            found = pod.totals
            self.totals.add(found.most_running, found.num_gaps, found.num_gaps_over, found.sketch)

    def advance(self, until_s: float) -> None:
        """Let everything happen up to `until_s`; the policy is not asked."""
        while self._arrivals and self._arrivals[0].t_s <= until_s:
            self._route(self._arrivals.popleft())
        for pod in self.pods:
            if until_s > pod.ready_s:
                pod.run(until_s, self._inboxes[pod.name])
        self.now = until_s
        self._retire()

    def set_cap(self, cap: int) -> None:
        if cap == self.cap:
            return
        self.cap, self.epoch = cap, self.epoch + 1
        self.cap_changes.append((self.now, cap))
        for pod in self.pods:
            pod.patch(cap, self.epoch, max(self.now, pod.ready_s))

    def set_replicas(self, replicas: int) -> None:
        """Add pods, or let the newest drain and leave."""
        if replicas == self.replicas:
            return
        self.replica_changes.append((self.now, replicas))
        while self.replicas < replicas:
            self.add_pod(self.params.cold_start_s)
        for pod in [pod for pod in self.pods if not pod.terminating][replicas:]:
            pod.terminating = True

    def add_pod(self, cold_start_s: float) -> None:
        """Start a pod at the cap in force; it is ready after `cold_start_s`."""
        seed = self._seeds.randrange(1 << 30)
        name = f"pod-{len(self.pods) + len(self.gone) + 1}"
        start_s = self.now + cold_start_s
        self.pods.append(
            self._pod_type(
                name, self.params, self.slo, self.cap, self.epoch, start_s, self.now, seed
            )
        )
        self._inboxes[name] = deque()

    def _route(self, request: Request) -> None:
        serving = [pod for pod in self.pods if pod.ready_s <= request.t_s and not pod.terminating]
        if not serving:
            self.num_lost += 1
            return
        pod = serving[0] if len(serving) == 1 else self.choose(serving)
        self._inboxes[pod.name].append(request)

    def choose(self, serving: Sequence[SimulatedPod]) -> SimulatedPod:
        """The pod of a connection: any, with equal chance, as a Service spreads them."""
        return self._routing.choice(serving)

    def _retire(self) -> None:
        for pod in [pod for pod in self.pods if pod.terminating]:
            if pod.is_idle and not self._inboxes[pod.name]:
                self.pods.remove(pod)
                self.gone.append(pod)
                self.pod_seconds += self.now - pod.created_s
