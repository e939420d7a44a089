"""The object, as frozen structs: the one definition that the CRD is generated from.

Attribute names are those of the wire in snake_case. Durations end in `_s` or `_ms` and are floats,
quantities end in `_bytes` or `_millis` and are ints, `Auto` is None.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar

from msgspec import Meta, Struct, convert, field, structs, to_builtins
from sluice_core.contract import Overload, SchedulingPolicy
from sluice_core.words import clean

from .hardware import Hardware
from .kinds import (
    MAX_BATCHED_TOKENS,
    MAX_NUM_SEQS,
    BodyBytes,
    NumSeqs,
    Percentile,
    Share,
    SpecObject,
    Text,
    TextOrEmpty,
    Utilization,
    auto_or,
    duration,
)
from .schema import wire_form

S = TypeVar("S", bound=Struct)
GROUP = "sluice.dev"
VERSION = "v1alpha1"
API_VERSION = f"{GROUP}/{VERSION}"
KIND = "InferenceService"
PLURAL = "inferenceservices"
MAX_REPLICAS = 1000
MAX_HISTORY = 5
"""Changes of replicas that `status.scaling.history` keeps."""
Task = Literal["Generate", "Embed", "Classify", "Score", "ImageEmbed", "ImageClassify"]
DType = Literal["auto", "float32", "bfloat16", "float16"]
EngineName = Literal["Sluice", "VLLM", "SGLang", "LlamaCpp", "Ollama", "TGI", "Custom"]
BatchingMode = Literal["Continuous", "Static"]
Order = Literal["Deadline", "FCFS"]
Speculation = Literal["Auto", "Never"]
SloMode = Literal["Enforce", "Advisory"]
Rollout = Literal["Surge", "Replace"]


class SpecError(ValueError):
    """The object says something that cannot be read; the message may quote it."""

    def __init__(self, message: str) -> None:
        super().__init__(clean(message))


class SecretRef(SpecObject, frozen=True):
    """The Secret that holds keys.

    name: Name of the Secret.
    """

    name: Text


class TokenRef(SpecObject, frozen=True):
    """The Secret that holds a hub's token.

    name: Name of the Secret.
    key: The token's key in it; left out, `token`.
    """

    name: Text
    key: Text | None = None

    @property
    def token_key(self) -> str:
        """The token's key, with the default."""
        return self.key or "token"


class ModelCache(SpecObject, frozen=True):
    """Where a downloaded checkpoint is kept.

    pvc: Name of the PersistentVolumeClaim.
    """

    pvc: Text


class Model(SpecObject, frozen=True):
    """What is served.

    uri: The checkpoint: hf://OWNER/NAME, pvc://CLAIM/PATH, or file:///PATH in the container. VLLM,
      SGLang and Custom also stream s3://BUCKET/PATH and gs://BUCKET/PATH.
    revision: Branch, tag or commit of an hf:// model.
    name: The `model` of the OpenAI API; left out, the object's name.
    task: What the checkpoint is for. Only Generate has first tokens and gaps; others have an end.
    dtype: Type of weights and KV cache.
    maxModelLen: Longest prompt plus output in tokens; left out, the checkpoint's own (before
      longrope).
    secretRef: Secret with a token, for gated hf:// models.
    cache: Volume that keeps what hf:// downloads.
    """

    uri: Text
    revision: Text | None = None
    name: Annotated[str, Meta(min_length=1, max_length=128)] = ""
    task: Task = "Generate"
    dtype: DType = "auto"
    max_model_len: Annotated[int, Meta(ge=1, le=1_048_576)] | None = None
    secret_ref: TokenRef | None = None
    cache: ModelCache | None = None

    @property
    def scheme(self) -> str:
        """hf, pvc, file, s3 or gs."""
        return self.uri.split("://", 1)[0]

    @property
    def repo(self) -> str | None:
        """OWNER/NAME of a hub's model for hf://, else None."""
        return self.uri.removeprefix("hf://") if self.scheme == "hf" else None

    @property
    def directory(self) -> str | None:
        """The checkpoint's directory in the container for file://, else None."""
        return self.uri.removeprefix("file://").rstrip("/") if self.scheme == "file" else None

    @property
    def secret(self) -> str | None:
        """The Secret of the token, with the key where the object says one."""
        if self.secret_ref is None:
            return None
        name, key = self.secret_ref.name, self.secret_ref.key
        return f"{name}/{key}" if key else name


