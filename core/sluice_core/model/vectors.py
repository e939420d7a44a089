"""Memory of models that make vectors or classes: no KV cache, only weights and one step. Pure."""

import math
from dataclasses import replace

from .architecture import DTYPE_BYTES, ModelShape, SizingError, resolve_dtype, weights_bytes
from .encoders import EncoderShape
from .images import DECODING_BYTES, JointShape
from .sizing import (
    GIB,
    HOST_BYTES,
    WORKSPACE_BYTES,
    MemoryPlan,
    MemoryRequest,
    activation_bytes,
    kv_bytes_per_token,
)
from .tasks import Shape

WAITING_IMAGES = 1024
"""Images for which both processes have memory while they wait (`--max-num-queued-reqs`)."""


def runs_as(asked: str, shape: Shape, *, on_cpu: bool) -> str:
    """The dtype to run with: `asked`, or the checkpoint's own for "auto". An encoder's float16
    becomes float32 on a CPU, where few have products for it. Raises SizingError."""
    if isinstance(shape, ModelShape):
        return resolve_dtype(asked, shape, on_cpu=on_cpu)
    name = shape.dtype if asked == "auto" else asked
    if name not in DTYPE_BYTES:
        raise SizingError(
            f"dtype {name[:32]} is not one of auto, {', '.join(sorted(DTYPE_BYTES))}."
        )
    return "float32" if asked == "auto" and name == "float16" and on_cpu else name


def plan_vectors(shape: Shape, asked: MemoryRequest, pixel_bytes: int = 0) -> MemoryPlan:
    """Plan the memory, as `sizing.plan_memory` does. `pixel_bytes`: of an image that waits.

    A text that is longer than a step's budget goes alone, so the longest one counts as well. The
    ceiling is the budget, as a text has a token at least.
    """
    if not 1 <= asked.max_model_len <= shape.default_len:
        raise SizingError(
            f"max_model_len {asked.max_model_len} is not between 1 and the {shape.default_len} "
            "that the model reads."
        )
    budget = asked.max_num_batched_tokens
    longest = max(budget, asked.max_model_len)
    plan = MemoryPlan(
        total_bytes=asked.total_bytes,
        utilization=asked.utilization,
        weights_bytes=asked.weights_bytes,
        activation_bytes=step_bytes(shape, longest, asked.dtype_bytes),
        workspace_bytes=WORKSPACE_BYTES[asked.device],
        reserve_bytes=asked.reserve_bytes + _for_images(pixel_bytes),
        kv_bytes_per_token=0,
        block_size=1,
        num_blocks=0,
        max_model_len=asked.max_model_len,
        ceiling=min(asked.max_num_seqs or budget, budget),
        device=asked.device,
    )
    return plan if plan.fixed_bytes <= plan.usable_bytes else replace(plan, ceiling=0)


def _for_images(pixel_bytes: int) -> int:
    return DECODING_BYTES + 2 * WAITING_IMAGES * pixel_bytes if pixel_bytes else 0


def stored_bytes(shape: Shape, dtype_bytes: int) -> int:
    """Bytes of the weights by the shape alone, heads left out."""
    if isinstance(shape, ModelShape):
        return weights_bytes(shape, dtype_bytes)
    if isinstance(shape, JointShape):
        parts = shape.texts.weights_bytes(dtype_bytes), shape.images.weights_bytes(dtype_bytes)
        return sum(parts)
    return shape.weights_bytes(dtype_bytes)


def step_bytes(shape: Shape, num_tokens: int, dtype_bytes: int) -> int:
    """Peak bytes of a step of `num_tokens`: a decoder's has a layer's keys too."""
    if isinstance(shape, JointShape):
        parts = shape.texts, shape.images
        return max(step_bytes(part, num_tokens, dtype_bytes) for part in parts)
    if isinstance(shape, ModelShape):
        keys = num_tokens * kv_bytes_per_token(shape, dtype_bytes) // shape.num_layers
        return activation_bytes(shape, num_tokens, 0, dtype_bytes) + keys
    layers = shape if isinstance(shape, EncoderShape) else shape.layers
    return layers.activation_bytes(num_tokens, dtype_bytes)


def host_bytes(shape: Shape, dtype_bytes: int) -> int:
    """Memory of the host that loading onto a GPU takes, in whole GiB: all weights at most."""
    return math.ceil((HOST_BYTES + stored_bytes(shape, dtype_bytes)) / GIB) * GIB
