"""The object, as frozen dataclasses: the one definition that the CRD is generated from.

Attribute names are those of the wire in snake_case; durations end in `_s` or `_ms` and are floats,
quantities end in `_bytes` or `_millis` and are ints, `Auto` is None.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

from sluice_core.contract import Overload, SchedulingPolicy

from . import kinds
from .fields import (
    INVALID,
    UNKNOWN,
    Rule,
    SpecObject,
    auto_or_integer,
    choice,
    duration,
    empty_or,
    flag,
    integer,
    matching,
    object_of,
    spec_field,
)
from .hardware import Hardware

GROUP = "sluice.dev"
VERSION = "v1alpha1"
API_VERSION = f"{GROUP}/{VERSION}"
KIND = "InferenceService"
PLURAL = "inferenceservices"
MAX_NAME_LENGTH = 40
"""Names of children and of their pods are the object's name and a suffix, within 63 characters."""
MAX_REPLICAS = 1000
MAX_HISTORY = 5
"""Changes of replicas that `status.scaling.history` keeps."""
Task = Literal["Generate", "Embed", "Classify", "Score", "ImageEmbed", "ImageClassify"]
DType = Literal["auto", "float32", "bfloat16", "float16"]
EngineName = Literal["Sluice", "VLLM", "SGLang", "TGI", "Ollama"]
BatchingMode = Literal["Continuous", "Static"]
Order = Literal["Deadline", "FCFS"]
Speculation = Literal["Auto", "Never"]
SloMode = Literal["Enforce", "Advisory"]
Rollout = Literal["Surge", "Replace"]


class SpecError(ValueError):
    """The object says something that cannot be done; `problems` lists every sentence."""

    def __init__(self, problems: tuple[str, ...]) -> None:
        super().__init__("; ".join(problems))
        self.problems = problems


@dataclass(frozen=True, slots=True, kw_only=True)
class SecretRef(SpecObject):
    """The Secret that holds a token, or keys."""

    name: str = spec_field("name", kinds.OBJECT_NAME, "Name of the Secret.", required=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCache(SpecObject):
    """Where a downloaded checkpoint is kept."""

    pvc: str = spec_field(
        "pvc", kinds.OBJECT_NAME, "Name of the PersistentVolumeClaim.", required=True
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Model(SpecObject):
    """What is served."""

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            "self.task == 'Generate'",
            "task: only Generate is built yet",
            lambda model: model.task == "Generate",
        ),
        Rule(
            "self.uri.startsWith('hf://') || "
            "(!has(self.revision) && !has(self.secretRef) && !has(self.cache))",
            "revision, secretRef and cache belong to hf:// models only",
            lambda model: (
                model.uri.startswith("hf://")
                or (model.revision, model.secret_ref, model.cache) == (None, None, None)
            ),
        ),
    )

    uri: str = spec_field(
        "uri",
        kinds.MODEL_URI,
        "The checkpoint: hf://OWNER/NAME, pvc://CLAIM/PATH, or file:///models/NAME in the image.",
        required=True,
    )
    revision: str | None = spec_field(
        "revision",
        kinds.REVISION,
        "Branch, tag or commit of an hf:// model.",
    )
    name: str = spec_field(
        "name",
        kinds.MODEL_NAME,
        "The `model` of the OpenAI API; left out, the object's name.",
        absent="",
    )
    task: Task = spec_field(
        "task", choice(Task), "What it does; only Generate is built yet.", default="Generate"
    )
    dtype: DType = spec_field(
        "dtype", choice(DType), "Type of weights and KV cache.", default="auto"
    )
    max_model_len: int | None = spec_field(
        "maxModelLen",
        integer(1, 1_048_576),
        "Longest prompt plus output in tokens; left out, the checkpoint's own (before longrope).",
    )
    secret_ref: SecretRef | None = spec_field(
        "secretRef", object_of(SecretRef), "Secret with key `token`, for gated hf:// models."
    )
    cache: ModelCache | None = spec_field(
        "cache", object_of(ModelCache), "Volume that keeps what hf:// downloads."
    )

    @property
    def scheme(self) -> str:
        """hf, pvc or file."""
        return self.uri.split("://", 1)[0]

    @property
    def repo(self) -> str | None:
        """OWNER/NAME of a hub's model for hf://, else None."""
        return self.uri.removeprefix("hf://") if self.scheme == "hf" else None

    @property
    def directory(self) -> str | None:
        """The checkpoint's directory in the image for file://, else None."""
        return self.uri.removeprefix("file://").rstrip("/") if self.scheme == "file" else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine(SpecObject):
    """What serves it."""

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            "self.name == 'Sluice'",
            "name: only Sluice is built yet; VLLM, SGLang, TGI and Ollama are later work",
            lambda engine: engine.name == "Sluice",
        ),
    )

    name: EngineName = spec_field(
        "name", choice(EngineName), "Which engine; only Sluice is built yet.", default="Sluice"
    )
    image: str | None = spec_field(
        "image",
        empty_or(kinds.IMAGE),
        "Image of the pods; empty or left out, the operator's own worker image.",
    )
    args: tuple[str, ...] = spec_field(
        "args",
        kinds.ENGINE_ARGUMENTS,
        "Flags for the engine that have no field here, each as --FLAG=VALUE.",
        default=[],
    )


