"""The bench claims only what its runs bear out."""

import re
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from bench.peers import report
from bench.peers.checkpoint import CONTROL, MODELS, tokenizer
from bench.peers.goals import GOALS, judge, speed
from bench.peers.results import Machine, TraceResult, failed_run
from bench.peers.rounds import Claim, Run, counted, needs_more, order, ratio
from bench.peers.traces import FIRST_TEXT_ID, TRACES, VOCAB_SIZE, padded
from bench.peers.variants import TAKING_PART, VARIANTS, launch
from hypothesis import given
from hypothesis import strategies as st
from sluice.measure.client import quantile
from tokenizers import Tokenizer

BEST = 400.0


def _run(peer: str, repeat: int, wall_s: float, peak: float = BEST) -> Run:
    cpu_s, flops = 2 * wall_s, 1e11
    return Run(peer, repeat, wall_s, cpu_s, cpu_s, 0.0, peak, peak, 100, 100, flops, 9, 9, 5, 5)


def _claim(runs: list[Run]) -> Claim:
    return ratio(runs, ("a", "b"), speed, BEST)


@pytest.mark.parametrize(("n", "q", "rank"), [(100, 0.99, 99), (101, 0.99, 100), (1, 0.5, 1)])
def test_a_quantile_is_of_the_nearest_rank(n: int, q: float, rank: int) -> None:
    assert quantile(range(n, 0, -1), q) == rank
    assert quantile([], q) is None


def test_a_ratio_is_of_runs_of_one_round() -> None:
    pairs = [(1.0, 2.0), (10.0, 20.0), (3.0, 9.0)]
    runs = [_run(peer, n, s[peer == "b"]) for n, s in enumerate(pairs) for peer in "ab"]
    found = _claim(runs).spread
    assert found is not None
    assert (found.median, found.least, found.count) == (2.0, 2.0, 3)
    assert found.most == pytest.approx(3.0)


def test_no_ratio_is_claimed_when_over_half_of_the_rounds_are_discarded() -> None:
    runs = [_run(peer, n, 1.0, BEST if n < 3 else 200.0) for n in range(7) for peer in "ab"]
    assert _claim(runs) == Claim(None, "4 of 7 rounds discarded")
    assert _claim(runs[:12]).spread is not None  # 3 of 6


def test_no_ratio_is_claimed_from_two_rounds() -> None:
    assert _claim([_run(peer, n, 1.0) for n in range(2) for peer in "ab"]).spread is None


@given(st.lists(st.sampled_from([100.0, 350.0, 370.0, 400.0]), min_size=1, max_size=9))
def test_what_counts_had_the_peak_on_both_sides(peaks: list[float]) -> None:
    runs = [
        msgspec.structs.replace(_run("a", n, 1.0), peak_before=before, peak_after=after)
        for n, (before, after) in enumerate(zip(peaks, peaks[1:], strict=False))
    ]
    good = counted(runs, "a", BEST)
    assert good == [run for run in runs if run.peak_before >= 360 and run.peak_after >= 360]
    assert (needs_more(runs, ["a"], BEST, 3) == []) == (len(good) >= 3)


def test_rounds_go_on_until_every_two_peers_have_enough_in_common() -> None:
    alone = {0: "a", 4: "b"}  # in these only one of them counts
    runs = [
        _run(peer, n, 1.0, BEST if alone.get(n, peer) == peer else 100.0)
        for n in range(5)
        for peer in "ab"
    ]
    assert needs_more(runs[:8], ["a", "b"], BEST, 4) == ["a", "b"]
    assert needs_more(runs, ["a", "b"], BEST, 3) == []
    assert needs_more(runs, ["a", "b"], BEST, 4) == ["a", "b"]


def test_a_failed_run_never_counts() -> None:
    kept = msgspec.json.encode(failed_run("a", 0, "HTTP 500"))
    failed = msgspec.json.decode(kept, type=Run)
    assert not failed.counts(0.0)
    assert _claim([failed, _run("b", 0, 1.0)]).spread is None


def test_every_peer_begins_a_round_in_its_turn() -> None:
    peers = ["a", "b", "c"]
    assert [order(peers, n)[0] for n in range(3)] == peers
    assert all(sorted(order(peers, n)) == peers for n in range(9))


@pytest.mark.parametrize("name", TRACES)
def test_repeats_of_a_trace_differ_in_tokens_and_not_in_lengths(name: str) -> None:
    trace = TRACES[name]
    first, again, second = trace.requests(0), trace.requests(0), trace.requests(1)
    assert first == again
    for one, other in zip(first, second, strict=True):
        assert (len(one.prompt), one.output_tokens) == (len(other.prompt), other.output_tokens)
        assert one.prompt[:64] != other.prompt[:64]
        assert min(one.prompt) >= FIRST_TEXT_ID
        assert max(one.prompt) < VOCAB_SIZE
        low, high = trace.prompt_tokens
        assert low <= len(one.prompt) - trace.prefix_tokens <= high


def test_shared_prefixes_are_shared() -> None:
    trace = TRACES["prefix"]
    heads = {request.prompt[: trace.prefix_tokens] for request in trace.requests(0)}
    assert len(heads) == trace.prefixes


def test_the_models_have_the_sizes_that_they_are_named_for() -> None:
    for llama, millions in zip(MODELS.values(), (88, 500), strict=True):
        sizes = [shape[0] * (shape[1] if len(shape) > 1 else 1) for _, shape in llama.shapes()]
        assert sum(sizes) == pytest.approx(1e6 * millions, rel=0.01)
        # A long prompt costs two operations a weight and token, and attention besides.
        assert llama.flops(1000, 1) > 2 * 1000 * (sum(sizes) - 2 * VOCAB_SIZE * llama.hidden_size)


