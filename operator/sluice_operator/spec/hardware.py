"""What each pod runs on, as the object says it."""

from typing import Annotated, Any, Literal

from msgspec import Meta, field, to_builtins

from .kinds import Bytes, LabelValue, MilliCpus, SpecObject, Text, TextOrEmpty

Accelerator = Literal["nvidia", "cpu"]
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

    accelerator: nvidia or cpu.
    gpus: GPUs of a pod; left out, 1 with nvidia and 0 with cpu. More are not built yet.
    memory: Memory that the model is planned into: of one GPU, or with cpu the container's limit.
    hostMemory: The container's own memory beside a GPU, request and limit; left out, a request of
      what loading the model needs, and no limit.
    cpu: CPU of a pod; left out, 2 with nvidia, one for each of its processes, and 1 with cpu.
    nodeSelector: Labels of nodes.
    tolerations: As in a pod.
    runtimeClassName: RuntimeClass of the pods; empty or left out, the cluster's own.
    """

    accelerator: Accelerator = "nvidia"
    gpus: Annotated[int, Meta(ge=0, le=8)] | None = None
    memory_bytes: Bytes = field(name="memory")
    host_memory_bytes: Bytes | None = field(name="hostMemory", default=None)
    given_cpu_millis: MilliCpus | None = field(name="cpu", default=None)
    node_selector: Annotated[dict[str, LabelValue], Meta(max_length=16)] = {}
    tolerations: Annotated[tuple[Toleration, ...], Meta(max_length=16)] = ()
    runtime_class_name: TextOrEmpty | None = None

    @property
    def cpu_millis(self) -> int:
        """CPU of a pod in thousandths, with the default of the accelerator."""
        return self.given_cpu_millis or (2000 if self.accelerator == "nvidia" else 1000)

    @property
    def num_gpus(self) -> int:
        """GPUs of a pod, with the default of the accelerator."""
        return self.gpus if self.gpus is not None else int(self.accelerator == "nvidia")
