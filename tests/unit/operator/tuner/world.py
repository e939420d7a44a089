"""A discrete-event world of model pods: a trace arrives, ticks close, pods start and drain.

Virtual clock, no I/O, thousands of times faster than life. Times are seconds.
"""

import heapq
from collections.abc import Callable, Iterable, Sequence
from random import Random

from sluice_core.contract import TICK_SECONDS
from sluice_operator.tuner.types import Targets
from unit.operator.tuner.podmodel import Pod, Request, Shape

Route = Callable[[Sequence[Pod], Request, Random], Pod]


def spread(pods: Sequence[Pod], request: Request, random: Random) -> Pod:
    """Every connection is a new one: any pod, with equal chance."""
    return random.choice(pods)


class World:
    """Pods, a trace, and a virtual clock. `run_until` calls `control` at every `control_s`."""

    def __init__(
        self,
        shape: Shape,
        targets: Targets,
        trace: Iterable[Request],
        *,
        cap: int,
        replicas: int = 1,
        seed: int = 0,
        route: Route = spread,
    ) -> None:
        self.shape, self.targets, self.route = shape, targets, route
        self.cap, self.epoch = cap, 1
        self.now, self.num_ticks, self.num_created = 0.0, 0, 0
        self.random = Random(seed)
        self.pods: list[Pod] = []
        self.gone: list[Pod] = []
        self.lost = 0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = 0
        self._trace = iter(trace)
        for _ in range(replicas):
            self.add_pod(cold_start_s=0.0)
        self._at(TICK_SECONDS, self._close_ticks)
        self._next_arrival()

    def _at(self, time_s: float, action: Callable[[], None]) -> None:
        self._order += 1
        heapq.heappush(self._events, (time_s, self._order, action))

    def _next_arrival(self) -> None:
        request = next(self._trace, None)
        if request is not None:
            self._at(request.t_s, lambda: self._arrive(request))

    def _arrive(self, request: Request) -> None:
        pods = [pod for pod in self.serving if not pod.terminating]
        if pods:
            pod = self.route(pods, request, self.random)
            pod.receive(request, self.now)
            self._run(pod)
        else:
            self.lost += 1
        self._next_arrival()

    def _run(self, pod: Pod) -> None:
        end_s = pod.begin_step(self.now)
        if end_s is not None:
            self._at(end_s, lambda: self._end_step(pod))

    def _end_step(self, pod: Pod) -> None:
        pod.end_step(self.now)
        self._run(pod)

    def _close_ticks(self) -> None:
        self.num_ticks += 1
        for pod in self.serving:
            pod.close_tick(self.now, self.num_ticks)
        done = [pod for pod in self.pods if pod.terminating and pod.is_idle]
        self.gone.extend(done)
        self.pods = [pod for pod in self.pods if pod not in done]
        self._at(self.now + TICK_SECONDS, self._close_ticks)

    @property
    def serving(self) -> list[Pod]:
        """Pods that are up, also those that only drain."""
        return [pod for pod in self.pods if pod.ready_s is not None and self.now >= pod.ready_s]

    @property
    def replicas(self) -> int:
        """Pods asked for."""
        return sum(not pod.terminating for pod in self.pods)

    def add_pod(self, cold_start_s: float | None = None) -> Pod:
        """A new pod starts at its peers' cap and epoch and is ready after the cold start."""
        self.num_created += 1
        seed = self.random.randrange(1 << 30)
        name = f"pod-{self.num_created}"
        pod = Pod(name, self.shape, self.targets, self.cap, self.epoch, seed)
        pod.ready_s = self.now + (self.shape.cold_start_s if cold_start_s is None else cold_start_s)
        self.pods.append(pod)
        return pod

    def set_replicas(self, replicas: int) -> None:
        """Add pods, or let the newest drain and leave."""
        while self.replicas < replicas:
            self.add_pod()
        staying = [pod for pod in self.pods if not pod.terminating]
        for pod in staying[replicas:]:
            pod.terminating = True

    def set_cap(self, cap: int) -> None:
        """Change the cap of every pod, under a new epoch."""
        self.cap, self.epoch = cap, self.epoch + 1
        self.patch()

    def patch(self) -> None:
        """Send cap and epoch to the pods that do not run them, as each pass of the rim does."""
        for pod in self.pods:
            if (pod.cap, pod.epoch) == (self.cap, self.epoch):
                continue
            pod.patch(self.cap, self.epoch)
            if pod in self.serving:
                self._run(pod)

    def set_targets(self, targets: Targets) -> None:
        """Edit the targets live."""
        self.targets = targets
        for pod in self.pods:
            pod.targets = targets

    def run_until(self, end_s: float) -> None:
        """Let everything happen that happens before `end_s`."""
        while self._events and self._events[0][0] <= end_s:
            self.now, _, action = heapq.heappop(self._events)
            action()
        self.now = end_s