def test_each_token_that_can_be_picked_is_a_text_of_its_own() -> None:
    made: Tokenizer = tokenizer()
    assert made.get_vocab_size() == VOCAB_SIZE
    assert [made.id_to_token(n) for n in range(len(CONTROL))] == list(CONTROL)
    texts = {made.decode([1000, n])[len(made.decode([1000])) :] for n in range(259, VOCAB_SIZE)}
    assert len(texts) == VOCAB_SIZE - FIRST_TEXT_ID
    assert "" not in texts
    assert "\ufffd" not in "".join(texts)


def test_one_server_serves_all_batch_sizes_and_each_static_size_its_own() -> None:
    traces = [TRACES[f"batch-{size}"] for size in (1, 4, 32)]

    def launches(name: str) -> int:
        return len({launch(VARIANTS[name], t, (0, 1), all_cpus=True) for t in traces})

    assert launches("sluice") == launches("vllm") == launches("transformers-static") == 1
    assert launches("sluice-static") == 3


def test_padded_prompts_are_as_long_as_the_longest_of_their_batch_and_no_two_begin_alike() -> None:
    trace = TRACES["batch-4"]
    asked = trace.requests(0)
    told = padded(asked, trace.cap)
    for at in range(0, len(asked), trace.cap):
        longest = max(len(request.prompt) for request in asked[at : at + trace.cap])
        assert {len(request.prompt) for request in told[at : at + trace.cap]} == {longest}
    for before, after in zip(asked, told, strict=True):
        assert after.prompt[-len(before.prompt) :] == before.prompt
        assert replace(after, prompt=before.prompt) == before
    assert len({request.prompt[:8] for request in told}) == len(told)


def test_the_target_that_is_asked_for_is_told() -> None:
    wanted = launch(
        VARIANTS["sluice-target"], TRACES["bursty"], (0, 1), all_cpus=True, target_ms=35
    )
    assert wanted.arguments[-2:] == ("--slo-itl-ms", "35")
    assert wanted.variant.about.endswith("of 35 ms")


def test_who_takes_part_and_what_is_to_be_reached_name_what_there_is() -> None:
    assert TAKING_PART.keys() == TRACES.keys()
    assert {name for names in TAKING_PART.values() for name in names} == VARIANTS.keys()
    for goal in GOALS:
        assert {goal.peer, *goal.against} <= set(TAKING_PART[goal.trace])


def _result(name: str, runs: list[Run]) -> TraceResult:
    trace = TRACES[name]
    return TraceResult(
        trace=name,
        about=trace.about,
        model=trace.model,
        date="2026-11-21",
        command="make bench",
        machine=Machine("a processor", 2, "bf16", BEST),
        num_requests=trace.num_requests,
        prompt_tokens=1000,
        output_tokens=100,
        peers={peer: VARIANTS[peer].about for peer in TAKING_PART[name]},
        versions={"sluice": "commit x"},
        starts_s={"sluice": 3.0},
        left_out={"llama.cpp": "no compiler."},
        runs=runs,
    )


def test_the_best_setting_of_a_peer_is_the_one_that_is_compared_with() -> None:
    seconds = {"sluice": 2.0, "vllm": 4.0, "vllm-mp": 3.0}
    runs = [_run(peer, n, s) for n in range(3) for peer, s in seconds.items()]
    claim, other = judge(GOALS[0], {"offline": _result("offline", runs)}, BEST)
    assert other == "vllm-mp"
    assert claim.spread is not None
    assert claim.spread.median == pytest.approx(1.5)


def test_the_page_says_what_was_left_out_and_what_was_discarded(tmp_path: Path) -> None:
    out = tmp_path / "benchmarks"
    out.mkdir()
    good = [_run(peer, n, 1.0 + (peer == "vllm")) for n in range(3) for peer in ("sluice", "vllm")]
    lost = [replace_peak(run) for run in good]
    for name, runs in {"offline": good, "batch-8": good, "prefix": lost}.items():
        (out / f"{name}.json").write_bytes(msgspec.json.encode(_result(name, runs)))
    report.write(out)
    page = (tmp_path / "benchmarks.md").read_text()
    assert "| offline, bf16, over vLLM-CPU | 1.1 | 1.3 | 2.00 (2.00 .. 2.00) | reached, and" in page
    assert "Left out: llama.cpp, because no compiler." in page
    assert re.search(r"Not run here: .*vllm-float32", page)
    assert "| 3 of 3 |" in page
    assert "| 0 of 3 |" in page
    assert "3 of 3 rounds discarded" in page
    assert {path.name for path in out.glob("*.png")} == {"offline.png", "batch.png", "prefix.png"}


def test_sizes_that_were_measured_with_different_commits_are_told_apart(tmp_path: Path) -> None:
    out = tmp_path / "benchmarks"
    out.mkdir()
    runs = [_run("sluice", n, 1.0) for n in range(3)]
    for name, commit in (("batch-1", "x"), ("batch-8", "y"), ("batch-32", "x")):
        result = msgspec.structs.replace(_result(name, runs), versions={"sluice": commit})
        (out / f"{name}.json").write_bytes(msgspec.json.encode(result))
    report.write(out)
    page = (tmp_path / "benchmarks.md").read_text()
    assert (
        "Not all sizes are of the same Sluice, so compare columns with care: 1, 32: x; 8: y."
        in page
    )


def replace_peak(run: Run) -> Run:
    """The same on a machine that gave half of its speed."""
    return msgspec.structs.replace(run, peak_after=BEST / 2)


def test_a_trial_keeps_the_lengths_that_are_left() -> None:
    trace = TRACES["offline"]
    assert trace.small(4).requests(0) == trace.requests(0)[:4]
    assert trace.small(4) == replace(trace, num_requests=4)
