"""Resources that a pod asks of its node, in the API server's own spelling of quantities. Pure."""

from ..spec.hardware import Hardware
from ..spec.kinds import BYTES


def limits(hardware: Hardware) -> dict[str, str]:
    """The container's limits. With a device, `memory` is the device's; `hostMemory` the host's."""
    cpu = {"cpu": cpu_quantity(hardware.cpu_millis)}
    if not hardware.has_devices:
        return {**cpu, "memory": bytes_quantity(hardware.memory_bytes)}
    own, device = hardware.host_memory_bytes, hardware.device
    memory = {} if own is None else {"memory": bytes_quantity(own)}
    devices = {device: str(hardware.num_gpus)} if device else {}
    return {**cpu, **devices, **memory}


def requests(hardware: Hardware, loading_bytes: int, disk_bytes: int) -> dict[str, str]:
    """The limits, plus `loading_bytes` beside a GPU without `hostMemory`, plus `disk_bytes` if any.

    So the node has that much, and no pod is killed for a number that was never measured. On a full
    disk the kubelet evicts those first that use more than they asked for.
    """
    disk = {"ephemeral-storage": bytes_quantity(disk_bytes)} if disk_bytes else {}
    return {"memory": bytes_quantity(loading_bytes), **limits(hardware), **disk}


def cpu_quantity(millis: int) -> str:
    """CPU as the API server spells it: 2 or 500m."""
    return str(millis // 1000) if millis % 1000 == 0 else f"{millis}m"


def bytes_quantity(num_bytes: int) -> str:
    """Bytes as the API server spells them: with the largest suffix that loses nothing."""
    return next(
        f"{num_bytes // size}{unit}" for unit, size in BYTES.items() if num_bytes % size == 0
    )
