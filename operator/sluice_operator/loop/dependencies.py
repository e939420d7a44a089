"""What the reconcilers of one operator share."""

import asyncio
import time
from dataclasses import dataclass, field

import httpx

from ..children.manifests import MANAGED_BY, MANAGED_BY_LABEL, SEEN
from ..cluster.child_store import ChildStore
from ..cluster.client import Cluster
from ..cluster.roster import Roster
from ..metrics import Metrics
from ..pods.scrape import MAX_OPEN
from ..settings import Settings
from ..spec.batch import BATCH_KIND
from ..spec.service import KIND
from ..status.write_limiter import WriteTurns
from .children import SWEEP_RESYNCS


@dataclass(frozen=True, slots=True)
class Dependencies:
    """All that the reconcilers of one operator share."""

    settings: Settings
    cluster: Cluster
    client: httpx.AsyncClient
    metrics: Metrics
    store: ChildStore
    turns: WriteTurns = field(default_factory=lambda: WriteTurns(time.monotonic))
    exchanges: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(MAX_OPEN))
    roster: Roster = field(init=False)

    def __post_init__(self) -> None:
        ours = f"{MANAGED_BY_LABEL}={MANAGED_BY}"
        labels = {KIND: "", BATCH_KIND: "", **dict.fromkeys(SEEN, ours)}
        every_s = SWEEP_RESYNCS * self.settings.resync_s
        is_one = not self.settings.namespaces
        roster = Roster(self.cluster, labels, every_s, is_one=is_one)
        object.__setattr__(self, "roster", roster)
