"""The compiled pod does what the worker's own scheduler, block pool and recorder do in
`SimulatedPod`, run for run; what it cannot do is left to them."""

from collections import deque
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from research.compiled import library
from research.compiled.pod import CannotCompile, CompiledPod, quickest
from research.generate import make_trace
from research.policies import Aimd, Replay
from research.services import NOISES, SERVICES, TARGETS
from sluice.measure.targets import read_targets
from sluice.simulate.params import Params
from sluice.simulate.pod import SimulatedPod
from sluice.simulate.runs import Tuner
from sluice.simulate.score import score
from sluice.simulate.trace import Request
from sluice.simulate.world import Policy, World
from sluice_core.contract import Slo

pytestmark = pytest.mark.skipif(library.library() is None, reason="there is no g++")
SMALL = Params(
    a=6, b=1.5, c=0.004, d=0.4, kv_tokens=400, cold_start_s=1, block_size=8,
    max_num_batched_tokens=96, max_num_queued=12, noise=0.1, between_ms=0.5,
    interference_every_s=2.0, interference_mean_s=1.0, leak_per_hour=20.0,
)  # fmt: skip
CALM = msgspec.structs.replace(SMALL, max_num_queued=1024, between_ms=0, interference_every_s=0,
                               leak_per_hour=0)  # fmt: skip
SLO = Slo(ttft_ms=400, itl_ms=30, e2e_ms=2000)
requests = st.tuples(
    st.sampled_from([0.0, 0.0, 0.01, 0.1, 1.0]), st.integers(1, 120), st.integers(1, 300)
)
changes = st.lists(st.tuples(st.integers(1, 8), st.integers(1, 12)), max_size=3)


def trace_of(drawn: list[tuple[float, int, int]]) -> list[Request]:
    trace, now_s = [], 0.0
    for gap_s, prompt, output in drawn:
        now_s += gap_s
        trace.append(Request(now_s, prompt, output))
    return trace


def assert_equal(params: Params, slo: Slo, drawn: list[tuple[float, int, int]], cap: int,
                 patches: list[tuple[int, int]]) -> None:  # fmt: skip
    """Both pods through the same arrivals and changes of the cap, looked at on the way."""
    pods = [kind("pod-1", params, slo, cap, 1, seed=3) for kind in (SimulatedPod, CompiledPod)]
    queues, now_s = [deque(trace_of(drawn)) for _ in pods], 0.0
    for epoch, (steps, new_cap) in enumerate([*patches, (60, cap)], 2):
        now_s += 1.1 * steps
        for pod, arrivals in zip(pods, queues, strict=True):
            pod.run(now_s, arrivals)
        python, compiled = pods
        (ended, still_open), (should_end, should_be_open) = compiled.outcomes(), python.outcomes()
        assert ended == should_end
        assert [o[:2] for o in still_open] == [o[:2] for o in should_be_open]
        assert (compiled.is_idle, compiled.num_refused, compiled.num_preemptions) == (
            python.is_idle, python.num_refused, python.num_preemptions,
        )  # fmt: skip
        assert compiled.totals == python.totals
        mine, its = (pod.view(now_s) for pod in (compiled, python))
        assert mine.config == its.config
        assert mine.evidence is not None
        assert its.evidence is not None
        assert mine.evidence.ticks == its.evidence.ticks
        assert mine.evidence.lengths == its.evidence.lengths
        fitted = [msgspec.structs.astuple(e.step_model) for e in (mine.evidence, its.evidence)
                  if e.step_model]  # fmt: skip
        assert fitted[0] == pytest.approx(fitted[1], rel=1e-6, abs=1e-9)
        for pod in pods:
            pod.patch(new_cap, epoch, now_s)


@settings(max_examples=160)
@given(
    st.sampled_from([SMALL, CALM]),
    st.lists(requests, min_size=1, max_size=40),
    st.integers(1, 12),
    changes,
    st.booleans(),
)
def test_the_compiled_pod_equals_the_workers_scheduler_tick_for_tick(
    params: Params,
    drawn: list[tuple[float, int, int]],
    cap: int,
    patches: list[tuple[int, int]],
    caching: bool,
) -> None:
    params = msgspec.structs.replace(params, prefix_caching=caching)
    assert_equal(params, SLO, drawn, cap, patches)


def test_it_equals_the_workers_scheduler_without_targets() -> None:
    assert_equal(SMALL, Slo(), [(0.05, 17 + 7 * i % 60, 40) for i in range(40)], 8, [(2, 3)])


@pytest.mark.parametrize("itl_ms", [None, 30_000.0])
def test_it_equals_the_workers_scheduler_where_a_step_would_take_too_long(
    itl_ms: float | None,
) -> None:
    """96 tokens of a prompt would take 19 s: a step has 5."""
    params = msgspec.structs.replace(SMALL, d=200.0)
    drawn = [(2.0, 40 + 7 * i % 60, 3) for i in range(12)]
    assert_equal(params, Slo(itl_ms=itl_ms), drawn, 4, [])
    pod = CompiledPod("pod-1", params, Slo(itl_ms=itl_ms), 4, 1)
    pod.run(60.0, deque(trace_of(drawn)))
    evidence = pod.view(60.0).evidence
    assert evidence is not None
    busy = [tick for tick in evidence.ticks if tick.steps]
    assert sum(t.prefill_tokens for t in busy) < 40 * sum(t.steps for t in busy)


