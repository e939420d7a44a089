"""The step loop's body for texts and images: a step makes the vectors of some. Knows no sockets or
files."""

import time
import traceback
from collections.abc import Callable, Sequence
from typing import Protocol

from sluice_core.contract import StepModel
from sluice_core.port import Background, EngineLimits, EngineLoad
from sluice_core.steptime import REFIT_S, StepRecord, StepTimes
from sluice_core.wire import Abort, Encode, EncodeReport, Finished, Vector, unpacked

from ..scheduling.texts import TextQueue, WaitingText


class TextModel(Protocol):
    """Makes vectors of texts."""

    def vectors(self, texts: Sequence[WaitingText]) -> list[bytes | None]:
        """Packed float32 of each text, or None if it is not finite. Lengths ascend."""


class EncodingEngine:
    """Queue, model and step times of one worker. Single-threaded; `clock` is monotonic.

    `max_len`: tokens of the longest text. `image_rows`: rows of an image.
    """

    def __init__(
        self,
        queue: TextQueue,
        model: TextModel,
        times: StepTimes,
        max_len: int,
        image_rows: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._queue, self._model, self._times, self._max_len = queue, model, times, max_len
        self._image_rows, self._clock = image_rows, clock
        self._refitted_s = 0.0
        self._sound: WaitingText | None = None
        self.num_steps = 0

    @property
    def has_work(self) -> bool:
        return any(self._queue.counts)

    def idle_s(self, now: float) -> float:
        """Seconds until a step can do anything: 0 with work."""
        return 0.0 if self.has_work else float("inf")

    def submit(self, request: Encode, now: float) -> Finished | None:
        """Queue a text or an image, or say why it can never run."""
        token_ids: Sequence[int] = range(self._image_rows)
        if not request.pixels:
            token_ids = unpacked(request.prompt)
            if not 0 < len(token_ids) <= self._max_len:
                sentence = f"a text of {len(token_ids)} tokens; 1 to {self._max_len} are possible"
                return Finished(request.request_id, sentence, self.snapshot())
        text = WaitingText(
            *(request.request_id, token_ids, request.num_skipped, now),
            *(request.num_second, request.pixels, request.is_background),
        )
        self._queue.add(text)
        return None

    def abort(self, message: Abort) -> Finished | None:
        """Forget a waiting text; None if there is no such text."""
        if not self._queue.remove(message.request_id):
            return None
        return Finished(message.request_id, None, self.snapshot())

    def configure(self, limits: EngineLimits) -> None:
        """Put limits in force from the next step on."""
        self._queue.limits = limits

    def step(self) -> tuple[EncodeReport | None, list[Finished]]:
        """One step: its report, and the texts that it failed."""
        started = self._clock()
        texts, limits = self._queue.take(started), self._queue.limits
        if not texts:
            return None, []
        found = self._vectors(texts)
        ended = self._clock()
        self.num_steps += 1
        lengths = [len(text.token_ids) for text in texts]
        both = list(zip(texts, found, strict=True))
        report = EncodeReport(
            vectors=[Vector(text.request_id, values) for text, values in both if values],
            epoch=limits.epoch,
            started_s=started,
            step_s=ended - started,
            num_tokens=sum(lengths),
            num_running=len(texts),
            snapshot=self.snapshot(),
            step_model=self._learn(lengths, started, ended),
            is_slow=self._times.is_slow,
            admitted=[text.request_id for text in texts],
            background=_background(texts),
        )
        sentence = (
            "this text or image cannot be computed: its vector is not finite, or it broke a step"
        )
        failed = [Finished(t.request_id, sentence, report.snapshot) for t, v in both if v is None]
        return report, failed

    def _vectors(self, texts: Sequence[WaitingText]) -> list[bytes | None]:
        """Those of a step. If it breaks, each is computed alone, so that one fails alone. If all
        fail, one that was computed before is tried: raises what it raises."""
        try:
            found = self._model.vectors(texts)
        except Exception:
            traceback.print_exc()
            found = [self._alone(text) for text in texts]
            if not any(found):
                if self._sound is None:
                    raise
                self._model.vectors([self._sound])
            return found
        self._sound = texts[0]
        return found

    def _alone(self, text: WaitingText) -> bytes | None:
        try:
            return self._model.vectors([text])[0]
        except Exception:
            traceback.print_exc()
            return None

    def use_idle_time(self) -> float:
        """Nothing is prepared."""
        return float("inf")

    def check_integrity(self) -> str | None:
        """There is no block pool that could be at fault."""
        return None

    def snapshot(self) -> EngineLoad:
        """Counts as of now: between steps none runs."""
        waiting, background = self._queue.counts
        return EngineLoad(waiting_cap=waiting, background_waiting=background)

    def _learn(self, lengths: Sequence[int], started: float, ended: float) -> StepModel | None:
        """Record the step; returns the model if it was fitted anew."""
        self._times.add(record_of(lengths, ended, ended - started))
        if ended - self._refitted_s < REFIT_S:
            return None
        self._refitted_s = ended
        return self._times.refit(ended)


def _background(texts: Sequence[WaitingText]) -> Background:
    own = [len(text.token_ids) for text in texts if text.is_background]
    return Background(prefill_tokens=sum(own), running=len(own))


def record_of(lengths: Sequence[int], at_s: float, step_s: float) -> StepRecord:
    """A step over texts of these lengths: their tokens are its work, as those of prompts are."""
    return StepRecord(at_s, 0, 0, sum(lengths), 1e3 * step_s)
