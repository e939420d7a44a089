"""What comes of requests in a simulated pod: prefixes, shedding, short memory, live caps."""

from collections import deque
from collections.abc import Sequence

import msgspec
import pytest
from bench.law_runs import CPUV, trace_of
from hypothesis import given, settings
from hypothesis import strategies as st
from sluice.measure.targets import read_targets
from sluice.simulate.noise import Noise
from sluice.simulate.params import Params
from sluice.simulate.pod import SimulatedEnd, SimulatedPod
from sluice.simulate.runs import simulate
from sluice.simulate.trace import Request
from sluice_core.contract import Slo, Tick
from sluice_worker.scheduling.step import Step

SMALL = Params(
    a=6, b=1.5, c=0.004, d=0.4, kv_tokens=400, cold_start_s=1, block_size=8,
    max_num_batched_tokens=96, noise=0.1,
)  # fmt: skip
ROOMY = msgspec.structs.replace(SMALL, kv_tokens=8000, max_num_batched_tokens=1024)
SHEDDING = msgspec.structs.replace(ROOMY, overload="Shed")
SLO = Slo(ttft_ms=400, itl_ms=30, e2e_ms=2000)
Prefix = tuple[str | int, ...]


class CheckedPod(SimulatedPod):
    """A pod whose blocks are counted after each step."""

    def _end(self, step: Step, started_s: float, step_ms: float, now_s: float) -> None:
        super()._end(step, started_s, step_ms, now_s)
        assert self.scheduler.check_integrity() is None


def played(
    params: Params, trace: Sequence[Request], cap: int = 4, slo: Slo = SLO, until_s: float = 60.0
) -> CheckedPod:
    pod = CheckedPod("pod-1", params, slo, cap, 1)
    pod.run(until_s, deque(trace))
    return pod


def ended(pod: SimulatedPod) -> list[SimulatedEnd]:
    return pod.outcomes()[0]


def ticks(pod: SimulatedPod) -> list[Tick]:
    return pod.recorder.evidence(0).ticks


def num_computed(pod: SimulatedPod) -> int:
    """Tokens of prompts that were computed in chunks."""
    return sum(tick.prefill_tokens for tick in ticks(pod))


def test_a_hold_of_no_time_brings_early_first_tokens_and_late_gaps() -> None:
    trace, targets = trace_of(CPUV, "bursts", 2.4, seed=1), read_targets("ttft=2s,itl=65ms")

    def told(share: float) -> dict[str, float]:
        params = msgspec.structs.replace(CPUV.params, order="deadline", hold_share=share)
        return simulate(params, targets, trace, "sluice", 1)

    whole, none = told(1.0), told(0.0)
    assert none["p50_ttft_ms"] < 0.8 * whole["p50_ttft_ms"]
    assert none["good_share"] < whole["good_share"]
    assert none["smooth_share"] < whole["smooth_share"]


# Prefixes


@pytest.mark.parametrize(
    ("first", "second", "unit", "num_cached"),
    [
        (("p",), ("p",), 40, 40),
        (("p",), ("p",), 44, 40),  # whole blocks only
        (("p",), ("q",), 40, 0),
        (("p", "r"), ("p", "s"), 24, 24),
        (("p", "r"), ("q", "r"), 24, 0),  # from the start on
        (("p", "r"), ("p", "r"), 24, 48),
        ((1, 2), (1, 3), 24, 24),
        ((1,), ("1",), 24, 0),
        (("p",), ("p",), 1000, 56),  # all but the last token, which gives logits
        ((), (), 24, 0),
    ],
)
def test_a_prompt_computes_what_no_earlier_one_has(
    first: Prefix, second: Prefix, unit: int, num_cached: int
) -> None:
    trace = [Request(0.0, 64, 4, first, unit), Request(5.0, 64, 4, second, unit)]
    assert num_computed(played(ROOMY, trace)) == 2 * 64 - num_cached
    without = msgspec.structs.replace(ROOMY, prefix_caching=False)
    assert num_computed(played(without, trace)) == 2 * 64


def test_prompts_of_different_lengths_share_what_both_have_of_a_prefix() -> None:
    trace = [Request(0.0, 32, 4, ("p",), 32), Request(5.0, 80, 4, ("p",), 80)]
    assert num_computed(played(ROOMY, trace)) == 32 + 48


