"""The structs of recording.h, steptimes.h and pod.cpp, field by field in their order."""

from ctypes import Structure, c_double, c_int64
from typing import Any


def _fields(reals: str, wholes: str = "") -> list[tuple[str, Any]]:
    return [(name, c_double) for name in reals.split()] + [(n, c_int64) for n in wholes.split()]


class Config(Structure):
    _fields_ = _fields(
        "a b c d between_ms leak_per_hour interference_factor ttft_ms itl_ms e2e_ms start_s tick_s "
        "refit_s log_gamma smallest_ms smooth_share at_cap_share",
        "cap epoch num_blocks block_size caching max_num_batched_tokens max_num_queued min_chunk "
        "has_interference",
    )


class Tick(Structure):
    _fields_ = _fields(
        "t_s busy_s",
        "epoch settled max_num_seqs arrivals refused finished good smooth ttft_n ttft_over by_cap "
        "by_kv by_prefill by_outside itl_n itl_over over_after_over n_at_cap over_at_cap e2e_n "
        "e2e_over steps slow_steps decodes prefill_tokens generated_tokens running max_running "
        "waiting_cap waiting_kv num_ttft num_itl num_e2e",
    )


class Totals(Structure):
    _fields_ = _fields("", "num_gaps num_gaps_over most_running")


class Model(Structure):
    _fields_ = [*_fields("a b c d", "n"), ("resid_q", c_double)]


class Fit(Structure):
    _fields_ = [
        ("model", Model),
        *_fields(
            "stretch max_age_s anchor_weight model_quantile tail_quantile stretch_quantile "
            "interference_shift regime_s normal_tail max_step_ms",
            "bucket_records min_judged least_chunk interference_steps known_steps no_limit",
        ),
    ]


class Row(Structure):
    _fields_ = _fields("at_s decodes kv_tokens prefill ms slowdown")


class View(Structure):
    _fields_ = [
        *_fields(
            "",
            "num_open running waiting_cap waiting_kv num_refused num_preemptions num_ticks "
            "num_lengths",
        ),
        ("model", Model),
    ]


class Ended(Structure):
    _fields_ = _fields("t_s first_s last_s", "num_tokens num_gaps_over")
