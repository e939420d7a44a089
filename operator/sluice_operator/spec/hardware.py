"""What each pod runs on, as the object says it."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

from . import kinds
from .fields import Rule, SpecObject, choice, empty_or, integer, list_of, object_of, spec_field
from .tolerations import Toleration

Accelerator = Literal["nvidia", "cpu"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware(SpecObject):
    """What each pod runs on."""

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            "self.accelerator != 'cpu' || !has(self.gpus) || self.gpus == 0",
            "gpus must be 0 or left out with accelerator cpu",
            lambda hardware: hardware.accelerator != "cpu" or hardware.gpus in (None, 0),
        ),
        Rule(
            "self.accelerator != 'nvidia' || !has(self.gpus) || self.gpus == 1",
            "gpus must be 1 with accelerator nvidia: tensor parallelism is not built yet",
            lambda hardware: hardware.accelerator != "nvidia" or hardware.gpus in (None, 1),
        ),
        Rule(
            "self.accelerator == 'nvidia' || !has(self.hostMemory)",
            "hostMemory belongs to accelerator nvidia: with cpu, memory is the container's",
            lambda hardware: hardware.accelerator == "nvidia" or hardware.host_memory_bytes is None,
        ),
    )

    accelerator: Accelerator = spec_field(
        "accelerator", choice(Accelerator), "nvidia or cpu.", default="nvidia"
    )
    gpus: int | None = spec_field(
        "gpus",
        integer(0, 8),
        "GPUs of a pod; left out, 1 with nvidia and 0 with cpu. More are not built yet.",
    )
    memory_bytes: int = spec_field(
        "memory",
        kinds.MEMORY,
        "Memory that the model is planned into: of one GPU, or with cpu the container's limit.",
        required=True,
    )
    host_memory_bytes: int | None = spec_field(
        "hostMemory",
        kinds.MEMORY,
        "The container's own memory beside a GPU, request and limit; left out, a request of what "
        "loading the model needs, and no limit.",
    )
    given_cpu_millis: int | None = spec_field(
        "cpu",
        kinds.CPU,
        "CPU of a pod; left out, 2 with nvidia, one for each of its processes, and 1 with cpu.",
    )
    node_selector: Mapping[str, str] = spec_field(
        "nodeSelector",
        kinds.LABELS,
        "Labels of nodes.",
        default={},
    )
    tolerations: tuple[Toleration, ...] = spec_field(
        "tolerations", list_of(object_of(Toleration), 16), "As in a pod.", default=[]
    )
    runtime_class_name: str | None = spec_field(
        "runtimeClassName",
        empty_or(kinds.OBJECT_NAME),
        "RuntimeClass of the pods; empty or left out, the cluster's own.",
    )

    @property
    def cpu_millis(self) -> int:
        """CPU of a pod in thousandths, with the default of the accelerator."""
        if self.given_cpu_millis is not None:
            return self.given_cpu_millis
        return 2000 if self.accelerator == "nvidia" else 1000

    @property
    def num_gpus(self) -> int:
        """GPUs of a pod, with the default of the accelerator."""
        return self.gpus if self.gpus is not None else int(self.accelerator == "nvidia")