_LONGEST = 4096
"""Characters of one argument or value: engines take whole JSON objects, of a kilobyte or two."""
Argument = Annotated[str, Meta(min_length=1, max_length=_LONGEST)]


class KeyRef(SpecObject, frozen=True, omit_defaults=True):
    """A key of a Secret or a ConfigMap, as in a pod.

    name: Name of the object.
    key: Key in it.
    optional: Without the key the variable is not set; else the pod waits for it.
    """

    name: Text
    key: Text
    optional: bool = False


class EnvSource(SpecObject, frozen=True, omit_defaults=True):
    """Where a variable's value comes from, as in a pod; one of the two.

    secretKeyRef: A key of a Secret.
    configMapKeyRef: A key of a ConfigMap.
    """

    secret_key_ref: KeyRef | None = None
    config_map_key_ref: KeyRef | None = None


class EnvVar(SpecObject, frozen=True):
    """A variable of the engine's container.

    name: Its name.
    value: Its value.
    valueFrom: Where its value comes from instead.
    """

    name: Text
    value: Annotated[str, Meta(min_length=0, max_length=_LONGEST)] = ""
    value_from: EnvSource | None = None

    def manifest(self) -> dict[str, Any]:
        """As a pod spec wants it."""
        if self.value_from is None:
            return {"name": self.name, "value": self.value}
        return {"name": self.name, "valueFrom": to_builtins(self.value_from)}


class EngineSpec(SpecObject, frozen=True):
    """What serves it. Another engine than Sluice runs behind a gate in the same pod.

    name: Which engine; Custom is any server with OpenAI's routes.
    image: Image of the engine; empty or left out, the operator's default for it.
    command: Program of the container, which gets the engine's flags as its arguments; left out, the
      engine's own, and of Custom the image's.
    args: Flags for the engine that have no field here, each as --FLAG=VALUE. They win over ours,
      except for host, port and capacity, which the gate needs.
    env: Variables of another engine than Sluice.
    port: Port on which a Custom engine listens inside the pod; left out, 8100.
    healthPath: Path that answers 200 when a Custom engine serves; left out, /health.
    """

    name: EngineName = "Sluice"
    image: TextOrEmpty | None = None
    command: Annotated[tuple[Argument, ...], Meta(max_length=16)] = ()
    args: Annotated[tuple[Argument, ...], Meta(max_length=128)] = ()
    env: Annotated[tuple[EnvVar, ...], Meta(max_length=128)] = ()
    port: Annotated[int, Meta(ge=1024, le=65535)] | None = None
    health_path: Text | None = None


_WHY_10S = "; a worker that waits longer would seem to hang"


class StaticBatches(SpecObject, frozen=True):
    """How a static batch is made up.

    size: Sequences of a batch, which starts when so many wait.
    wait: A batch starts with fewer when the first of them has waited so long; left out, 100ms.
    """

    size: Annotated[int, Meta(ge=1, le=MAX_NUM_SEQS)]
    wait_ms: Annotated[float, duration("1ms", "10s", why=_WHY_10S)] | None = field(
        name="wait", default=None
    )


