"""What a patch puts in force: all of it or nothing, and never behind the operator's back."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from sluice_core.contract import RuntimePatch, Slo
from sluice_core.errors import OverCeiling, SluiceError, StaleEpoch
from sluice_frontend.serving.limits import RuntimeLimits

LIVE = RuntimeLimits(
    epoch=7,
    cap=8,
    max_num_batched_tokens=512,
    slo=Slo(ttft_ms=500),
    overload="Queue",
    scheduling_policy="fcfs",
)


def changed(**fields: object) -> RuntimeLimits:
    patch = RuntimePatch(**{"epoch": 7, **fields})  # type: ignore[arg-type]
    return LIVE.changed(patch, ceiling=16, largest_budget=1024)


@pytest.mark.parametrize(
    ("fields", "error", "param"),
    [
        ({"epoch": 6}, StaleEpoch, "epoch"),
        ({"cap": 9}, StaleEpoch, "epoch"),
        ({"max_num_batched_tokens": 256}, StaleEpoch, "epoch"),
        ({"epoch": 8, "cap": 17}, OverCeiling, "cap"),
        ({"epoch": 8, "max_num_batched_tokens": 7}, OverCeiling, "max_num_batched_tokens"),
        ({"epoch": 8, "max_num_batched_tokens": 1025}, OverCeiling, "max_num_batched_tokens"),
    ],
)
def test_what_cannot_be_in_force_is_refused_by_its_field(
    fields: dict[str, object], error: type[SluiceError], param: str
) -> None:
    with pytest.raises(error) as refused:
        changed(**fields)
    assert refused.value.param == param


def test_targets_need_no_new_epoch() -> None:
    fields = {"slo": Slo(itl_ms=50), "overload": "Shed", "scheduling_policy": "priority"}
    assert changed(**fields, hold_share=0) == replace(LIVE, **fields, hold_share=0)


@given(st.integers(0, 20), st.integers(1, 20) | st.none(), st.integers(1, 2000) | st.none())
def test_a_patch_sent_twice_is_in_force_once(
    epoch: int, cap: int | None, budget: int | None
) -> None:
    patch = RuntimePatch(epoch, cap, budget)
    try:
        once = LIVE.changed(patch, ceiling=16, largest_budget=1024)
    except SluiceError:
        return
    assert once.changed(patch, ceiling=16, largest_budget=1024) == once
    assert (once.cap, once.max_num_batched_tokens) == (cap or 8, budget or 512)
    assert once.cap <= once.max_num_batched_tokens


def test_only_shedding_gives_requests_a_deadline_that_bring_none() -> None:
    assert LIVE.shed_ms is None
    assert changed(overload="Shed").shed_ms == 500


def test_the_order_follows_a_target_that_comes_or_goes_until_one_is_asked_for() -> None:
    live = replace(LIVE, scheduling_policy=None)

    def after(**fields: object) -> RuntimeLimits:
        patch = RuntimePatch(7, **fields)  # type: ignore[arg-type]
        return live.changed(patch, ceiling=16, largest_budget=1024)

    assert live.for_engine().policy == "deadline"
    live = after(slo=Slo(itl_ms=50))
    assert live.for_engine().policy == "fcfs"
    live = after(slo=Slo(ttft_ms=900))
    assert live.for_engine().policy == "deadline"
    live = after(scheduling_policy="fcfs")
    live = after(slo=Slo(ttft_ms=800))
    assert live.for_engine().policy == "fcfs"