def test_a_burst_on_one_prefix_computes_it_once() -> None:
    trace = [Request(0.0, 72, 4, ("p",), 64) for _ in range(6)]
    pod = played(ROOMY, trace, cap=8)
    assert len(ended(pod)) == 6
    assert num_computed(pod) == 64 + 6 * 8


def test_a_shared_prefix_makes_first_tokens_faster_and_without_a_cache_changes_nothing() -> None:
    prefixed = [Request(0.3 * i, 80, 12, ("p",), 64) for i in range(40)]
    plain = [Request(request.t_s, 80, 12) for request in prefixed]
    with_prefix, without = (
        [o.first_s - o.t_s for o in ended(played(ROOMY, t))] for t in (prefixed, plain)
    )
    assert sum(with_prefix) < 0.6 * sum(without)
    uncached = msgspec.structs.replace(ROOMY, prefix_caching=False)
    assert ended(played(uncached, prefixed)) == ended(played(uncached, plain))


def test_a_prefix_that_gave_way_to_others_is_computed_again() -> None:
    prefixed = Request(0.0, 64, 4, ("p",), 56)
    others = [Request(5.0 + i, 200, 4) for i in range(3)]  # more than the memory holds
    again = Request(15.0, 64, 4, ("p",), 56)
    assert num_computed(played(SMALL, [prefixed, *others, again])) == 2 * 64 + 3 * 200
    assert num_computed(played(ROOMY, [prefixed, *others, again])) == 64 + 3 * 200 + 8


# Shedding


def test_what_can_no_longer_be_in_time_is_shed_from_the_queue() -> None:
    burst = [Request(0.0, 40, 40) for _ in range(40)]
    arrived = played(SHEDDING, burst, until_s=0.01)
    assert (arrived.num_refused, len(arrived.outcomes()[1])) == (0, 40)
    shed, queued = (played(params, burst) for params in (SHEDDING, ROOMY))
    assert shed.is_idle
    assert 4 <= len(ended(shed)) == 40 - shed.num_refused < 20
    assert all(outcome.first_s - outcome.t_s < 0.5 for outcome in ended(shed))
    assert (len(ended(queued)), queued.num_refused) == (40, 0)
    assert max(outcome.first_s for outcome in ended(queued)) > 2.0
    booked = ticks(shed)
    assert sum(tick.refused for tick in booked) == shed.num_refused
    assert sum(tick.ttft.over for tick in booked) >= shed.num_refused


