"""Checks if the scheduler of this vLLM can be steered from outside. Pure."""

from typing import Any

READ_EACH_STEP = ("max_num_active_reqs", "max_num_scheduled_tokens", "is_prefill_chunk")
"""`schedule` must read these from scheduler and requests, or setting them would do nothing."""
HELD = (
    *("running", "requests", "waiting", "cache_config", "kv_cache_manager", "max_model_len"),
    *("block_size", "num_spec_tokens", "max_num_running_reqs", "scheduler_config"),
    *("get_request_counts", "get_num_unfinished_requests"),
)


def what_lacks(scheduler: Any, stock: Any) -> str | None:
    """The first thing that vLLM's class `stock` lacks, as part of a sentence; None: nothing."""
    reads = getattr(getattr(stock.schedule, "__code__", None), "co_names", ())
    for name in READ_EACH_STEP:
        if name not in reads:
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
