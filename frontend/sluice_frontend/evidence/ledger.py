"""Books each delivered token once, for the evidence and for the metrics."""

from collections.abc import Iterable
from http import HTTPStatus

from sluice_core.errors import (
    DeadlineUnreachable,
    EngineDied,
    Overloaded,
    RequestError,
    SluiceError,
)
from sluice_core.port import FinishReason, FirstParts

from .metrics import Statistics
from .recorder import Recorder
from .requests import RequestTimer

_FAILURES = frozenset(status for status in HTTPStatus if status == 429 or status >= 500)


def failure_of(status: int) -> str | None:
    """The kind, as in `contract.Failures`, of an engine's answer. None if the engine did not fail:
    a 4xx is its client's fault, except the 429 with which an engine refuses."""
    if status < 500 and status != HTTPStatus.TOO_MANY_REQUESTS:
        return None
    return str(status) if status in _FAILURES else "other"


class Ledger:
    """The one place that feeds both the operator's evidence and Prometheus."""

    def __init__(self, recorder: Recorder, stats: Statistics) -> None:
        self.recorder = recorder
        self.stats = stats

    def token(
        self,
        timer: RequestTimer,
        parts: FirstParts | None,
        *,
        at_cap: bool,
        is_drafted: bool,
        now_s: float,
        in_prefill: bool = False,
    ) -> None:
        """Book a token delivered at `now_s`. `parts`: of a first token's time, if known.

        `is_drafted`: it came with another of the same step. `in_prefill`: as in
        `Recorder.next_token`.
        """
        if timer.is_background:
            timer.num_tokens, timer.last_s = timer.num_tokens + 1, now_s
            timer.first_s = timer.first_s or now_s
        elif timer.first_s is None:
            parts = parts or FirstParts()
            ttft_s = self.recorder.first_token(timer, now_s, parts)
            self.stats.first_token(ttft_s, parts, timer.num_prompt_tokens)
            timer.queue_s = parts.wait_cap_s + parts.wait_kv_s
        elif is_drafted:
            self.recorder.drafted_token(timer, now_s)
        else:
            gap_s = self.recorder.next_token(timer, now_s, at_cap=at_cap, in_prefill=in_prefill)
            self.stats.observe("inter_token_latency_seconds", gap_s)

    def finish(
        self,
        timer: RequestTimer,
        reason: FinishReason,
        num_preemptions: int,
        *,
        computed_s: float,
        now_s: float,
    ) -> None:
        """Book the end: the last token, computed at `computed_s`, was delivered."""
        if self._ended_behind(timer, "finished"):
            return
        e2e_s = self.recorder.finish(timer, now_s, computed_s)
        stats = self.stats
        stats.end(reason)
        stats.observe("e2e_request_latency_seconds", e2e_s)
        stats.observe("request_inference_time_seconds", max(0.0, e2e_s - timer.queue_s))
        stats.observe("request_prompt_tokens", timer.num_prompt_tokens)
        stats.observe("request_generation_tokens", timer.num_tokens)
        stats.observe("request_num_preemptions", num_preemptions)
        if timer.first_s is not None:
            stats.observe("request_decode_time_seconds", now_s - timer.first_s)
        if timer.num_tokens > 1:
            stats.observe("request_time_per_output_token_seconds", timer.mean_gap_ms / 1e3)

    def group_ended(self, num_tokens: Iterable[int]) -> None:
        """Book that all answers to a prompt have ended, with these lengths in tokens."""
        self.stats.observe("request_max_num_generation_tokens", max(num_tokens))

    def _ended_behind(self, timer: RequestTimer, outcome: str) -> bool:
        """Book the end of a background request, which is counted as nothing else; False for any
        other."""
        if timer.is_background:
            self.recorder.requests.background.pop(timer.request_id, None)
            self.stats.background[outcome] += 1
        return timer.is_background

    def leave(self, timer: RequestTimer, now_s: float) -> None:
        if self._ended_behind(timer, "left"):
            return
        self.recorder.drop(timer, now_s, by_server=False)
        self.stats.end("abort")

    def fail(
        self, timer: RequestTimer, error: SluiceError, now_s: float, *, has_begun: bool = False
    ) -> None:
        """Book an end by the server: shed, failed or died. `has_begun`: as in `engine_failed`."""
        if self._ended_behind(timer, "failed"):
            return
        if not isinstance(error, RequestError | Overloaded):
            kind = "died" if isinstance(error, EngineDied) else failure_of(error.http_status)
            self.engine_failed(timer, kind or "other", has_begun=has_begun)
            return
        is_refusal = error.http_status == 429 and timer.first_s is None
        by_server = not isinstance(error, RequestError)
        if isinstance(error, DeadlineUnreachable):  # its own deadline; a target may be met or not
            by_server = is_refusal and self.recorder.will_miss(timer, now_s)
        self.recorder.drop(timer, now_s, by_server=by_server, refused=is_refusal)
        self.stats.end("error")

    def engine_failed(self, timer: RequestTimer, kind: str, *, has_begun: bool = False) -> None:
        """Book a failure of the engine. `has_begun`: its client has a part of the answer, which
        counts as cut, also if no token was seen in it."""
        if self._ended_behind(timer, "failed"):
            return
        kind = "cut" if has_begun or timer.first_s is not None else kind
        self.recorder.fail(timer, kind)
        self.stats.fail(kind)
