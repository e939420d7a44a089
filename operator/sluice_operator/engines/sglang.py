"""SGLang, from its documented server arguments; it was never run here. Pure."""

from .engine import ADMIN_KEY, LOOPBACK, PORT, Engine, Invocation, Start, flags

_OWN_UTILIZATION = 0.9
"""The field's default, which leaves --mem-fraction-static to SGLang: its share has no room for
activations, so it finds its own."""


def _invoke(start: Start) -> Invocation:
    spec = start.spec
    share = spec.batching.memory_utilization
    given = {
        "model-path": start.model,
        "served-model-name": spec.model.name,
        "revision": start.revision if start.is_hub else None,
        "dtype": spec.model.dtype,
        "context-length": spec.model.max_model_len,
        "chunked-prefill-size": spec.batching.max_num_batched_tokens,
        "mem-fraction-static": None if share == _OWN_UTILIZATION else f"{share:g}",
        "disable-radix-cache": not spec.batching.prefix_caching,
        "device": "cpu" if spec.hardware.accelerator == "cpu" else None,
        # Caps above the captured graphs would run without one: sgl-project/sglang#33483.
        "cuda-graph-max-bs": start.capacity if spec.hardware.accelerator == "nvidia" else None,
    }
    owned = {
        "host": LOOPBACK,
        "port": PORT,
        "max-running-requests": start.capacity,
        "enable-metrics": True,
        # Without it any client may call its admin routes, through the gate too.
        "admin-api-key": f"$({ADMIN_KEY})",
    }
    return Invocation(("python3", "-m", "sglang.launch_server"), flags(given), flags(owned))


ENGINE = Engine(
    gate_name="sglang",
    image="lmsysorg/sglang:v0.5.9",
    invoke=_invoke,
    default_capacity=256,
    takes_budget=True,
    has_our_arithmetic=True,
    takes_admin_key=True,
)
