"""All that a server measures, before there is an engine."""

import time
import uuid

from sluice_core.contract import Slo

from .health import Liveness
from .ledger import Ledger
from .metrics import Statistics
from .recorder import Recorder


class Measured:
    """The engine's liveness, and the books of requests, steps and answers."""

    def __init__(self, slo: Slo) -> None:
        """slo: the targets that the flags name; histograms have an edge at each."""
        now_s, self.created_s = time.monotonic(), time.time()
        self.liveness = Liveness(now_s, self.created_s)
        self.recorder = Recorder(uuid.uuid4().hex, now_s, self.created_s)
        self.stats = Statistics(slo, self.created_s)
        self.ledger = Ledger(self.recorder, self.stats)
