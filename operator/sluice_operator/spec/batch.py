"""InferenceBatch: many requests of a file, once, through a service or an engine of its own."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from msgspec import Meta, field, structs

from .hardware import Hardware
from .kinds import SpecObject, Text, duration
from .service import (
    QUEUE_LABEL,
    EngineSpec,
    InferenceService,
    Model,
    Spec,
    kueue_of,
    read_spec,
)

BATCH_KIND, BATCH_PLURAL = "InferenceBatch", "inferencebatches"
MAX_SHARDS = 256
"""The status has a line for each of them."""


class ConfigMapRef(SpecObject, frozen=True):
    """A key of a ConfigMap.

    name: Name of the ConfigMap.
    key: Key in it.
    """

    name: Text
    key: Text


class Input(SpecObject, frozen=True):
    """Where the lines are; one of claimName and configMap.

    claimName: A PersistentVolumeClaim.
    path: The file in it.
    configMap: A key of a ConfigMap, for a small input.
    """

    claim_name: Text | None = None
    path: Text | None = None
    config_map: ConfigMapRef | None = None


class Output(SpecObject, frozen=True):
    """Where the results go. They stay when the object goes.

    claimName: A PersistentVolumeClaim.
    path: A folder in it, made where it is not there. Shard N appends to out.N.jsonl.
    """

    claim_name: Text
    path: Text


class ServiceRef(SpecObject, frozen=True):
    """An InferenceService of the same namespace.

    name: Its name.
    """

    name: Text


_Shards = Annotated[int, Meta(ge=1, le=MAX_SHARDS)]


class BatchSpec(SpecObject, frozen=True, kw_only=True):
    """The wanted results.

    input: The lines, as OpenAI's.
    output: Their results.
    serviceRef: What answers, in the places that its other clients leave; or else model.
    model: What answers in an engine of its own, which ends with the batch.
    engine: That engine.
    hardware: What each of its pods runs on.
    shards: Parts of the input, each with a pod and an output of its own.
    parallelism: Shards at work at once.
    completionWindow: Time until the batch ends, finished or not; it stops while suspended.
    suspend: No pods while it is true. Where the object has a Kueue queue, Kueue suspends instead,
      and true only keeps it from being queued.
    ttlAfterFinished: Time after which the Job and its pods are deleted; left out, never. The object
      stays.
    """

    input: Input
    output: Output
    service_ref: ServiceRef | None = None
    model: Model | None = None
    engine: EngineSpec | None = None
    hardware: Hardware | None = None
    shards: _Shards = 1
    parallelism: _Shards = 1
    window_s: Annotated[float, duration("1m", "720h", unit="s", default="24h")] = field(
        name="completionWindow", default=86_400.0
    )
    suspend: bool = False
    ttl_s: Annotated[float, duration("1m", "720h", unit="s")] | None = field(
        name="ttlAfterFinished", default=None
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class InferenceBatch:
    """One parsed object. `labels`: Kueue's, which its Job gets; `unknown`: as of a service."""

    name: str
    namespace: str
    uid: str
    generation: int
    spec: BatchSpec
    labels: Mapping[str, str]
    unknown: tuple[str, ...] = ()

    @property
    def is_queued(self) -> bool:
        """Whether Kueue decides when it runs."""
        return QUEUE_LABEL in self.labels

    @property
    def engine(self) -> InferenceService | None:
        """Its own engine, as a service; None where another one answers."""
        spec = self.spec
        if spec.model is None or spec.engine is None or spec.hardware is None:
            return None
        model = structs.replace(spec.model, name=spec.model.name or self.name)
        return InferenceService(
            name=self.name,
            namespace=self.namespace,
            uid=self.uid,
            generation=self.generation,
            spec=Spec(model=model, engine=spec.engine, hardware=spec.hardware),
            is_offline=True,
        )


def parse_batch(body: Mapping[str, Any]) -> InferenceBatch:
    """Read an object; raises SpecError."""
    meta = body.get("metadata") or {}
    spec, unknown = read_spec(body, BatchSpec)
    return InferenceBatch(
        name=str(meta.get("name", "")),
        namespace=str(meta.get("namespace", "default")),
        uid=str(meta.get("uid", "")),
        generation=int(meta.get("generation", 0)),
        spec=spec,
        labels=kueue_of(body),
        unknown=unknown,
    )
