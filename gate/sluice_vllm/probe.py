"""Checks if the scheduler of this vLLM can be steered from outside. Pure."""

from typing import Any

READ_EACH_STEP = ("max_num_active_reqs", "max_num_scheduled_tokens", "is_prefill_chunk")
"""`schedule` must read these from scheduler and requests, or setting them would do nothing."""
TRIM = "_reserve_prefill_lookahead"
"""`schedule` asks this for the tokens of each prompt that it computes."""
HELD = (
    *("running", "requests", "waiting", "cache_config", "kv_cache_manager", "max_model_len"),
    *("block_size", "num_spec_tokens", "max_num_running_reqs", "scheduler_config"),
    *("get_request_counts", "get_num_unfinished_requests"),
)


def what_lacks(scheduler: Any, stock: Any) -> str | None:
    """The first thing that vLLM's class `stock` lacks, as part of a sentence; None: nothing."""
    for name in READ_EACH_STEP:
        if name not in _names(stock):
            return f"its schedule() does not read {name}"
    lacking = next((name for name in HELD if not hasattr(scheduler, name)), None)
    return lacking and f"its scheduler has no {lacking}"


def why_whole(scheduler: Any) -> str | None:
    """Why a prompt must not be cut at will: a budget below its need at once starves it."""
    config = scheduler.scheduler_config
    if not getattr(config, "enable_chunked_prefill", False):
        return "chunked prefill is off"
    if getattr(config, "disable_chunked_mm_input", False):
        return "images are not computed in parts (--disable-chunked-mm-input)"
    if getattr(scheduler, "is_encoder_decoder", False):
        return "the model has an encoder"
    if getattr(scheduler, "need_mamba_block_aligned_split", False):
        return "the model's state is kept by blocks"
    return None


def why_never_held(scheduler: Any, stock: Any) -> str | None:
    """Why no prompt may stop one token before its end."""
    if TRIM not in _names(stock):
        return f"its schedule() does not ask {TRIM}"
    if getattr(scheduler.scheduler_config, "prefill_schedule_interval", 1) > 1:
        return "only some steps may have prompts (--prefill-schedule-interval)"
    return None


def _names(stock: Any) -> tuple[str, ...]:
    """All names that `schedule` of vLLM's class uses."""
    names: tuple[str, ...] = getattr(getattr(stock.schedule, "__code__", None), "co_names", ())
    return names
