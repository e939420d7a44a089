"""A newcomer's wait, and the speed of its tokens after that. Pure.

Departures free places: with `places` sequences in service for `service_s` each, one leaves every
service_s / places seconds. A rate of completions would mistake an idle minute for slowness.

Under first come, first served a newcomer waits for all open sequences. With an order it waits only
for those served before it, and late ones let it pass. Other clients have shares of their own.
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from heapq import nlargest

from sluice_core.contract import StepModel
from sluice_core.ordering import Pace, Terms, before
from sluice_core.work import Work

from ..evidence.recorder import Recorder
from ..evidence.requests import RequestTimer
from .limits import RuntimeLimits

MAX_RETRY_AFTER_S = 60
MOST_PROMPTS = 1024
"""Prompts of one request whose places in the order are found."""


@dataclass(frozen=True, slots=True)
class Forecast:
    """The present load. `num_open`: sequences submitted and not ended; some of them wait.

    `service_s`: recent mean time from admission to end; None before the first. `kv_per_seq`: tokens
    of an average sequence. `num_behind`: open sequences that let a newcomer pass. `ahead_s`: time
    of the prompts before it.
    """

    num_open: int
    num_running: int
    num_waiting: int
    cap: int
    service_s: float | None
    step_model: StepModel | None
    kv_per_seq: float
    num_behind: int = 0
    ahead_s: float = 0.0

    def behind(
        self, newcomer: Terms, pending: Sequence[Terms], now_s: float, price_s: float
    ) -> "Forecast":
        """The same for a newcomer to the line of `pending` requests without a first token.

        `price_s`: time of a unit of work. A sequence with a first token keeps its place.
        """
        num_decoding = max(self.num_open - len(pending), 0)
        free = self._places - num_decoding
        pace = Pace(price_s, (self.service_s or 0.0) / self._places, free)
        first = before(newcomer, pending, now_s, pace)
        return replace(
            self,
            num_running=min(self.num_running, max(self.cap, num_decoding)),
            num_behind=len(pending) - len(first),
            ahead_s=price_s * sum(job.work for job in first),
        )

    @property
    def _places(self) -> int:
        """The cap, or the number that run if some wait for memory below the cap."""
        if self.num_waiting and 0 < self.num_running < self.cap:
            return self.num_running
        return self.cap

    def wait_s(self, num_new: int) -> float:
        """Seconds until the last of `num_new` sequences that come now is served; 0 if nothing is
        known yet."""
        return max(self.place_s(num_new), self.ahead_s)

    def place_s(self, num_new: int) -> float:
        """Seconds until the last of them has a place."""
        if self.service_s is None:
            return 0.0
        places = self._places
        departures = self.num_open - self.num_behind + num_new - places
        # Sequences above a lowered cap leave at the same time as the others.
        return max(departures, 0) * self.service_s / max(places, self.num_running)

    def tpot_ms(self, num_new: int) -> float | None:
        """Time of a step that decodes all, newcomers included; None without a step model."""
        if self.step_model is None:
            return None
        decodes = min(self.num_open + num_new, self.cap)
        return self.step_model.step_ms(decodes, self.kv_per_seq * decodes, 0)


def forecast_of(recorder: Recorder, live: RuntimeLimits, num_open: int) -> Forecast:
    engine = recorder.engine
    return Forecast(
        num_open=num_open,
        num_running=engine.load.running,
        num_waiting=engine.load.waiting,
        cap=live.cap,
        service_s=recorder.recent.service_s(),
        step_model=engine.step_model,
        kv_per_seq=recorder.recent.lengths().mean,
    )


def forecast_for(
    recorder: Recorder,
    live: RuntimeLimits,
    num_open: int,
    work: Work,
    *,
    arrival_s: float,
    now_s: float,
) -> Forecast:
    """Make the forecast for the longest prompt of `work`; its prompts come together. Clients take
    turns: of each other one, no more go first than of its own, and those with a place."""
    client = work.client
    own = [timer for timer in recorder.requests.pending.values() if timer.client == client]
    num_others = len(recorder.requests.pending) - len(own)
    longest = nlargest(MOST_PROMPTS, work.prompts)
    forecast, engine = forecast_of(recorder, live, num_open), recorder.engine
    limits = live.for_engine()
    if limits.policy == "fcfs" or live.overload == "Shed":
        # By arrival, or without late ones: all open sequences of the client go first.
        first = _others_first(recorder, client, len(own) + len(longest))
        return replace(forecast, num_behind=num_others - len(first))

    def terms(priority: int, ttft_ms: float | None, arrived_s: float, tokens: int) -> Terms:
        due_s = limits.due_s(arrived_s, ttft_ms)
        return Terms(priority, due_s, arrived_s, engine.uncached(tokens))

    ttft_ms = work.deadlines.ttft_ms
    newcomer, *rest = (terms(work.priority, ttft_ms, arrival_s, num) for num in longest)
    pending = rest + [
        terms(f.priority, f.ttft_ms, f.arrival_s, 0 if f.is_another else f.num_prompt_tokens)
        for f in own
    ]
    alone = replace(forecast, num_open=num_open - num_others)
    found = alone.behind(newcomer, pending, now_s, engine.price_s)
    first = _others_first(recorder, client, len(pending) - found.num_behind + 1)
    num_tokens = sum(engine.uncached(f.num_prompt_tokens) for f in first if not f.is_another)
    num_behind = found.num_behind + num_others - len(first)
    ahead_s = found.ahead_s + engine.price_s * num_tokens
    return replace(found, num_open=num_open, num_behind=num_behind, ahead_s=ahead_s)


def _others_first(recorder: Recorder, client: str, num_turns: int) -> list[RequestTimer]:
    """Other clients' sequences without a first token that are served before the `num_turns`-th of
    `client`: with a place, or among the first so many of their client."""
    num_of: Counter[str] = Counter()
    first = []
    for timer in recorder.requests.pending.values():
        if timer.client == client:
            continue
        num_of[timer.client] += timer.admitted_s is None
        if timer.admitted_s is not None or num_of[timer.client] <= num_turns:
            first.append(timer)
    return first


def retry_after_s(wait_s: float) -> int:
    """The predicted wait as a Retry-After."""
    return min(max(1, math.ceil(wait_s)), MAX_RETRY_AFTER_S)