class Batching(SpecObject, frozen=True):
    """How many sequences run at once, and what the engine may do with them.

    mode: How batches are formed. Static: one batch at a time, first come first served; its size is
      the cap, which no evidence moves. It is for offline work of equal lengths.
    static: The batches of mode Static.
    order: Deadline: requests that can still meet timeToFirstToken go first. FCFS: first come, first
      served, as without that target.
    maxNumSeqs: Most sequences at once; Auto: what memory allows, at most 256.
    initialNumSeqs: Cap before any evidence, at most what memory allows; Auto: predicted from the
      start-up profile.
    minNumSeqs: The cap is never lowered under this, or under the ceiling where that is less.
    maxNumBatchedTokens: Token budget of one step; Auto: the engine's default. An engine with fixed
      chunks is started with the budget that the measured steps allow, where rollout is Surge.
    memoryUtilization: Share of the memory that may be used, as a string such as "0.90".
    prefixCaching: Reuse the KV blocks of equal prefixes.
    speculation: Auto: n-gram drafts for greedy requests, while over 80 % of them are right. Other
      engines draft only where their args say.
    """

    mode: BatchingMode = "Continuous"
    static: StaticBatches | None = None
    order: Order = "Deadline"
    max_num_seqs: NumSeqs | None = None
    initial_num_seqs: NumSeqs | None = None
    min_num_seqs: Annotated[int, Meta(ge=1, le=MAX_NUM_SEQS)] = 1
    max_num_batched_tokens: Annotated[int, auto_or(16, MAX_BATCHED_TOKENS)] | None = None
    memory_utilization: Utilization = 0.9
    prefix_caching: bool = True
    speculation: Speculation = "Auto"

    @property
    def fixed_cap(self) -> int | None:
        """The size of a static batch; None where the cap moves."""
        return self.static.size if self.static else None


_SLO_NAMES = {
    "ttft_ms": "timeToFirstToken",
    "itl_ms": "interTokenLatency",
    "e2e_ms": "endToEnd",
    "window_s": "window",
    "hold_share": "holdShare",
}
_WHY_30M = "; workers keep evidence of half an hour"


class SloSpec(SpecObject, frozen=True, rename=_SLO_NAMES):
    """The promise. A target is None if it is not given; without any, the cap is memory's.

    percentile: Share of requests or gaps in percent.
    timeToFirstToken: Request read to first token sent.
    interTokenLatency: One token sent to the next.
    endToEnd: Request read to last token sent.
    window: The promise holds over every window of this length.
    overload: Shed refuses what can no longer meet timeToFirstToken; in mode Advisory nothing is.
    holdShare: Share of timeToFirstToken for which the first token of a computed prompt may be held,
      so that long prompts make fewer gaps late, as a string such as "0.5"; 0 holds none.
    mode: Advisory decides and reports, and changes neither the cap nor the replicas.
    """

    percentile: Percentile = "99"
    ttft_ms: Annotated[float, duration("1ms", "1h")] | None = None
    itl_ms: Annotated[float, duration("1ms", "1m")] | None = None
    e2e_ms: Annotated[float, duration("1ms", "24h")] | None = None
    window_s: Annotated[float, duration("10s", "30m", unit="s", default="10m", why=_WHY_30M)] = (
        600.0
    )
    overload: Overload = "Queue"
    hold_share: Share = 1.0
    mode: SloMode = "Enforce"

    @property
    def has_target(self) -> bool:
        """Whether anything is promised."""
        return (self.ttft_ms, self.itl_ms, self.e2e_ms) != (None, None, None)

    @property
    def told_overload(self) -> Overload:
        """What the workers are told to do: advice refuses no request."""
        return self.overload if self.mode == "Enforce" else "Queue"


_Wait = Annotated[int, Meta(ge=0, le=3600)]


class ScaleUp(SpecObject, frozen=True):
    """As an HPA's behavior.scaleUp.

    stabilizationWindowSeconds: Wait before adding pods.
    """

    stabilization_window_s: _Wait = field(name="stabilizationWindowSeconds", default=0)


