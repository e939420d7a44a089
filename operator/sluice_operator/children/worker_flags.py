"""Our own engine's flags: the worker, which needs no gate. Pure."""

from collections.abc import Mapping

from sluice_core.engines.engine import flags

from ..spec.service import Spec, StaticBatches

_SPECULATION = '{"method":"ngram","num_speculative_tokens":8}'
"""Meaning of Auto: drafts by lookup, which the engine stops if they do not pay."""


def worker_flags(
    spec: Spec,
    start: Mapping[str, object],
    door: Mapping[str, object],
    frontend: Mapping[str, object],
    capacity: int | None,
) -> tuple[str, ...]:
    """Write them. `start`: of its model; `door`, `frontend`: those that a gate has too.

    `capacity`: None lets it size itself.
    """
    has_gpu, writes = spec.hardware.accelerator == "nvidia", spec.model.task == "Generate"
    drafts = spec.batching.speculation == "Auto"
    return flags(
        {
            **start,
            **door,
            "device": "cuda" if has_gpu else "cpu",
            "dtype": spec.model.dtype,
            "max-model-len": spec.model.max_model_len,
            "max-num-seqs": capacity,
            "max-num-batched-tokens": spec.batching.max_num_batched_tokens,
            "gpu-memory-utilization": f"{spec.batching.memory_utilization:g}",
            "gpu-memory-bytes": spec.hardware.memory_bytes if has_gpu else None,
            **frontend,
            **_static(spec.batching.static),
            "no-enable-prefix-caching": writes and not spec.batching.prefix_caching,
            "speculative-config": _SPECULATION if writes and drafts else None,
        }
    )


def _static(batches: StaticBatches | None) -> Mapping[str, object]:
    if batches is None:
        return {}
    return {
        "batching-mode": "static",
        "static-batch-size": batches.size,
        "static-batch-timeout-ms": None if batches.wait_ms is None else f"{batches.wait_ms:g}",
    }
