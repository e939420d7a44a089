"""Without a step model the cap is searched by measured gaps alone, up and down."""

from hypothesis import given, settings
from hypothesis import strategies as st
from sluice_core.contract import TokenGaps
from sluice_operator.tuner import Decision, Past, decide
from unit.operator.tuner.loop import TARGETS, Loop, limits, shaped
from unit.operator.tuner.made import gaps, observation, pod, tick
from unit.operator.tuner.traces import poisson
from unit.operator.tuner.world import World

counts = st.integers(0, 2000)


def decided(itl: TokenGaps, cap: int, num: int = 40) -> Decision:
    ticks = [tick(seq, itl=itl, cap=cap, max_running=cap) for seq in range(1, num + 1)]
    return decide(Past(), observation(pod("a", ticks, chunk_is="fixed"), cap=cap))[1]


@settings(max_examples=100)
@given(st.integers(1, 64), st.integers(1, 2000), counts, counts, st.integers(1, 60))
def test_raises_come_only_with_measured_headroom_and_more_late_gaps_never_raise_the_cap(
    cap: int, n: int, one: int, other: int, num: int
) -> None:
    fewer, more = sorted((min(one, n), min(other, n)))
    good, bad = decided(gaps(n, fewer), cap, num), decided(gaps(n, more), cap, num)
    assert bad.cap <= good.cap
    for decision, over in ((good, fewer), (bad, more)):
        judged = decision.verdicts["interTokenLatency"]
        if decision.cap > cap:
            assert (decision.cap_reason, judged.samples_needed) == ("Headroom", 0)
            assert over <= 0.01 * n
            assert decision.cap <= max(2 * cap, cap + 1)
        if decision.cap < cap:
            assert judged.verdict == "Breach"
            assert decision.cap >= int(0.8 * cap) or decision.cap == 1


def test_from_any_cap_the_search_ends_near_what_the_pod_can_do() -> None:
    """31 at once take 60 ms with their noise, 20 hold it with room."""
    shape = shaped(b=1.4, reports_model=False)
    ends = []
    for cap in (1, 32):
        world = World(shape, TARGETS, poisson([(1500, 12)], output=96), cap=cap)
        loop = Loop(world, limits(max_replicas=1))
        loop.run(1500)
        assert all(decision.predicted_cap is None for _, decision in loop.decisions)
        ends.append(world.cap)
    assert all(14 <= cap <= 32 for cap in ends), ends