def test_who_would_be_late_is_refused_on_arrival_once_service_times_are_known() -> None:
    before = [Request(2.0 * (i // 5), 40, 15) for i in range(25)]  # of each five one waits
    burst = [Request(12.0, 40, 40) for _ in range(40)]
    pod = played(SHEDDING, [*before, *burst], until_s=12.0)
    assert len(ended(pod)) == 25
    assert pod.num_refused > 30
    alone = played(SHEDDING, [*before, *burst[:1]], until_s=12.0)
    assert (alone.num_refused, len(alone.outcomes()[1])) == (0, 1)


def test_without_a_target_for_first_tokens_nobody_is_shed() -> None:
    burst = [Request(0.0, 40, 40) for _ in range(40)]
    pod = played(SHEDDING, burst, slo=Slo(itl_ms=30))
    assert (len(ended(pod)), pod.num_refused) == (40, 0)


def test_who_has_begun_is_not_shed_though_memory_took_its_place() -> None:
    params = msgspec.structs.replace(SHEDDING, kv_tokens=256)
    trace = [Request(0.05 * i, 17 + 7 * i % 60, 40) for i in range(60)]
    pod = played(params, trace, cap=8)
    assert pod.num_preemptions > 5
    assert pod.num_refused > 5
    assert len(ended(pod)) == 60 - pod.num_refused
    assert sum(tick.generated_tokens for tick in ticks(pod)) == 40 * len(ended(pod))


def test_shedding_keeps_promises_under_three_times_what_a_pod_does() -> None:
    targets = read_targets("ttft=400ms,itl=30ms")
    trace = [Request(0.03 * i, 40, 20) for i in range(600)]
    shed, queued = (simulate(p, targets, trace, "fixed:8", 1) for p in (SHEDDING, ROOMY))
    assert shed["finished"] + shed["refused"] == 600
    assert shed["good_share"] > 0.2
    assert queued["good_share"] < 0.1


# Memory, caps and time


def test_what_never_fits_is_refused_and_the_queue_moves_on() -> None:
    pod = played(SMALL, [Request(0.0, 390, 40), Request(0.0, 10**12, 1), Request(0.1, 40, 8)])
    assert (pod.num_refused, [o.num_tokens for o in ended(pod)]) == (2, [8])


def test_where_memory_is_short_some_are_preempted_and_all_end() -> None:
    drawn = [(17 + 7 * i % 60, ("p", "r") if i % 3 else ()) for i in range(60)]
    trace = [Request(0.05 * i, prompt, 40, p, 24) for i, (prompt, p) in enumerate(drawn)]
    short, roomy = (msgspec.structs.replace(SMALL, kv_tokens=tokens) for tokens in (256, 4000))
    pods = [played(params, trace, cap=8) for params in (short, roomy)]
    assert pods[0].num_preemptions > 10
    assert pods[1].num_preemptions == 0
    assert [len(ended(pod)) for pod in pods] == [60, 60]
    assert ended(pods[0])[-1].last_s > ended(pods[1])[-1].last_s


def test_a_cap_holds_from_the_next_step_on_and_what_is_over_it_drains() -> None:
    trace = [Request(0.0, 16, 100 + 20 * (i % 3)) for i in range(40)]
    arrivals, now_s, most = deque(trace), 0.0, []
    pod = CheckedPod("pod-1", ROOMY, Slo(), 2, 1)
    for epoch, cap in enumerate((8, 1, 2), 2):
        now_s += 2.0
        pod.run(now_s, arrivals)
        most.append(len(pod.scheduler.running))
        pod.patch(cap, epoch, now_s)
        assert len(pod.scheduler.running) == most[-1]
    pod.run(now_s + 4.0, arrivals)
    assert most == [2, 8, 1]
    assert len(pod.scheduler.running) == 2
    assert pod.view(now_s).config is not None
    assert {(tick.epoch, tick.cap) for tick in ticks(pod)} >= {(2, 8), (3, 1), (4, 2)}


def test_a_step_takes_what_the_noise_says() -> None:
    class Doubled(Noise):
        def step_ms(self, mean_ms: float, now_s: float) -> float:
            return 2 * mean_ms

    params = msgspec.structs.replace(SMALL, noise=0.0)
    usual, slow = (CheckedPod("pod-1", params, SLO, 4, 1) for _ in range(2))
    slow.noise = Doubled(params, 1)
    for pod in (usual, slow):
        pod.run(60.0, deque([Request(0.0, 40, 20)]))
    assert ended(slow)[0].last_s == pytest.approx(2 * ended(usual)[0].last_s)


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


@settings(max_examples=60)
@given(
    st.lists(requests, min_size=1, max_size=30),
    st.integers(1, 12),
    changes,
    st.sampled_from(["Queue", "Shed"]),
)
def test_every_request_ends_or_is_refused_and_no_block_is_lost(
    drawn: list[tuple[float, int, int, Prefix, int]],
    cap: int,
    patches: list[tuple[int, int]],
    overload: str,
) -> None:
    params = msgspec.structs.replace(SMALL, overload=overload, max_num_queued=12)
    trace, now_s = [], 0.0
    for gap_s, prompt, output, prefix, unit in drawn:
        now_s += gap_s
        trace.append(Request(now_s, prompt, output, prefix, unit))
    pod, arrivals, now_s = CheckedPod("pod-1", params, SLO, cap, 1), deque(trace), 0.0
    for epoch, (num, new_cap) in enumerate([*patches, (60, cap)], 2):
        now_s += 1.1 * num
        pod.run(now_s, arrivals)
        pod.patch(new_cap, epoch, now_s)
    assert pod.is_idle
    assert pod.pool.num_used == 0
    assert len(ended(pod)) + pod.num_refused == len(trace)
    booked = ticks(pod)
    assert sum(tick.arrivals for tick in booked) == len(trace)
    assert sum(tick.finished for tick in booked) == len(ended(pod))
    assert sum(t.generated_tokens for t in booked) == sum(o.num_tokens for o in ended(pod))
    assert pod.totals.num_gaps == sum(o.num_tokens - 1 for o in ended(pod))
    assert all(o.t_s < o.first_s <= o.last_s for o in ended(pod))
