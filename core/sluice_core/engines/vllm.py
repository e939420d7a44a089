"""vLLM: `vllm serve MODEL`. Written for 0.32. Pure."""

from collections.abc import Sequence

from .engine import LOOPBACK, ForeignEngine, Group, Invocation, Start, flags, names

SCHEDULER = "sluice_vllm.Scheduler"
PACKAGES = ("sluice_vllm", "sluice_core")
"""What our scheduler needs; vLLM's own image has neither."""

_GROUP = ("--nnodes", "--node-rank", "--master-addr", "--headless")
"""`hardware.nodes` sets them."""


def _invoke(start: Start) -> Invocation:
    given = {
        "served-model-name": start.name,
        "revision": start.revision if start.is_hub else None,
        "dtype": start.dtype,
        "max-model-len": start.max_model_len,
        "max-num-batched-tokens": start.budget,
        "gpu-memory-utilization": start.utilization and f"{start.utilization:g}",
        "enable-prefix-caching": start.prefix_caching,
        "no-enable-prefix-caching": not start.prefix_caching,
        "scheduler-cls": start.inside and SCHEDULER,
        "tensor-parallel-size": start.tensor,
        "pipeline-parallel-size": start.pipeline,
    }
    owned = {"host": LOOPBACK, "port": start.port, "max-num-seqs": start.capacity}
    owned |= _joined(start.group) if start.group else {}
    env = {}
    if start.inside is not None:
        env = {"PYTHONPATH": start.inside.packages, "SLUICE_GATE_SOCKET": start.inside.socket}
    return Invocation(("vllm", "serve"), (start.model, *flags(given)), flags(owned), env)


def _joined(group: Group) -> dict[str, object]:
    """As one of several nodes: https://docs.vllm.ai/en/latest/serving/parallelism_scaling.html."""
    return {
        "nnodes": group.size,
        "node-rank": group.rank,
        "master-addr": group.leader,
        "headless": group.follows,
    }


def _loads_scheduler(args: Sequence[str]) -> bool:
    """Not if the user names a scheduler class."""
    return "--scheduler-cls" not in names(args)


ENGINE = ForeignEngine(
    name="vllm",
    kind="VLLM",
    image="vllm/vllm-openai:v0.32.0",
    invoke=_invoke,
    capacity=256,
    owned_flags=("--host", "--port", "--uds", "--api-key", "--max-num-seqs", *_GROUP),
    owned_variables=("PYTHONPATH",),
    waiting=("vllm:num_requests_waiting",),
    kv_usage=("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc"),  # before 0.9.2
    preemptions=("vllm:num_preemptions_total",),
    tokens=("vllm:generation_tokens_total", "vllm:prompt_tokens_total"),
    counts_steps=True,
    has_our_arithmetic=True,
    takes_budget=True,
    loads_scheduler=_loads_scheduler,
    parallel_flags=(
        "--tensor-parallel-size", "-tp", "--pipeline-parallel-size", "-pp",
        "--data-parallel-size", "-dp",
    ),
    program="vllm",
    verb=("serve",),
    module=("-m", "vllm.entrypoints.openai.api_server", "--model"),
    install="https://docs.vllm.ai",
)  # fmt: skip
