"""What a newcomer would wait, and how fast it would then get its tokens. Pure.

Departures free places: with `places` sequences in service for `service_s` each, one leaves every
service_s / places seconds, whatever the arrivals do. A rate of completions would read an idle
minute as slowness.
"""

from dataclasses import dataclass

from ..contract import StepModel


@dataclass(frozen=True, slots=True)
class Forecast:
    """The present load. `num_open`: sequences submitted and not ended, of which some wait.

    `service_s`: mean time from admission to end of those that ended lately; None before the first.
    `kv_per_seq`: tokens of an average sequence.
    """

    num_open: int
    num_running: int
    num_waiting: int
    cap: int
    service_s: float | None
    step_model: StepModel | None
    kv_per_seq: float

    def wait_s(self, num_new: int) -> float:
        """Seconds until the last of `num_new` sequences that come now has a place.

        0 also where nothing is known yet: then waiting is the only way to find out.
        """
        if self.service_s is None:
            return 0.0
        # Where some wait below the cap they wait for memory: then there are no more places.
        places = self.cap
        if self.num_waiting and 0 < self.num_running < self.cap:
            places = self.num_running
        departures = self.num_open + num_new - places
        # Those above a cap that was lowered leave at the same time as the others.
        return max(departures, 0) * self.service_s / max(places, self.num_running)

    def tpot_ms(self, num_new: int) -> float | None:
        """Time of a step that decodes everyone, newcomers included; None without a step model."""
        if self.step_model is None:
            return None
        decodes = min(self.num_open + num_new, self.cap)
        return self.step_model.step_ms(decodes, self.kv_per_seq * decodes, 0)
