"""What a pod asks of its node, in the API server's own spelling of quantities. Pure."""

from ..spec.hardware import Hardware

_SUFFIXES = (
    *(("Ti", 1 << 40), ("Gi", 1 << 30), ("Mi", 1 << 20), ("Ki", 1 << 10)),
    *(("T", 10**12), ("G", 10**9), ("M", 10**6), ("k", 10**3)),
)


def limits(hardware: Hardware) -> dict[str, str]:
    """Of the worker's container. `memory` is the GPU's where there is one, `hostMemory` its own."""
    cpu = {"cpu": cpu_quantity(hardware.cpu_millis)}
    if hardware.accelerator == "cpu":
        return {**cpu, "memory": bytes_quantity(hardware.memory_bytes)}
    own = hardware.host_memory_bytes
    memory = {} if own is None else {"memory": bytes_quantity(own)}
    return {**cpu, "nvidia.com/gpu": str(hardware.num_gpus), **memory}


def requests(hardware: Hardware, loading_bytes: int) -> dict[str, str]:
    """As the limits. Beside a GPU without `hostMemory`, `loading_bytes`: the node has that much,
    and a pod that takes more for a while is not killed for a number that was never measured."""
    return {"memory": bytes_quantity(loading_bytes), **limits(hardware)}


def cpu_quantity(millis: int) -> str:
    """CPU as the API server spells it: 2 or 500m."""
    return str(millis // 1000) if millis % 1000 == 0 else f"{millis}m"


def bytes_quantity(num_bytes: int) -> str:
    """Bytes as the API server spells them: with the largest suffix that loses nothing."""
    for suffix, size in _SUFFIXES:
        if num_bytes % size == 0:
            return f"{num_bytes // size}{suffix}"
    return str(num_bytes)