class ScaleDown(SpecObject, frozen=True):
    """As an HPA's behavior.scaleDown.

    stabilizationWindowSeconds: Wait before removing pods.
    """

    stabilization_window_s: _Wait = field(name="stabilizationWindowSeconds", default=300)


class Behavior(SpecObject, frozen=True):
    """As an HPA's behavior.

    scaleUp: Adding pods.
    scaleDown: Removing pods.
    """

    scale_up: ScaleUp = ScaleUp()
    scale_down: ScaleDown = ScaleDown()


_Replicas = Annotated[int, Meta(ge=1, le=MAX_REPLICAS)]


class Scaling(SpecObject, frozen=True):
    """Bounds of the replicas that the operator sets while spec.replicas is unset.

    minReplicas: Fewest pods.
    maxReplicas: Most pods.
    behavior: How fast replicas change.
    """

    min_replicas: _Replicas = 1
    max_replicas: _Replicas = 1
    behavior: Behavior = Behavior()


class Drain(SpecObject, frozen=True, rename={"timeout_s": "timeout"}):
    """What a leaving pod is given.

    timeout: Time for running requests to finish.
    """

    timeout_s: Annotated[float, duration("1s", "1h", unit="s", default="60s")] = 60.0


class Api(SpecObject, frozen=True):
    """What clients find at the pods' door.

    maxBodySize: Largest body of a request; left out, 4Mi, and 64Mi in front of another engine than
      Sluice.
    keepAliveTimeout: Time after which an idle connection is closed; left out, 620s. It must be
      longer than a load balancer keeps its own.
    trustedProxies: Networks of load balancers, such as 10.0.0.0/8, whose X-Forwarded-For says who
      the client is.
    """

    max_body_bytes: BodyBytes | None = field(name="maxBodySize", default=None)
    keep_alive_s: Annotated[float, duration("1s", "24h", unit="s")] | None = field(
        name="keepAliveTimeout", default=None
    )
    trusted_proxies: Annotated[tuple[Text, ...], Meta(max_length=64)] = ()


class Batches(SpecObject, frozen=True):
    """Files and batches of OpenAI's API, which all pods of the object share.

    claimName: Name of the PersistentVolumeClaim that they are kept in; more than one pod needs one
      of mode ReadWriteMany.
    """

    claim_name: Text


_LABELS = {"type": "object", "maxProperties": 64, "additionalProperties": {"type": "string"}}
_ANYTHING = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
"""A full schema of a pod would be larger than all the rest, and older than the API server's own."""


class PodMetadata(SpecObject, frozen=True, omit_defaults=True):
    """As in a pod.

    labels: Labels of the pods.
    annotations: Annotations of the pods.
    """

    labels: Annotated[dict[str, str], Meta(extra={"schema": _LABELS})] | None = None
    annotations: Annotated[dict[str, str], Meta(extra={"schema": _LABELS})] | None = None


class PodTemplate(SpecObject, frozen=True, omit_defaults=True):
    """An overlay of the pods' template.

    metadata: Labels and annotations.
    spec: Fields of a PodSpec; lists are merged by name. The container `engine` is the engine, and
      `gate` the gate; others are sidecars. Other initContainers run before the engine.
    """

    metadata: PodMetadata | None = None
    spec: Annotated[dict[str, Any], Meta(extra={"schema": _ANYTHING})] | None = None


QUEUE_LABEL, PRIORITY_LABEL = "kueue.x-k8s.io/queue-name", "kueue.x-k8s.io/priority-class"
"""Kueue's queue of the pods, and their class in it: the object's labels reach what makes them."""


