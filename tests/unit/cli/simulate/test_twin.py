"""The simulator's pod does what the worker's own scheduler, block pool and recorder do."""

from collections import deque
from collections.abc import Sequence

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sluice.simulate.params import Params
from sluice.simulate.pod import Pod
from sluice.simulate.trace import Request
from sluice_worker.contract import Slo, Tick
from unit.cli.simulate.realpod import RealPod

SMALL = Params(
    a=6, b=1.5, c=0.004, d=0.4, kv_tokens=400, cold_start_s=1, block_size=8,
    max_num_batched_tokens=96, noise=0.1,
)  # fmt: skip
SLO = Slo(ttft_ms=400, itl_ms=30, e2e_ms=2000)

requests = st.builds(
    lambda gap_s, prompt, output, prefix, unit: (
        gap_s,
        prompt,
        output,
        prefix,
        unit if len(prefix) < 2 else 20,  # in a file too, several names are of one length
    ),
    st.sampled_from([0.0, 0.0, 0.01, 0.1, 1.0]),
    st.integers(1, 120),
    st.integers(1, 60),
    st.sampled_from([(), (), ("p",), ("q",), ("p", "r"), ("p", "s")]),
    st.sampled_from([5, 16, 40, 64]),
)
changes = st.lists(st.tuples(st.integers(1, 8), st.integers(1, 12)), max_size=3)


def trace_of(drawn: Sequence[tuple[float, int, int, tuple[str, ...], int]]) -> list[Request]:
    trace, now_s = [], 0.0
    for gap_s, prompt, output, prefix, unit in drawn:
        now_s += gap_s
        trace.append(Request(now_s, prompt, output, prefix, unit))
    return trace


def rounded(tick: Tick) -> Tick:
    return msgspec.structs.replace(
        tick, busy_s=round(tick.busy_s, 9), seq=tick.seq, t_s=round(tick.t_s, 9)
    )


def play(
    params: Params, trace: list[Request], cap: int, patches: list[tuple[int, int]]
) -> tuple[Pod, RealPod]:
    """Both pods through the same arrivals and the same changes of the cap, at every 1.1 s."""
    pods = Pod("pod-1", params, SLO, cap, 1), RealPod(params, SLO, cap)
    for pod in pods:
        arrivals, now_s, epoch = deque(trace), 0.0, 1
        for steps, new_cap in patches:
            now_s += 1.1 * steps
            epoch += 1
            pod.run(now_s, arrivals)
            pod.patch(new_cap, epoch, now_s)
        pod.run(now_s + 60.0, arrivals)
    return pods


def assert_equal(twin: Pod, real: RealPod) -> None:
    ended = {
        job.flight.request_id: (job.flight.first_s, job.flight.last_s, job.flight.num_gaps_over)
        for job in twin.done
    }
    assert ended == real.ended
    assert twin.num_preemptions == real.scheduler.counters.num_preemptions
    assert twin.pages.num_free == real.pool.num_free
    assert twin.pages.num_cached == real.pool.num_cached
    assert [rounded(tick) for tick in twin.recorder.evidence(0).ticks] == [
        rounded(tick) for tick in real.ticks()
    ]
    assert twin.times.model == real.times.model


@settings(max_examples=60)
@given(st.lists(requests, min_size=1, max_size=30), st.integers(1, 12), changes)
def test_the_twin_equals_the_real_scheduler_token_for_token(drawn, cap, patches) -> None:  # type: ignore[no-untyped-def]
    assert_equal(*play(SMALL, trace_of(drawn), cap, patches))


def test_those_that_end_together_give_their_blocks_back_in_order_of_arrival() -> None:
    """The reproducer of a twin that ended them in the order in which they began to decode."""
    shared = ("p", "r")
    lengths = [(10, 24, ()), (58, 8, shared), (1, 8, ()), (69, 13, ()), (26, 7, ()), (95, 2, ()),
               (104, 2, ()), (33, 1, shared)]  # fmt: skip
    trace = [Request(0.0, prompt, output, prefix, 20) for prompt, output, prefix in lengths]
    assert_equal(*play(SMALL, trace, 3, []))


@pytest.mark.parametrize("prefix_caching", [True, False])
def test_the_twin_equals_the_real_scheduler_where_memory_is_short(prefix_caching: bool) -> None:
    params = msgspec.structs.replace(SMALL, kv_tokens=256, prefix_caching=prefix_caching)
    drawn = [(0.05, 17 + 7 * i % 60, 40, ("p", "r") if i % 3 else (), 24) for i in range(60)]
    twin, real = play(params, trace_of(drawn), 8, [])
    assert twin.num_preemptions > 10
    assert_equal(twin, real)


def test_the_twin_equals_the_real_scheduler_where_a_step_would_take_too_long() -> None:
    """96 tokens of a prompt would take 19 s: a step has 5."""
    params = msgspec.structs.replace(SMALL, d=200.0)
    assert_equal(*play(params, [Request(2.0 * i, 40 + 7 * i, 3) for i in range(8)], 4, []))


def test_a_long_output_is_smooth_by_the_number_of_its_gaps() -> None:
    """The reproducer of a twin that took any gap over for the end of smoothness."""
    params = msgspec.structs.replace(SMALL, noise=0.5)
    twin, real = play(params, [Request(3.0 * i, 10, 240) for i in range(8)], 2, [])
    assert any(0 < job.flight.num_gaps_over <= 2 for job in twin.done)
    assert_equal(twin, real)