def _at_most_the_maximum(batching: Any) -> bool:
    most = batching.max_num_seqs or kinds.MAX_NUM_SEQS
    return bool(batching.min_num_seqs <= most and (batching.initial_num_seqs or 1) <= most)


@dataclass(frozen=True, slots=True, kw_only=True)
class Batching(SpecObject):
    """How many sequences run at once, and what the engine may do with them."""

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            "self.mode == 'Continuous'",
            "mode: only Continuous is built yet",
            lambda batching: batching.mode == "Continuous",
        ),
        Rule(
            "type(self.maxNumSeqs) != int || (self.minNumSeqs <= self.maxNumSeqs && "
            "(type(self.initialNumSeqs) != int || self.initialNumSeqs <= self.maxNumSeqs))",
            "minNumSeqs and initialNumSeqs must not be over maxNumSeqs",
            _at_most_the_maximum,
        ),
        Rule(
            "type(self.initialNumSeqs) != int || self.initialNumSeqs >= self.minNumSeqs",
            "initialNumSeqs must not be under minNumSeqs",
            lambda b: b.initial_num_seqs is None or b.initial_num_seqs >= b.min_num_seqs,
        ),
    )

    mode: BatchingMode = spec_field(
        "mode",
        choice(BatchingMode),
        "How batches are formed; only Continuous is built yet.",
        default="Continuous",
    )
    order: Order = spec_field(
        "order",
        choice(Order),
        "Deadline: requests that can still meet timeToFirstToken go first. FCFS: first come, first "
        "served, as without that target.",
        default="Deadline",
    )
    max_num_seqs: int | None = spec_field(
        "maxNumSeqs",
        kinds.NUM_SEQS,
        "Most sequences at once; Auto: what memory allows, at most 256.",
        default="Auto",
    )
    initial_num_seqs: int | None = spec_field(
        "initialNumSeqs",
        kinds.NUM_SEQS,
        "Cap before any evidence, at most what memory allows; Auto: predicted from the start-up "
        "profile.",
        default="Auto",
    )
    min_num_seqs: int = spec_field(
        "minNumSeqs",
        integer(1, kinds.MAX_NUM_SEQS),
        "The cap is never lowered under this, or under the ceiling where that is less.",
        default=1,
    )
    max_num_batched_tokens: int | None = spec_field(
        "maxNumBatchedTokens",
        auto_or_integer(16, 65_536),
        "Token budget of one step; Auto: the engine's default.",
        default="Auto",
    )
    memory_utilization: float = spec_field(
        "memoryUtilization",
        kinds.UTILIZATION,
        'Share of the memory that may be used, as a string such as "0.90".',
        default="0.90",
    )
    prefix_caching: bool = spec_field(
        "prefixCaching", flag(), "Reuse the KV blocks of equal prefixes.", default=True
    )
    speculation: Speculation = spec_field(
        "speculation",
        choice(Speculation),
        "Auto: n-gram drafts for greedy requests, while over 80 % of them are right.",
        default="Auto",
    )


def _target(wire: str, doc: str, low: str, high: str) -> Any:
    return spec_field(wire, duration(low, high, seconds=False), doc)


