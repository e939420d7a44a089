"""What the environment may say, and what stands in the way of steering."""

from types import SimpleNamespace
from typing import Any

import pytest
from sluice_vllm.probe import HELD, READ_EACH_STEP, what_lacks, why_never_held, why_whole
from sluice_vllm.settings import InnerSettings, read


class Stock:
    """A scheduler that has all."""

    def __init__(self) -> None:
        for name in HELD:
            setattr(self, name, 1)
        self.scheduler_config = SimpleNamespace(enable_chunked_prefill=True)

    def _reserve_prefill_lookahead(self, num_tokens: int) -> int:
        return num_tokens

    def schedule(self, request: Any) -> Any:
        self._reserve_prefill_lookahead(1)
        return self.max_num_active_reqs, self.max_num_scheduled_tokens, request.is_prefill_chunk  # type: ignore[attr-defined]


def test_targets_and_socket_come_from_the_environment() -> None:
    environ = {"SLUICE_GATE_SOCKET": "/run/gate", "SLUICE_ITL_MS": "44", "SLUICE_TTFT_MS": "5e2"}
    assert read(environ) == InnerSettings("/run/gate", 44.0, 500.0)
    assert read({"SLUICE_GATE_SOCKET": "", "SLUICE_ITL_MS": ""}) == InnerSettings()
    assert read({"SLUICE_HOLD_SHARE": "0"}) == InnerSettings(hold_share=0.0)


@pytest.mark.parametrize("text", ["0", "-3", "soon", "inf", "nan"])
def test_a_target_that_is_no_time_is_refused_by_name(text: str) -> None:
    with pytest.raises(ValueError, match="SLUICE_ITL_MS must be milliseconds"):
        read({"SLUICE_ITL_MS": text})


@pytest.mark.parametrize("text", ["-0.1", "1.5", "half", "nan"])
def test_a_share_that_is_none_is_refused_by_name(text: str) -> None:
    with pytest.raises(ValueError, match="SLUICE_HOLD_SHARE must be from 0 to 1"):
        read({"SLUICE_HOLD_SHARE": text})


def test_a_known_scheduler_lacks_nothing() -> None:
    assert what_lacks(Stock(), Stock) is None


@pytest.mark.parametrize("name", READ_EACH_STEP)
def test_a_schedule_that_does_not_read_a_knob_is_not_steered(name: str) -> None:
    others = ", ".join(f"self.{other}" for other in READ_EACH_STEP if other != name)
    scope: dict[str, Any] = {}
    exec(f"class Old:\n def schedule(self): return {others}", scope)  # noqa: S102
    assert what_lacks(Stock(), scope["Old"]) == f"its schedule() does not read {name}"


@pytest.mark.parametrize("name", HELD)
def test_a_scheduler_without_what_is_used_is_not_steered(name: str) -> None:
    scheduler = Stock()
    delattr(scheduler, name)
    assert what_lacks(scheduler, Stock) == f"its scheduler has no {name}"


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({}, None),
        ({"is_encoder_decoder": True}, "the model has an encoder"),
        ({"need_mamba_block_aligned_split": True}, "the model's state is kept by blocks"),
        (
            {"scheduler_config": SimpleNamespace(enable_chunked_prefill=False)},
            "chunked prefill is off",
        ),
    ],
)
def test_prompts_that_cannot_be_cut_are_left_whole(change: dict[str, Any], why: object) -> None:
    scheduler = Stock()
    scheduler.__dict__.update(change)
    assert why_whole(scheduler) == why


def test_prompts_may_be_held_where_schedule_asks_for_the_tokens_of_each() -> None:
    class Other:
        def schedule(self) -> Any:
            return None

    assert why_never_held(Stock(), Stock) is None
    why = why_never_held(Stock(), Other)
    assert why == "its schedule() does not ask _reserve_prefill_lookahead"


def test_no_prompt_is_held_where_only_some_steps_may_have_prompts() -> None:
    scheduler = Stock()
    scheduler.scheduler_config.prefill_schedule_interval = 4
    why = why_never_held(scheduler, Stock)
    assert why == "only some steps may have prompts (--prefill-schedule-interval)"
