"""Our own engine: the worker, which needs no gate. Pure."""

from collections.abc import Mapping

from .engine import Start, flags

_SPECULATION = '{"method":"ngram","num_speculative_tokens":8}'
"""Meaning of Auto: drafts by lookup, which the engine stops if they do not pay."""


def arguments(
    start: Start, door: Mapping[str, object], frontend: Mapping[str, object]
) -> tuple[str, ...]:
    """The worker's flags. `door`, `frontend`: those that a gate has too."""
    spec, has_gpu = start.spec, start.spec.hardware.accelerator == "nvidia"
    return flags(
        {
            "model": start.model,
            "revision": start.revision if start.is_hub else None,
            "download-dir": start.cache if start.is_hub else None,
            **door,
            "device": "cuda" if has_gpu else "cpu",
            "dtype": spec.model.dtype,
            "max-model-len": spec.model.max_model_len,
            "max-num-seqs": start.capacity,
            "max-num-batched-tokens": spec.batching.max_num_batched_tokens,
            "gpu-memory-utilization": f"{spec.batching.memory_utilization:g}",
            "gpu-memory-bytes": spec.hardware.memory_bytes if has_gpu else None,
            **frontend,
            "no-enable-prefix-caching": not spec.batching.prefix_caching,
            "speculative-config": _SPECULATION if spec.batching.speculation == "Auto" else None,
        }
    )