@dataclass(frozen=True, slots=True, kw_only=True)
class Slo(SpecObject):
    """The promise. A target is None if it is not given; without any, the cap is memory's."""

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            "has(self.timeToFirstToken) || has(self.interTokenLatency) || has(self.endToEnd)",
            "slo needs at least one of timeToFirstToken, interTokenLatency and endToEnd",
            lambda slo: slo.has_target,
        ),
        Rule(
            "!has(self.timeToFirstToken) || !has(self.endToEnd) || "
            "duration(self.timeToFirstToken) <= duration(self.endToEnd)",
            "timeToFirstToken must not be over endToEnd",
            lambda slo: (slo.ttft_ms or 0) <= (slo.e2e_ms or float("inf")),
        ),
        Rule(
            "self.overload != 'Shed' || has(self.timeToFirstToken)",
            "overload Shed needs timeToFirstToken, the target that it sheds for",
            lambda slo: slo.overload != "Shed" or slo.ttft_ms is not None,
        ),
    )

    percentile: str = spec_field(
        "percentile", kinds.PERCENTILE, "Share of requests or gaps in percent.", default="99"
    )
    ttft_ms: float | None = _target(
        "timeToFirstToken", "Request read to first token sent.", "1ms", "1h"
    )
    itl_ms: float | None = _target("interTokenLatency", "One token sent to the next.", "1ms", "1m")
    e2e_ms: float | None = _target("endToEnd", "Request read to last token sent.", "1ms", "24h")
    window_s: float = spec_field(
        "window",
        duration("10s", "30m", seconds=True, why="; workers keep evidence of half an hour"),
        "The promise holds over every window of this length.",
        default="10m",
    )
    overload: Overload = spec_field(
        "overload",
        choice(Overload),
        "Shed refuses what can no longer meet timeToFirstToken; in mode Advisory nothing is.",
        default="Queue",
    )
    mode: SloMode = spec_field(
        "mode",
        choice(SloMode),
        "Advisory decides and reports, and changes neither the cap nor the replicas.",
        default="Enforce",
    )

    @property
    def has_target(self) -> bool:
        """Whether anything is promised."""
        return (self.ttft_ms, self.itl_ms, self.e2e_ms) != (None, None, None)

    @property
    def told_overload(self) -> Overload:
        """What the workers are told to do: advice refuses no request."""
        return self.overload if self.mode == "Enforce" else "Queue"


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaleUp(SpecObject):
    """As an HPA's behavior.scaleUp."""

    stabilization_window_s: int = spec_field(
        "stabilizationWindowSeconds", integer(0, 3600), "Wait before adding pods.", default=0
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaleDown(SpecObject):
    """As an HPA's behavior.scaleDown."""

    stabilization_window_s: int = spec_field(
        "stabilizationWindowSeconds", integer(0, 3600), "Wait before removing pods.", default=300
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Behavior(SpecObject):
    """As an HPA's behavior."""

    scale_up: ScaleUp = spec_field("scaleUp", object_of(ScaleUp), "Adding pods.", default={})
    scale_down: ScaleDown = spec_field(
        "scaleDown", object_of(ScaleDown), "Removing pods.", default={}
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Scaling(SpecObject):
    """Bounds of the replicas that the operator sets while spec.replicas is unset."""

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            "self.minReplicas <= self.maxReplicas",
            "minReplicas must not be over maxReplicas (1 where left out)",
            lambda scaling: scaling.min_replicas <= scaling.max_replicas,
        ),
    )

    min_replicas: int = spec_field(
        "minReplicas", integer(1, MAX_REPLICAS), "Fewest pods.", default=1
    )
    max_replicas: int = spec_field("maxReplicas", integer(1, MAX_REPLICAS), "Most pods.", default=1)
    behavior: Behavior = spec_field(
        "behavior", object_of(Behavior), "How fast replicas change.", default={}
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Drain(SpecObject):
    """What a leaving pod is given."""

    timeout_s: float = spec_field(
        "timeout",
        duration("1s", "1h", seconds=True),
        "Time for running requests to finish.",
        default="60s",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Spec(SpecObject):
    """The wanted state."""

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            "self.hardware.accelerator == 'cpu' || !has(self.engine.args) || "
            "!self.engine.args.exists(a, a.startsWith('--quantization='))",
            "engine.args: --quantization=w8a8 is for accelerator cpu only",
            lambda spec: (
                spec.hardware.accelerator == "cpu"
                or not any(a.startswith("--quantization=") for a in spec.engine.args)
            ),
        ),
    )

    model: Model = spec_field("model", object_of(Model), "What is served.", required=True)
    engine: Engine = spec_field("engine", object_of(Engine), "What serves it.", default={})
    hardware: Hardware = spec_field(
        "hardware", object_of(Hardware), "What each pod runs on.", required=True
    )
    batching: Batching = spec_field(
        "batching", object_of(Batching), "How many sequences run at once.", default={}
    )
    slo: Slo = spec_field(
        "slo", object_of(Slo), "The promise; left out, the cap is memory's.", absent=Slo()
    )
    scaling: Scaling = spec_field(
        "scaling", object_of(Scaling), "Bounds of the replicas.", default={}
    )
    replicas: int | None = spec_field(
        "replicas",
        integer(0, MAX_REPLICAS),
        "Set by an outside owner through /scale; while unset, `scaling` decides.",
    )
    rollout: Rollout = spec_field(
        "rollout",
        choice(Rollout),
        "How an edit reaches the pods, one by one. Surge: a new pod is ready before an old one "
        "leaves, which takes room for one more. Replace: an old pod drains first and leaves its "
        "room to a new one; a single replica serves nothing until that is ready.",
        default="Surge",
    )
    drain: Drain = spec_field("drain", object_of(Drain), "What a leaving pod gets.", default={})
    api_key_secret_ref: SecretRef | None = spec_field(
        "apiKeySecretRef",
        object_of(SecretRef),
        "Secret with key `keys`: the bearer keys of the API, one a line, read again when it "
        "changes; left out, the API is open to whom the network lets in.",
    )

    @property
    def scheduling_policy(self) -> SchedulingPolicy:
        """What the workers are told of the order: without a deadline there is none but arrival."""
        has_deadline = self.batching.order == "Deadline" and self.slo.ttft_ms is not None
        return "deadline" if has_deadline else "fcfs"


ROOT_RULES: tuple[Rule, ...] = (
    Rule(
        f"self.metadata.name.size() <= {MAX_NAME_LENGTH}",
        f"metadata.name must have at most {MAX_NAME_LENGTH} characters",
        lambda name: len(name) <= MAX_NAME_LENGTH,
    ),
    Rule(
        "self.metadata.name.matches('^[a-z]([-a-z0-9]*[a-z0-9])?$')",
        "metadata.name must be lower-case letters, digits and -, starting with a letter",
        matching("[a-z]([-a-z0-9]*[a-z0-9])?", "").holds,
    ),
)
"""Rules over the whole object; `holds` takes metadata.name, which children are named after."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InferenceService:
    """One parsed object; `spec.model.name` is the object's name if it was left out.

    `unknown`: paths of fields that were left out, as this CRD has none of that name. A newer one
    has them while the operator is the old one: during an upgrade, or rolled back. Whoever writes an
    object by hand is told of them by the API server.
    """

    name: str
    namespace: str
    uid: str
    generation: int
    spec: Spec
    unknown: tuple[str, ...] = ()


def parse(body: Mapping[str, Any]) -> InferenceService:
    """Read an object as the API server gives it; raises SpecError with all problems."""
    metadata = body.get("metadata") or {}
    name = str(metadata.get("name", ""))
    of_name = [rule.message for rule in ROOT_RULES if not rule.holds(name)]
    problems = [*of_name]
    spec = object_of(Spec).read(body.get("spec", {}), "spec", problems)
    if of_name or spec is INVALID:
        raise SpecError(tuple(problems))
    return InferenceService(
        name=name,
        namespace=str(metadata.get("namespace", "default")),
        uid=str(metadata.get("uid", "")),
        generation=int(metadata.get("generation", 0)),
        spec=replace(spec, model=replace(spec.model, name=spec.model.name or name)),
        unknown=tuple(problem.removesuffix(UNKNOWN) for problem in problems),
    )
