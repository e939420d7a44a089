"""vLLM: `vllm serve MODEL`. Written for 0.32. Pure."""

from ..spec.service import Spec
from .engine import LOOPBACK, PORT, Engine, Invocation, Start, flags

SCHEDULER = "sluice_vllm.Scheduler"
PACKAGES = ("sluice_vllm", "sluice_core")
"""Copied from the gate's image, for vLLM's own has neither."""
PACKAGES_DIR, SOCKET_DIR = "/opt/sluice-vllm", "/run/sluice"
SOCKET = f"{SOCKET_DIR}/engine.sock"


def _invoke(start: Start) -> Invocation:
    spec = start.spec
    given = {
        "served-model-name": spec.model.name,
        "revision": start.revision if start.is_hub else None,
        "dtype": spec.model.dtype,
        "max-model-len": spec.model.max_model_len,
        "max-num-batched-tokens": spec.batching.max_num_batched_tokens,
        "gpu-memory-utilization": f"{spec.batching.memory_utilization:g}",
        "enable-prefix-caching": spec.batching.prefix_caching,
        "no-enable-prefix-caching": not spec.batching.prefix_caching,
    }
    is_inside = loads_scheduler(spec)
    scheduler = {"scheduler-cls": SCHEDULER} if is_inside else {}
    owned = {"host": LOOPBACK, "port": PORT, "max-num-seqs": start.capacity}
    inside = {"PYTHONPATH": PACKAGES_DIR, "SLUICE_GATE_SOCKET": SOCKET}
    return Invocation(
        ("vllm", "serve"),
        (start.model, *flags(given), *flags(scheduler)),
        flags(owned),
        inside if is_inside else {},
    )


def loads_scheduler(spec: Spec) -> bool:
    """Whether ours runs inside: not if the user names a scheduler class."""
    names = (arg.split("=")[0].replace("_", "-") for arg in spec.engine.args)
    return "--scheduler-cls" not in names


ENGINE = Engine(
    gate_name="vllm",
    image="vllm/vllm-openai:v0.32.0",
    invoke=_invoke,
    default_capacity=256,
    takes_budget=True,
    has_our_arithmetic=True,
    loads_scheduler=loads_scheduler,
)
