"""Requests that the engine failed: counted by how, and as no evidence of speed."""

import pytest
from sluice_core.contract import Causes, Evidence, FirstTokens, Slo, Tick, decode, encode
from sluice_core.errors import (
    Draining,
    EngineDied,
    QueueFull,
    RequestError,
    RequestFailed,
    Shed,
    SluiceError,
)
from sluice_core.port import FirstParts
from sluice_frontend.evidence.ledger import Ledger, failure_of
from sluice_frontend.evidence.metrics import Statistics
from sluice_frontend.evidence.recorder import Recorder

SLO = Slo(ttft_ms=500, itl_ms=50, e2e_ms=1000)


def create_ledger() -> Ledger:
    """A started one, whose clock begins at 0."""
    recorder = Recorder("boot", 0.0, 1000.0)
    recorder.ticks.start(1, 4, SLO)
    return Ledger(recorder, Statistics(SLO, 0.0))


def failed_by(error: SluiceError, num_tokens: int, after_s: float = 0.04) -> tuple[Ledger, Tick]:
    """The tick of one request that ended so, after so many tokens."""
    ledger = create_ledger()
    timer = ledger.recorder.arrive("a", 0.0, 0.0, 10)
    for index in range(num_tokens):
        first = FirstParts(0.0, 0.0, 0.01, 0) if not index else None
        ledger.token(timer, first, at_cap=False, is_drafted=False, now_s=0.01 * (index + 1))
    ledger.fail(timer, error, after_s)
    ledger.recorder.advance(2.0, 1002.0, 0.0)
    (tick,) = ledger.recorder.evidence(0).ticks
    return ledger, tick


@pytest.mark.parametrize(
    ("error", "num_tokens", "kind"),
    [
        (RequestFailed("it has no finite logits"), 0, "500"),
        (RequestFailed("it has no finite logits"), 3, "cut"),
        (EngineDied("the engine process ended"), 0, "died"),
        (EngineDied("the engine process ended"), 5, "cut"),
        (Draining("no more time"), 0, "503"),
        (Draining("no more time"), 1, "cut"),
    ],
)
def test_a_failed_request_is_counted_by_how_and_against_no_target(
    error: SluiceError, num_tokens: int, kind: str
) -> None:
    ledger, tick = failed_by(error, num_tokens)
    assert (tick.failed, tick.arrivals, tick.refused, tick.finished) == ({kind: 1}, 1, 0, 0)
    assert (tick.ttft.n, tick.ttft.over) == (min(num_tokens, 1), 0)
    assert (tick.e2e.n, tick.good, tick.smooth) == (0, 0, 0)
    assert (ledger.stats.failed, ledger.stats.finished) == ({kind: 1}, {"error": 1})


@pytest.mark.parametrize(
    "error", [QueueFull("full"), Shed("late"), RequestError("no such parameter")]
)
def test_a_refusal_of_ours_and_a_fault_of_the_client_are_no_failure(error: SluiceError) -> None:
    ledger, tick = failed_by(error, 0)
    assert tick.failed == {}
    assert tick.ttft.n == 1
    assert not ledger.stats.failed


def test_a_request_that_was_late_before_it_failed_is_late_and_failed() -> None:
    ledger = create_ledger()
    timer = ledger.recorder.arrive("a", 0.0, 0.0, 10)
    ledger.recorder.admit(["a"], 0.0)
    ledger.recorder.advance(2.0, 1002.0, 0.0)
    ledger.engine_failed(timer, "504")
    ledger.recorder.advance(4.0, 1004.0, 0.0)
    late, failed = ledger.recorder.evidence(0).ticks
    assert (late.ttft.over, late.e2e.over, late.failed) == (1, 1, {})
    assert (failed.ttft, failed.e2e.n, failed.failed) == (FirstTokens(by=Causes()), 0, {"504": 1})


@pytest.mark.parametrize(
    ("status", "kind"),
    [(500, "500"), (503, "503"), (504, "504"), (429, "429"), (529, "other"), (700, "other")]
    + [(400, None), (404, None), (422, None), (499, None)],
)
def test_an_answer_is_a_failure_of_the_engine_from_500_on_and_where_it_refuses(
    status: int, kind: str | None
) -> None:
    assert failure_of(status) == kind


def test_statuses_of_an_engine_gone_mad_stay_evidence_that_can_be_read() -> None:
    """Any image may answer anything: kinds are few whatever it says."""
    ledger = create_ledger()
    for status in range(400, 1000):
        kind = failure_of(status)
        if kind is not None:
            ledger.engine_failed(ledger.recorder.arrive(str(status), 0.0, 0.0, 1), kind)
    ledger.recorder.advance(2.0, 1002.0, 0.0)
    evidence = ledger.recorder.evidence(0)
    assert decode(encode(evidence), Evidence) == evidence
    assert len(evidence.ticks[0].failed) <= 16
    assert sum(evidence.ticks[0].failed.values()) == 501


def test_evidence_of_a_pod_that_counts_no_failures_yet_is_read() -> None:
    _, tick = failed_by(RequestFailed("x"), 0)
    older = encode(tick).replace(b',"failed":{"500":1}', b"")
    assert b"failed" not in older
    assert decode(older, Tick).failed == {}
