"""*rim*: works on the batches of a directory while the server lives, one at a time.

Processes that share the directory agree by locks: whoever has a batch's lock works on it, and once
that process is gone another one does.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import ExitStack, suppress
from functools import partial

from sluice_core.errors import told
from starlette.types import ASGIApp

from ..api.batches import BatchProblem, Ending
from ..serving.admission import most_background
from ..serving.runtime import Runtime
from .files import Files
from .index import Index
from .inside import Inside
from .lines import JsonLines
from .outputs import Outputs
from .records import Claim, Record, Records
from .results import WriteError
from .run import IN_FLIGHT, Run
from .work import Broken, broken, check, count, end, indexed, mark_done

log = logging.getLogger(__name__)
MOST_BYTES = 32 << 20
"""Bytes of lines under way."""
LOOK_S = 2.0
"""Seconds between two looks at the directory: other processes may have made or left a batch."""
TICK_S = 1.0
LEAVE_S = 5.0
"""Seconds in which requests that were left must have ended."""
PAUSE_S = 30.0
"""Seconds until a batch is tried again after the directory could not be read or written."""
SWEEP_S = 3600.0


class Left(Exception):
    """Requests that were left have not ended."""


class Runner:
    """Sends the lines of batches, as many as there is room for."""

    def __init__(self, files: Files, records: Records, runtime: Runtime) -> None:
        self._files, self._records, self._runtime = files, records, runtime
        self._news = asyncio.Event()

    def wake(self) -> None:
        """Look at the directory now."""
        self._news.set()

    async def run(self, app: ASGIApp) -> None:
        """Send lines through `app` until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            for job in (self._settle, partial(self._send_next, app), self._sweep):
                tasks.create_task(_for_ever(job))

    @property
    def _is_draining(self) -> bool:
        return self._runtime.engine_liveness.is_draining

    def _most(self) -> int:
        """Lines under way at most. Background work may have all places, and half of the queue."""
        facts = self._runtime.backend.facts
        if facts is None or self._is_draining:
            return 0
        most = most_background(self._runtime.config, facts.ceiling)
        return min(IN_FLIGHT * facts.ceiling, most)

    # -- what needs no engine

    async def _settle(self) -> None:
        """Check new batches, and end those that were to end and that nobody works on."""
        self._news.clear()
        for record in await asyncio.to_thread(self._records.live):
            batch = record.batch
            is_due = record.ending or record.is_expired or batch.status == "validating"
            if is_due or self._records.cancelled_s(batch.id) is not None:
                try:
                    await asyncio.to_thread(self._settled, batch.id)
                except Exception:  # the others go on
                    log.exception("a batch cannot be settled", extra={"batch": batch.id})
        with suppress(TimeoutError):
            await asyncio.wait_for(self._news.wait(), LOOK_S)

    def _settled(self, batch_id: str) -> None:
        with self._records.claimed(batch_id) as claim:
            if claim is None:
                return
            record, ending = claim.record, claim.record.ending or _ending_of(claim)
            if ending is not None:
                end(claim, self._files, ending, [])
            elif record.batch.status == "validating":
                try:
                    check(claim, self._files)
                except Broken as e:
                    end(claim, self._files, "failed", e.problems)
            _tell(record)

    async def _sweep(self) -> None:
        await asyncio.sleep(SWEEP_S)  # by then `_settle` has shown what has no name yet
        await asyncio.to_thread(self._files.sweep)

    # -- what needs one

    async def _send_next(self, app: ASGIApp) -> None:
        """Work on the first batch that nobody works on."""
        records = [] if self._is_draining else await asyncio.to_thread(self._records.live)
        for record in records:
            if record.batch.status == "in_progress" and record.ending is None:
                with self._records.claimed(record.batch.id) as claim:
                    if claim is not None and claim.record.ending is None:
                        await self._serve(claim, app)
                        return  # an older one may be free by now
        await asyncio.sleep(TICK_S)

    async def _serve(self, claim: Claim, app: ASGIApp) -> None:
        """Send what is left of a batch, and end it unless this server drains."""
        problems = list[BatchProblem]()
        try:
            ending = await self._sent(claim, app)
        except Broken as e:
            ending, problems = "failed", e.problems
        except WriteError as e:
            why = f"The results cannot be written: {getattr(e.__cause__, 'strerror', '')}"
            ending, problems = "failed", broken("disk_full", why).problems
        except Exception as e:  # else it would be tried for ever
            log.exception("a batch failed", extra={"batch": claim.record.batch.id})
            ending, problems = "failed", broken("internal_error", told(e)).problems
        if ending is not None:
            await asyncio.to_thread(end, claim, self._files, ending, problems)
        _tell(claim.record)

    async def _sent(self, claim: Claim, app: ASGIApp) -> Ending | None:
        """Send; the state in which the batch ends, None if it has not."""
        record, over = claim.record, asyncio.Event()
        with ExitStack() as held:
            index, source, outputs = await asyncio.to_thread(self._opened, claim, held)
            inside = Inside(app, record.owner, record.client)
            run = Run(index, source, outputs)
            _tell(record)
            watching = asyncio.create_task(self._watch(claim, run, inside, outputs, over))
            try:
                with suppress(Left):
                    await run.send_all(self._most, inside.send, MOST_BYTES)
            finally:
                over.set()
                await watching
        return "completed" if not run.pending else _ending_of(claim)

    def _opened(self, claim: Claim, held: ExitStack) -> tuple[Index, JsonLines, Outputs]:
        """The lines of a batch, and the results of earlier processes; raises Broken."""
        index, source = held.enter_context(indexed(claim, self._files))
        outputs = held.enter_context(Outputs(claim.output, claim.errors))
        mark_done(index, outputs)
        return index, source, outputs

    async def _watch(
        self, claim: Claim, run: Run, inside: Inside, outputs: Outputs, over: asyncio.Event
    ) -> None:
        """Follow the engine's cap, and stop in time, until it is `over`."""
        while not await _within(TICK_S, over):
            if self._is_draining:
                run.stop()
                inside.stop()
            elif _ending_of(claim) is not None:
                run.stop()
                inside.leave()
                if not await _within(LEAVE_S, over):
                    run.fail(Left())
            else:
                run.look_again()
                with suppress(OSError):  # the results are what counts
                    await asyncio.to_thread(count, claim, outputs)


def _ending_of(claim: Claim) -> Ending | None:
    """The state in which a batch is to end now, whatever is left of it."""
    if claim.is_cancelled:
        return "cancelled"
    return "expired" if claim.record.is_expired else None


async def _within(seconds: float, event: asyncio.Event) -> bool:
    """True if `event` comes in `seconds`."""
    with suppress(TimeoutError):
        await asyncio.wait_for(event.wait(), seconds)
    return event.is_set()


async def _for_ever(job: Callable[[], Awaitable[None]]) -> None:
    while True:
        try:
            await job()
        except Exception:  # the directory may be away for a while
            log.exception("batches pause", extra={"seconds": PAUSE_S})
            await asyncio.sleep(PAUSE_S)


def _tell(record: Record) -> None:
    batch = record.batch
    log.info("batch", extra={"batch": batch.id, "status": batch.status})
