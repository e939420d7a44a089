"""SGLang, from its documented server arguments; it was never run here. Pure."""

from .engine import ADMIN_KEY, LOOPBACK, ForeignEngine, Invocation, Start, flags

_JOIN_PORT = 20000
"""Of the first node's pod, as in SGLang's documents for many nodes."""


def _invoke(start: Start) -> Invocation:
    given = {
        "model-path": start.model,
        "served-model-name": start.name,
        "revision": start.revision if start.is_hub else None,
        "dtype": start.dtype,
        "context-length": start.max_model_len,
        "chunked-prefill-size": start.budget,
        # Its share has no room for activations, so it finds its own unless one is asked for.
        "mem-fraction-static": start.share,
        "disable-radix-cache": not start.prefix_caching,
        "device": "cpu" if start.accelerator == "cpu" else None,
        # Caps above the captured graphs would run without one: sgl-project/sglang#33483.
        "cuda-graph-max-bs": start.capacity if start.accelerator == "nvidia" else None,
        "tp-size": start.tensor,
        "pp-size": start.pipeline,
    }
    owned = {
        "host": LOOPBACK,
        "port": start.port,
        "max-running-requests": start.capacity,
        "enable-metrics": True,
        # Without it any client may call its admin routes, through the gate too.
        "admin-api-key": f"$({ADMIN_KEY})",
    }
    if group := start.group:
        joined = {"nnodes": group.size, "node-rank": group.rank}
        owned |= joined | {"dist-init-addr": f"{group.leader}:{_JOIN_PORT}"}
    return Invocation(("python3", "-m", "sglang.launch_server"), flags(given), flags(owned))


ENGINE = ForeignEngine(
    name="sglang",
    kind="SGLang",
    image="lmsysorg/sglang:v0.5.9",
    invoke=_invoke,
    capacity=256,
    owned_flags=(
        "--host", "--port", "--api-key", "--admin-api-key", "--max-running-requests",
        "--enable-metrics", "--nnodes", "--node-rank", "--dist-init-addr",
    ),
    waiting=("sglang:num_queue_reqs", "sglang:num_grammar_queue_reqs"),
    kv_usage=("sglang:token_usage",),
    preemptions=("sglang:num_retracted_reqs",),
    tokens=("sglang:generation_tokens_total", "sglang:prompt_tokens_total"),
    about="/server_info",
    has_our_arithmetic=True,
    takes_budget=True,
    takes_admin_key=True,
    parallel_flags=(
        "--tp-size", "--tensor-parallel-size", "--tp", "--pp-size", "--pipeline-parallel-size",
        "--pp", "--dp-size", "--data-parallel-size", "--dp",
    ),
)  # fmt: skip
