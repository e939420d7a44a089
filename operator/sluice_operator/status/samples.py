"""What Prometheus reads of each object: the status that its last pass made. Pure.

Labels are names of objects and words of ours: no label grows with traffic, time or epochs. An
object that is gone, or that another installation cares for, has no series.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from sluice_core.bounded import number
from sluice_core.contract import TARGETS

from ..cluster.observed import Object
from ..spec.batch import BATCH_KIND
from ..spec.service import KIND, InferenceService
from ..times import milliseconds, unix_time

OBJECT = ("namespace", "name")


class Shown(NamedTuple):
    """An object as its last pass left it. `service`: None of a batch, and before a spec was read;
    `address`: the cluster IP of its Service, "" before there is one."""

    kind: str
    namespace: str
    name: str
    status: Object
    service: InferenceService | None = None
    address: str = ""


Sample = tuple[tuple[str, ...], float | None]
"""The family's own labels, and a value; None for none."""


class Family(NamedTuple):
    """A gauge of the objects of `kind`; "" for all."""

    name: str
    help: str
    labels: tuple[str, ...]
    kind: str
    samples: Callable[[Shown], Iterable[Sample]]


def _conditions(shown: Shown) -> Iterator[Sample]:
    for one in shown.status.get("conditions") or ():
        yield (shown.kind, one["type"], one["status"], one["reason"]), 1.0


def _info(shown: Shown) -> Iterator[Sample]:
    if shown.service:
        spec = shown.service.spec
        labels = spec.engine.name, spec.model.task, spec.hardware.accelerator, shown.address
        yield labels, 1.0


def _units(shown: Shown) -> Iterator[Sample]:
    if shown.service:
        hardware = shown.service.spec.hardware
        gpus = hardware.num_gpus * hardware.nodes
        yield (("GPU",), gpus) if gpus else (("CPU",), hardware.cpu_millis / 1000)


def _part(shown: Shown, name: str) -> Object:
    return shown.status.get(name) or {}


def _cap(shown: Shown) -> Iterator[Sample]:
    yield (), number(_part(shown, "batching").get("cap"))


def _ceiling(shown: Shown) -> Iterator[Sample]:
    part = _part(shown, "batching")
    yield (str(part.get("limitedBy", "")),), number(part.get("ceiling"))


def _replicas(shown: Shown) -> Iterator[Sample]:
    yield ("current",), number(shown.status.get("replicas"))
    yield ("ready",), number(shown.status.get("readyReplicas"))
    yield ("desired",), number(_part(shown, "scaling").get("desired"))


def _of_targets(field: str, read: Callable[[Any], float | None]) -> Callable[[Shown], Any]:
    def samples(shown: Shown) -> Iterator[Sample]:
        slo = _part(shown, "slo")
        for name in TARGETS:
            yield (name,), read((slo.get(name) or {}).get(field))

    return samples


def seconds(text: object) -> float | None:
    """A duration of the status, such as 51.3ms or 1200s, in seconds; None if it is none."""
    ms = milliseconds(text) if isinstance(text, str) else None
    return None if ms is None else ms / 1000


def share(text: object) -> float | None:
    """Percent of the status, which may be below 0, as a share; None if it is none."""
    if not isinstance(text, str):
        return None
    value = number(text.removeprefix("-"))
    return None if value is None else (-value if text.startswith("-") else value) / 100


def _memory_error(shown: Shown) -> Iterator[Sample]:
    yield (), share(_part(shown, "memory").get("errorPercent"))


def _changes(shown: Shown) -> Iterator[Sample]:
    changes = {"cap": ("batching", "lastChange"), "replicas": ("scaling", "lastDecision")}
    for of, (part, field) in changes.items():
        if last := _part(shown, part).get(field):
            yield (of, str(last["reason"])), unix_time(last["time"])


def _requests(shown: Shown) -> Iterator[Sample]:
    counts = _part(shown, "counts")
    for state in ("total", "completed", "failed"):
        yield (state,), number(counts.get(state))


def _state(shown: Shown) -> Iterator[Sample]:
    if state := shown.status.get("state"):
        yield (str(state),), 1.0


FAMILIES = (
    Family("sluice_condition", "1 for each condition, by its status and reason.",
           ("kind", "type", "status", "reason"), "", _conditions),
    Family("sluice_service_info", "1; what it runs, and where its Service answers.",
           ("engine", "task", "accelerator", "cluster_ip"), KIND, _info),
    Family("sluice_service_pod_units", "Devices of a replica, or its CPUs if it has none.",
           ("unit",), KIND, _units),
    Family("sluice_service_cap", "The cap that was decided.", (), KIND, _cap),
    Family("sluice_service_cap_ceiling", "The most that memory and the user allow; what keeps the "
           "cap from rising now.", ("limited_by",), KIND, _ceiling),
    Family("sluice_service_replicas", "Pods there are, that serve, and that are wanted.",
           ("state",), KIND, _replicas),
    Family("sluice_service_target_seconds", "Each target.", ("target",), KIND,
           _of_targets("target", seconds)),
    Family("sluice_service_target_allowed_ratio", "The share that may be over it.", ("target",),
           KIND, _of_targets("allowedPercent", share)),
    Family("sluice_service_target_used_ratio", "The share that was over it in the window.",
           ("target",), KIND, _of_targets("usedPercent", share)),
    Family("sluice_service_latency_seconds", "Measured in the window, at the percentile.",
           ("target",), KIND, _of_targets("measured", seconds)),
    Family("sluice_service_latency_bound_seconds", "Its upper bound.", ("target",), KIND,
           _of_targets("bound", seconds)),
    Family("sluice_service_latency_samples", "Samples behind it.", ("target",), KIND,
           _of_targets("samples", number)),
    Family("sluice_service_memory_error_ratio", "Measured memory against planned, as a share of "
           "what is planned for the model.", (), KIND, _memory_error),
    Family("sluice_service_change_timestamp_seconds", "The last change of cap and of replicas.",
           ("of", "reason"), KIND, _changes),
    Family("sluice_batch_requests", "Requests of the input.", ("state",), BATCH_KIND, _requests),
    Family("sluice_batch_state", "1 for the state that it is in.", ("state",), BATCH_KIND, _state),
)  # fmt: skip


class ObjectCollector(Collector):
    """Yields every family at a scrape. `shown`: called in the thread of the scrape."""

    def __init__(self, shown: Callable[[], Iterable[Shown]]) -> None:
        self._shown = shown

    def describe(self) -> Iterable[Metric]:
        """Nothing is known before the first scrape."""
        return ()

    def collect(self) -> Iterator[Metric]:
        """One pass over all objects for each family."""
        objects = list(self._shown())
        for family in FAMILIES:
            metric = GaugeMetricFamily(family.name, family.help, labels=[*OBJECT, *family.labels])
            for one in objects:
                for labels, value in family.samples(one) if family.kind in ("", one.kind) else ():
                    if value is not None:
                        metric.add_metric([one.namespace, one.name, *labels], value)
            yield metric