@pytest.mark.parametrize("together", [1, 9])
def test_it_equals_the_workers_scheduler_where_a_tick_closes_in_a_first_step(together: int) -> None:
    """Of those that came as it began, as many as have a place are prefilled, the others wait."""
    drawn = [(0.0 if i % together else 12.0, 90, 2) for i in range(18)]
    params = msgspec.structs.replace(SMALL, d=30.0, kv_tokens=4096)
    assert_equal(params, SLO, drawn, 4, [])
    pod = CompiledPod("pod-1", params, SLO, 4, 1)
    pod.run(400.0, deque(trace_of(drawn)))
    evidence = pod.view(400.0).evidence
    assert evidence is not None
    assert sum(tick.ttft.by.prefill for tick in evidence.ticks) > 0
    assert (sum(tick.ttft.by.cap for tick in evidence.ticks) > 0) == (together > 4)


@pytest.mark.parametrize("base", [SMALL, CALM], ids=["interference", "calm"])
@pytest.mark.parametrize("caching", [True, False])
def test_it_equals_the_workers_scheduler_where_memory_is_short(base: Params, caching: bool) -> None:
    params = msgspec.structs.replace(
        base, kv_tokens=256, max_num_queued=1024, prefix_caching=caching
    )
    drawn = [(0.05, 17 + 7 * i % 60, 40) for i in range(60)]
    assert_equal(params, SLO, drawn, 8, [])
    pod = CompiledPod("pod-1", params, SLO, 8, 1)
    pod.run(60.0, deque(trace_of(drawn)))
    assert pod.num_preemptions > 10


def test_those_that_end_together_give_their_blocks_back_in_order_of_arrival() -> None:
    """The reproducer of a pod that ended them in the order in which they began to decode."""
    lengths = [(10, 24), (58, 8), (1, 8), (69, 13), (26, 7), (95, 2), (104, 2), (33, 1)]
    assert_equal(CALM, SLO, [(0.0, *both) for both in lengths], 3, [])


def test_a_long_output_is_smooth_by_the_number_of_its_gaps() -> None:
    """The reproducer of a pod that took any gap over for the end of smoothness."""
    params, drawn = msgspec.structs.replace(CALM, noise=0.5), [(3.0, 10, 240)] * 8
    assert_equal(params, SLO, drawn, 2, [])
    pod = SimulatedPod("pod-1", params, SLO, 2, 1, seed=3)
    pod.run(120.0, deque(trace_of(drawn)))
    assert any(0 < outcome.num_gaps_over <= 2 for outcome in pod.outcomes()[0])


@pytest.mark.parametrize("service", ["cpu", "gpu"])
@pytest.mark.parametrize("policy", ["fixed", "aimd", "sluice"])
@pytest.mark.parametrize("spell_s", [5.0, 40.0])
@pytest.mark.parametrize("trace_name", ["steps", "overload", "bursts"])
def test_whole_runs_score_alike(service: str, policy: str, spell_s: float, trace_name: str) -> None:
    params, lengths = SERVICES[service]
    noise = NOISES["interference"] | {"interference_mean_s": spell_s}
    params = msgspec.structs.replace(params, **noise)
    targets = read_targets(TARGETS[service]["default"])
    trace = make_trace(trace_name, params, targets.itl_ms, lengths, 500, seed=2)

    def new() -> Policy:
        if policy == "sluice":
            return Tuner(params.limits(), every_s=4.0)
        return Aimd(8, ()) if policy == "aimd" else Replay(8, ())

    results = []
    for pod_type in (SimulatedPod, CompiledPod):
        world = World(params, targets, trace, new(), 2, pod_type)
        world.run()
        results.append(score(world))
    assert results[0] == results[1]


def test_an_order_by_deadline_is_left_to_the_python_pod() -> None:
    params = msgspec.structs.replace(SMALL, order="deadline")
    assert quickest(params, [Request(0.0, 10, 10)]) is SimulatedPod
    with pytest.raises(CannotCompile, match="by arrival only"):
        CompiledPod("pod-1", params, SLO, 1, 1)


def test_prefixes_shedding_delays_and_a_missing_compiler_are_left_to_the_python_pod(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    plain, shared = [Request(0.0, 10, 10)], [Request(0.0, 10, 10, ("p",), 10)]
    assert quickest(SMALL, plain) is CompiledPod
    assert quickest(SMALL, shared) is SimulatedPod
    assert quickest(msgspec.structs.replace(SMALL, overload="Shed"), plain) is SimulatedPod
    for name in ("chunk_ms", "hiccup_share", "stall_every_s", "first_size_ms"):
        assert quickest(msgspec.structs.replace(SMALL, **{name: 1.0}), plain) is SimulatedPod
    monkeypatch.setenv("PATH", "")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    library.library.cache_clear()
    try:
        assert quickest(SMALL, plain) is SimulatedPod
        with pytest.raises(CannotCompile):
            CompiledPod("pod-1", SMALL, SLO, 1, 1)
    finally:
        library.library.cache_clear()