class Spec(SpecObject, frozen=True, kw_only=True):
    """The wanted state.

    model: What is served.
    engine: What serves it.
    hardware: What each pod runs on.
    batching: How many sequences run at once.
    slo: The promise; left out, the cap is memory's.
    scaling: Bounds of the replicas.
    replicas: Set by an outside owner through /scale; while unset, `scaling` decides.
    suspend: No pods while it is true, whatever the replicas are.
    rollout: How an edit reaches the pods, one by one. Surge: a new pod is ready before an old one
      leaves, which takes room for one more. Replace: an old pod drains first and leaves its room to
      a new one; a single replica serves nothing until that is ready.
    drain: What a leaving pod gets.
    apiKeySecretRef: Secret with key `keys`: the bearer keys of the API, one a line, read again when
      it changes; left out, anyone who can reach the Service can use the API.
    api: What clients find at the pods' door.
    batches: Where /v1/files and /v1/batches are kept; left out, the API has neither.
    podTemplate: An overlay of the pods' template, for what has no field here. What the operator
      owns in it is refused.
    """

    model: Model
    engine: EngineSpec = EngineSpec()
    hardware: Hardware
    batching: Batching = Batching()
    slo: Annotated[SloSpec, Meta(extra={"default": None})] = SloSpec()
    scaling: Scaling = Scaling()
    replicas: Annotated[int, Meta(ge=0, le=MAX_REPLICAS)] | None = None
    suspend: bool = False
    rollout: Rollout = "Surge"
    drain: Drain = Drain()
    api_key_secret_ref: SecretRef | None = None
    api: Api = Api()
    batches: Batches | None = None
    pod_template: PodTemplate | None = None

    @property
    def scheduling_policy(self) -> SchedulingPolicy:
        """What the workers are told of the order: without a deadline, or in static batches, there
        is none but arrival."""
        has_deadline = self.batching.order == "Deadline" and self.slo.ttft_ms is not None
        return "deadline" if has_deadline and not self.batching.static else "fcfs"


@dataclass(frozen=True, slots=True, kw_only=True)
class InferenceService:
    """One parsed object; `spec.model.name` is the object's name if it was left out.

    `queue`: Kueue's, by the object's label, "" for none. `unknown`: paths of the fields that were
    left out, for this CRD has none of that name. A newer one has them during an upgrade, or when
    the operator is rolled back. `is_offline`: the engine of a batch, which nobody tunes.
    """

    name: str
    namespace: str
    uid: str
    generation: int
    spec: Spec
    queue: str = ""
    unknown: tuple[str, ...] = ()
    is_offline: bool = False


def kueue_of(body: Mapping[str, Any]) -> dict[str, str]:
    """Kueue's labels of the object."""
    labels = (body.get("metadata") or {}).get("labels") or {}
    return {key: str(labels[key]) for key in (QUEUE_LABEL, PRIORITY_LABEL) if key in labels}


def read_spec(body: Mapping[str, Any], kind: type[S]) -> tuple[S, tuple[str, ...]]:
    """The spec of an object as the API server gives it, and the paths of the fields that `kind` has
    not; raises SpecError with the first problem.

    The API server has checked the rules of the CRD. They are not checked again.
    """
    unknown: list[str] = []
    try:
        spec = convert(wire_form(kind, body.get("spec", {}), "", unknown), kind)
    except ValueError as e:
        what, _, where = str(e).partition(" - at `$")
        raise SpecError(f"spec{where.rstrip('`')}: {what}") from e
    return spec, tuple(f"spec{path}" for path in unknown)


def parse(body: Mapping[str, Any]) -> InferenceService:
    """Read an object; raises SpecError."""
    metadata = body.get("metadata") or {}
    spec, unknown = read_spec(body, Spec)
    name = str(metadata.get("name", ""))
    model = structs.replace(spec.model, name=spec.model.name or name)
    return InferenceService(
        name=name,
        namespace=str(metadata.get("namespace", "default")),
        uid=str(metadata.get("uid", "")),
        generation=int(metadata.get("generation", 0)),
        queue=kueue_of(body).get(QUEUE_LABEL, ""),
        spec=structs.replace(spec, model=model),
        unknown=unknown,
    )
