"""The late gaps of vLLM's requests, from the ends of its steps."""

from sluice_core.law import Gaps
from sluice_core.port import EngineLimits
from sluice_vllm.gaps import UNKNOWN, GapBook
from unit.gate.made_vllm import Request

LIMITS = EngineLimits(0, 4, 512, itl_ms=50.0, ttft_ms=1000.0, policy="deadline")


def book(ends_s: list[float], *, limits: EngineLimits = LIMITS) -> Gaps:
    """Of one request that came at 0 and has a token at each end."""
    gaps, request = GapBook(), Request("a")
    gaps.book(["a"], {"a": request}, 0.1, limits)  # of its prompt
    for end_s in ends_s:
        request.num_output_tokens += 1
        gaps.book(["a"], {"a": request}, end_s, limits)
    return gaps.of("a")


def test_gaps_over_the_target_are_late_and_the_first_token_is_due() -> None:
    assert book([0.9, 0.94, 1.0, 1.04]) == Gaps(4, 1, is_in_time=True, first_s=0.9)
    assert book([1.1, 1.12]) == Gaps(2, 0, is_in_time=False, first_s=1.1)


def test_without_a_target_no_gap_is_late() -> None:
    free = EngineLimits(0, 4, 512)
    assert book([0.9, 9.0], limits=free) == Gaps(2, 0, is_in_time=True, first_s=0.9)


def test_a_step_without_a_token_ends_no_gap() -> None:
    gaps, request = GapBook(), Request("a", num_output_tokens=1)
    for end_s in (0.2, 0.24, 0.28):
        gaps.book(["a"], {"a": request}, end_s, LIMITS)
    request.num_output_tokens = 3  # drafts were right
    gaps.book(["a"], {"a": request}, 0.3, LIMITS)
    assert gaps.of("a") == Gaps(3, 1, is_in_time=True, first_s=0.2)


def test_who_ended_or_was_aborted_is_forgotten() -> None:
    gaps = GapBook()
    requests = {name: Request(name, num_output_tokens=1) for name in "abcd"}
    gaps.book(requests, requests, 0.5, LIMITS)
    ended, aborted = requests.pop("a"), requests.pop("b")
    gaps.book(["a", "c", "d"], requests, 0.6, LIMITS)
    assert gaps.of(ended.request_id) == gaps.of(aborted.request_id) == UNKNOWN
    assert len(gaps) == 2
