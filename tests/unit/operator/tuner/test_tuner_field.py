"""Failures that autoscalers of inference are known for, and that no other test here names."""

from dataclasses import replace

import pytest
from sluice_core.contract import (
    TICK_SECONDS,
    Evidence,
    FirstTokens,
    RuntimePatch,
    Slo,
    decode,
    encode,
)
from sluice_core.port import FirstParts
from sluice_frontend.evidence.recorder import Recorder
from sluice_operator.plan.patches import slo_of
from sluice_operator.plan.tune import targets_of
from sluice_operator.spec.service import parse
from sluice_operator.tuner import Past, decide
from unit.operator.objects import changed, valid_object
from unit.operator.tuner.made import observation, pod, tick


def test_a_day_of_counts_is_no_rate() -> None:
    """A counter that is read as a gauge: the sum of all ticks held, however old."""
    busy = [tick(seq, arrivals=500) for seq in range(1, 601)]
    idle = [
        tick(seq, arrivals=0, ttft=FirstTokens(), running=0, max_running=0)
        for seq in range(601, 901)
    ]
    _, decision = decide(Past(), observation(pod("a", busy + idle), replicas=1))
    assert decision.arrivals_per_s == 0
    assert decision.desired_replicas == 1


def test_the_same_evidence_read_again_is_no_more_demand() -> None:
    view = pod("a", [tick(seq) for seq in range(1, 61)])
    past, once = decide(Past(), observation(view))
    _, again = decide(past, observation(view))
    assert once.arrivals_per_s == again.arrivals_per_s == 5.0


def served(slo: Slo, num_ticks: int) -> Evidence:
    """What a worker's own recorder closes for two requests in each tick, timed in seconds.

    One has its first token after 0.4 s, then gaps of 0.04 s, and ends after 0.8 s; the other 0.6,
    0.06 and 1.2.
    """
    recorder = Recorder("boot", 0.0, 1000.0)
    recorder.ticks.start(1, 8, slo)
    for number in range(num_ticks):
        began_s = TICK_SECONDS * number
        for first_s, gap_s in ((0.4, 0.04), (0.6, 0.06)):
            flight = recorder.arrive(f"{number}-{first_s}", began_s, began_s, 10)
            recorder.first_token(flight, began_s + first_s, FirstParts(first_s, 0.0, 0.0, 0))
            for gap in range(1, 11):
                recorder.next_token(flight, began_s + first_s + gap * gap_s, at_cap=True)
            recorder.finish(flight, began_s + first_s + 10 * gap_s)
        end_s = began_s + TICK_SECONDS
        recorder.advance(end_s, 1000.0 + end_s, 0.0)
    return recorder.evidence(0)


@pytest.mark.parametrize(
    ("ttft", "itl", "e2e", "over"),
    [
        ("500ms", "50ms", "1s", 1),
        ("0.5s", "0.05s", "1000ms", 1),
        ("700ms", "0.07s", "1s500ms", 0),
        ("0.3s", "30ms", "0.7s", 2),
    ],
)
def test_units_agree_from_the_objects_text_through_the_worker_to_the_verdict(
    ttft: str, itl: str, e2e: str, over: int
) -> None:
    """`over` of the two requests of each tick are; the quantiles are those of the slower one."""
    slo = {"timeToFirstToken": ttft, "interTokenLatency": itl, "endToEnd": e2e}
    spec = parse(changed(valid_object(), "spec.slo", slo)).spec
    sent = decode(encode(RuntimePatch(1, slo=slo_of(spec))), RuntimePatch).slo
    assert sent is not None
    evidence = decode(encode(served(sent, 60)), Evidence)
    view = replace(pod("a", evidence.ticks), evidence=evidence)
    _, decision = decide(Past(), observation(view, targets=targets_of(spec)))
    told = {
        name: (judged.n, judged.over, judged.verdict == "Breach")
        for name, judged in decision.verdicts.items()
    }
    assert told == {
        "timeToFirstToken": (120, 60 * over, over > 0),
        "interTokenLatency": (1200, 600 * over, over > 0),
        "endToEnd": (120, 60 * over, over > 0),
    }
    asked_ms = [judged.target_ms for judged in decision.verdicts.values()]
    assert asked_ms == [sent.ttft_ms, sent.itl_ms, sent.e2e_ms]
    quantiles = [judged.quantile_ms for judged in decision.verdicts.values()]
    assert quantiles == [pytest.approx(ms, rel=0.011) for ms in (600, 60, 1200)]
