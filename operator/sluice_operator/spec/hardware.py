"""What each pod runs on, as the object says it."""

from typing import Annotated, Any, Literal

from msgspec import Meta, field, to_builtins

from .kinds import Bytes, LabelValue, MilliCpus, SpecObject, Text, TextOrEmpty

Accelerator = Literal["nvidia", "cpu", "other"]
MAX_GPUS, MAX_NODES = 128, 64
Operator = Literal["Exists", "Equal"]
Effect = Literal["NoSchedule", "PreferNoSchedule", "NoExecute"]


class Toleration(SpecObject, frozen=True, omit_defaults=True):
    """As in a pod; None: not given.

    key: Taint key; left out, all keys.
    operator: How key and value are compared.
    value: Taint value.
    effect: Taint effect.
    tolerationSeconds: How long NoExecute is tolerated.
    """

    key: Text | None = None
    operator: Operator | None = None
    value: LabelValue | None = None
    effect: Effect | None = None
    toleration_seconds: Annotated[int, Meta(ge=0, le=2**31 - 1)] | None = None

    def manifest(self) -> dict[str, Any]:
        """As a pod spec wants it."""
        manifest: dict[str, Any] = to_builtins(self)
        return manifest


class Hardware(SpecObject, frozen=True, kw_only=True):
    """What each pod runs on.

    accelerator: nvidia, cpu or other, which is any device that the engine's image is for.
    gpus: Devices of a pod; left out, 1, and 0 with cpu. More are the engine's tensor parallel size.
    resource: Name under which a node offers the devices, such as amd.com/gpu or
      nvidia.com/mig-1g.10gb; left out, nvidia.com/gpu. With other no device is asked for then:
      `podTemplate` claims them.
    nodes: Pods that serve as one, each on a node of its own, by a LeaderWorkerSet; the engine's
      pipeline parallel size. Replicas count such groups.
    memory: Memory that the model is planned into: of one device, or with cpu the container's limit.
    hostMemory: The container's own memory beside a GPU, request and limit; left out, a request of
      what loading the model needs, and no limit.
    cpu: CPU of a pod; left out, 1 with cpu, and else one for each of its processes: 2, or 2 more
      than gpus.
    nodeSelector: Labels of nodes.
    tolerations: As in a pod.
    runtimeClassName: RuntimeClass of the pods; empty or left out, the cluster's own.
    """

    accelerator: Accelerator = "nvidia"
    gpus: Annotated[int, Meta(ge=0, le=MAX_GPUS)] | None = None
    resource: Text | None = None
    nodes: Annotated[int, Meta(ge=1, le=MAX_NODES)] = 1
    memory_bytes: Bytes = field(name="memory")
    host_memory_bytes: Bytes | None = field(name="hostMemory", default=None)
    given_cpu_millis: MilliCpus | None = field(name="cpu", default=None)
    node_selector: Annotated[dict[str, LabelValue], Meta(max_length=16)] = {}
    tolerations: Annotated[tuple[Toleration, ...], Meta(max_length=16)] = ()
    runtime_class_name: TextOrEmpty | None = None

    @property
    def has_devices(self) -> bool:
        """True if the model is in a device's memory, not in the container's."""
        return self.accelerator != "cpu"

    @property
    def cpu_millis(self) -> int:
        """CPU of a pod in thousandths, with the default of the accelerator."""
        processes = self.num_gpus + 2 if self.num_gpus > 1 else 1 + self.has_devices
        return self.given_cpu_millis or 1000 * processes

    @property
    def num_gpus(self) -> int:
        """Devices of a pod, with the default of the accelerator."""
        return self.gpus if self.gpus is not None else int(self.accelerator != "cpu")

    @property
    def device(self) -> str | None:
        """The extended resource that a pod asks for; None for none."""
        return self.resource or ("nvidia.com/gpu" if self.accelerator == "nvidia" else None)

    @property
    def is_spread(self) -> bool:
        """True if the model is on more than one device."""
        return self.num_gpus > 1 or self.nodes > 1
