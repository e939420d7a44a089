"""Text Generation Inference 3.3, from its documented launcher; it was never run here. Pure."""

from .engine import LOOPBACK, PORT, Engine, Invocation, Start, flags

_OWN_UTILIZATION = 0.9
"""The field's default, which leaves --cuda-memory-fraction to TGI: it measures what is left."""


def _invoke(start: Start) -> Invocation:
    spec = start.spec
    share, dtype = spec.batching.memory_utilization, spec.model.dtype
    given = {
        "model-id": start.model,
        "revision": start.revision if start.is_hub else None,
        "dtype": None if dtype == "auto" else dtype,
        "max-total-tokens": spec.model.max_model_len,
        "max-batch-prefill-tokens": spec.batching.max_num_batched_tokens,
        "cuda-memory-fraction": None if share == _OWN_UTILIZATION else f"{share:g}",
    }
    # Its own door would answer 429 to what the gate admits; --max-batch-size is not for NVIDIA.
    owned = {"hostname": LOOPBACK, "port": PORT, "max-concurrent-requests": start.capacity}
    env = {} if spec.batching.prefix_caching else {"PREFIX_CACHING": "0"}
    return Invocation(("text-generation-launcher",), flags(given), flags(owned), env)


ENGINE = Engine(
    gate_name="tgi",
    image="ghcr.io/huggingface/text-generation-inference:3.3.7",
    invoke=_invoke,
    default_capacity=128,
    has_our_arithmetic=True,
)
