"""Text Generation Inference 3.3, from its documented launcher; it was never run here. Pure."""

from .engine import LOOPBACK, ForeignEngine, Invocation, Start, flags


def _invoke(start: Start) -> Invocation:
    given = {
        "model-id": start.model,
        "revision": start.revision if start.is_hub else None,
        "dtype": None if start.dtype == "auto" else start.dtype,
        "max-total-tokens": start.max_model_len,
        "max-batch-prefill-tokens": start.budget,
        "cuda-memory-fraction": start.share,  # else it measures what is left
        "num-shard": start.tensor,
    }
    # Its own door would answer 429 to what the gate admits; --max-batch-size is not for NVIDIA.
    owned = {"hostname": LOOPBACK, "port": start.port, "max-concurrent-requests": start.capacity}
    env = {} if start.prefix_caching else {"PREFIX_CACHING": "0"}
    return Invocation(("text-generation-launcher",), flags(given), flags(owned), env)


ENGINE = ForeignEngine(
    name="tgi",
    kind="TGI",
    image="ghcr.io/huggingface/text-generation-inference:3.3.7",
    invoke=_invoke,
    capacity=128,
    owned_flags=("--hostname", "--port", "-p", "--api-key", "--max-concurrent-requests"),
    owned_variables=("PREFIX_CACHING",),
    waiting=("tgi_queue_size",),
    tokens=("tgi_request_generated_tokens_sum",),
    has_our_arithmetic=True,
    parallel_flags=("--num-shard", "--sharded"),
)
