"""The simulator's fit: stalls are neither in the coefficients nor longer in longer steps."""

from random import Random
from statistics import fmean

import pytest
from bench.simulator_fit import Part, fit_coefficients
from sluice_core.steptime import StepRecord

TRUE = (0.5, 0.07, 0.0006, 0.025)
STALL_MS = 20.0


def _mean_ms(decodes: int, kv_tokens: int, prefill_tokens: int) -> float:
    a, b, c, d = TRUE
    return a + b * decodes + c * kv_tokens + d * prefill_tokens


def _records(num: int, stalled: float) -> list[StepRecord]:
    random, records = Random(1), []
    for at in range(num):
        decodes = random.randint(1, 8)
        kinds = (decodes, decodes * random.randint(10, 90), random.choice((0, 0, 24, 200)))
        step_ms = _mean_ms(*kinds) * random.lognormvariate(0, 0.05)
        if random.random() < stalled:
            step_ms += STALL_MS
        records.append(StepRecord(float(at), *kinds, step_ms))
    return records


@pytest.mark.parametrize("stalled", [0.0, 0.03])
def test_coefficients_are_those_of_steps_that_did_not_stall(stalled: float) -> None:
    found = fit_coefficients(_records(4000, stalled))
    for kinds in ((1, 50, 0), (8, 400, 0), (4, 200, 200)):
        told = sum(x * k for x, k in zip(found, (1, *kinds), strict=True))
        assert told == pytest.approx(_mean_ms(*kinds), rel=0.03)


def test_a_longer_step_meets_more_stalls_and_no_longer_ones() -> None:
    random = Random(2)
    part = Part([(2.0, 1.0)] * 900 + [(2.0 + STALL_MS, 1.0)] * 100)  # twice as slow as predicted
    short = [part.draw(0.5, random) for _ in range(20_000)]
    long = [part.draw(4.0, random) for _ in range(20_000)]
    assert (min(short), min(long)) == (1.0, 8.0)
    assert fmean(short) == pytest.approx(1.0 + 0.05 * STALL_MS, rel=0.05)
    assert fmean(long) == pytest.approx(8.0 + 0.4 * STALL_MS, rel=0.05)


def test_what_holds_ordinary_steps_up_is_not_stretched() -> None:
    random = Random(3)
    part = Part([(1.0, 1.0)] * 80 + [(1.5, 1.0)] * 20)
    assert {part.draw(10.0, random) for _ in range(200)} == {10.0, 10.5}


def test_a_part_without_steps_is_as_predicted() -> None:
    assert Part([]).draw(3.0, Random(1)) == 3.0
