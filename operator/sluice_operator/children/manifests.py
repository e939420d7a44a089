"""The manifests of an object's children. Pure: the same arguments give the same bytes.

Names are deterministic and quantities in the API server's own spelling. So live and wanted objects
can be compared, and a pass over an object without drift writes nothing.
"""

import base64
import hashlib
import json
from collections.abc import Mapping
from typing import NamedTuple

from msgspec import to_builtins
from sluice_core.bounded import count
from sluice_core.model.sizing import HOST_BYTES, MAX_CEILING

from ..cluster.observed import Object, controller_of
from ..settings import Settings
from ..spec.service import API_VERSION, GROUP, KIND, QUEUE_LABEL, InferenceService
from . import overlay, pod, resources
from .pod import Manifest, secret_name
from .runtime import OWNER_ANNOTATION, DecidedRuntime, runtime_name

SERVICE_PORT = 80
MANAGED_BY = "sluice-operator"
_NAME_LABEL, _FOLLOWER = "app.kubernetes.io/name", "sluice-follower"
INSTANCE_LABEL = "app.kubernetes.io/instance"
OF_BATCHES = ".batch"
MANAGED_BY_LABEL = "app.kubernetes.io/managed-by"
MANIFEST_ANNOTATION = "sluice.dev/manifest"
"""Hash of the manifest that was applied last: it shows that we no longer want a field."""
TEMPLATE_ANNOTATION = "sluice.dev/template"
TEMPLATE_INPUTS_ANNOTATION = "sluice.dev/template-inputs"
"""Hash of the pod template's inputs; the same hash keeps the template as it was."""
CEILING_ANNOTATION = "sluice.dev/ceiling"
"""`--max-num-seqs` of the template, or that the workers size themselves."""
ASKED_ANNOTATION = "sluice.dev/asked-ceiling"
"""`spec.batching.maxNumSeqs` at that time, or that it was left to us, and bytes of memory."""
MODEL_ANNOTATION = "sluice.dev/model"
"""Hash of the model that the template is of."""
COMMIT_ANNOTATION = "sluice.dev/commit"
"""The commit of a hub model's revision when the template was made; "" if not known."""
TARGET_PREFIX = "slo_"
"""Prefix of ConfigMap keys that are there only while the object gives the target."""
WATCHED = ("ConfigMap", "Service", "Deployment")
JOB = "Job"
SEEN = ("Pod", *WATCHED, JOB)
"""Kinds that a watch shows, with our label, whose ever children they are."""
UNWATCHED = ("Secret", "PodDisruptionBudget")
"""Children that no watch shows; for example, the operator has no right to list secrets."""
GROUPS = "LeaderWorkerSet"
"""The kind whose replicas are groups of pods, one a node. Few objects have one, and its definition
may not be installed: it is read in each pass, and not watched."""
_VERSIONS = {"Deployment": "apps/v1", GROUPS: "leaderworkerset.x-k8s.io/v1"}
WORKLOADS = tuple(_VERSIONS)
"""Kinds that make the pods."""
_AUTO = "auto"
_LOAD_S, _FETCH_S = 1800, 6 * 3600
"""Seconds until a rollout is called stuck: a checkpoint loads for minutes, a hub's download takes
hours. A pod that crashes or has no room is reported long before."""


def name_of(service: InferenceService, kind: str) -> str:
    """Name of the object's child of a kind."""
    names = {
        "ConfigMap": runtime_name(service.name),
        "Secret": secret_name(service),
        # It makes a Service of its own name, which must not be ours.
        GROUPS: f"{service.name}-group",
    }
    return names.get(kind, service.name)


def workload_of(service: InferenceService) -> str:
    """The kind that makes the object's pods."""
    return GROUPS if service.spec.hardware.nodes > 1 else "Deployment"


def seen_kinds(service: InferenceService) -> tuple[str, ...]:
    """Kinds of the object's children that each pass sees: by a watch, or read."""
    others = (kind for kind in WATCHED if kind not in WORKLOADS)
    return (*others, workload_of(service))


def owner_of(kind: str, body: Object) -> tuple[str, str]:
    """Namespace and key of the object whose child `body` would be. A pod's label tells it; for
    others it is the name, which nobody edits."""
    meta = body["metadata"]
    name: str = meta["name"]
    if kind == "Pod":
        name = str((meta.get("labels") or {}).get(INSTANCE_LABEL, ""))
    elif kind == JOB:
        name = batch_key(name)
    elif kind == "ConfigMap":
        name = name.removesuffix(runtime_name("")) if name.endswith(runtime_name("")) else ""
    return str(meta["namespace"]), name


def batch_key(name: str) -> str:
    """Names a batch among all objects, in the label of its pods too: no service has a dot."""
    return f"{name}{OF_BATCHES}"


def selector(service: InferenceService) -> dict[str, str]:
    """Labels that pick the object's pods, and only them."""
    return {_NAME_LABEL: "sluice-worker", INSTANCE_LABEL: service.name}


def followers(service: InferenceService) -> str:
    """A selector of the pods of its groups that are not the first."""
    return f"{_NAME_LABEL}={_FOLLOWER},{INSTANCE_LABEL}={service.name}"


def labels(service: InferenceService) -> dict[str, str]:
    """Labels of every child."""
    return {**selector(service), MANAGED_BY_LABEL: MANAGED_BY}


def is_ours(service: InferenceService, live: Object) -> bool:
    """True if `live` is a child of exactly this object, or was before a person edited it."""
    return is_child(service.uid, labels(service), live)


def is_child(uid: str, marks: Mapping[str, str], live: Object) -> bool:
    """True if the object with `uid` controls `live`, or nobody does and it bears the `marks`."""
    controller = controller_of(live)
    if controller:
        return controller == uid
    return (live["metadata"].get("labels") or {}).items() >= marks.items()


def is_of_former(owner: Manifest, live: Object) -> bool:
    """True if `live` belonged to a deleted object of the same kind and name as the `owner`, an
    owner reference: it is on its way out.

    KServe calls its objects by the same kind, and they stay.
    """
    return any(
        one.get("controller")
        and one["apiVersion"].startswith(f"{GROUP}/")
        and (one["kind"], one["name"]) == (owner["kind"], owner["name"])
        for one in live["metadata"].get("ownerReferences") or ()
        if one["uid"] != owner["uid"]
    )


def configmap(service: InferenceService, settings: Settings, runtime: DecidedRuntime) -> Manifest:
    """Cap, epoch, targets, order and the tuner's memory, mounted into the pods. Pods read it once,
    when they start: an edit of targets or order restarts none."""
    data = {**runtime.data(), **_targets(service)}
    owner = {OWNER_ANNOTATION: settings.instance}
    return _child(service, "v1", "ConfigMap", runtime_name(service.name), {"data": data}, owner)


def _targets(service: InferenceService) -> dict[str, str]:
    """Keys are the worker's flags: a pod predicts its first cap, and sizes chunks, for the targets.
    They also say what a pod sheds and whom it serves first."""
    slo = service.spec.slo
    targets = {"ttft_ms": slo.ttft_ms, "itl_ms": slo.itl_ms, "e2e_ms": slo.e2e_ms}
    given = {TARGET_PREFIX + name: str(ms) for name, ms in targets.items() if ms is not None}
    return {
        **given,
        "overload": slo.told_overload,
        "scheduling_policy": service.spec.scheduling_policy,
        "hold_share": str(slo.hold_share),
    }


def secret(service: InferenceService, token: str) -> Manifest:
    """The bearer token of the pods' admin port, which only the operator knows. An engine's own
    admin key comes from it, and does not tell it."""
    given = {"token": token}
    if pod.takes_admin_key(service):
        given[pod.ENGINE_KEY] = hashlib.sha256(f"engine {token}".encode()).hexdigest()
    data = {key: base64.b64encode(value.encode()).decode() for key, value in given.items()}
    body = {"type": "Opaque", "data": data}
    return _child(service, "v1", "Secret", secret_name(service), body)


def kube_service(service: InferenceService) -> Manifest:
    """The Service that clients use. The admin port is not in it."""
    port = {"name": "http", "port": SERVICE_PORT, "targetPort": "http", "protocol": "TCP"}
    body = {"spec": {"type": "ClusterIP", "selector": selector(service), "ports": [port]}}
    return _child(service, "v1", "Service", service.name, body)


def disruption_budget(service: InferenceService, unplaced: int = 0) -> Manifest:
    """A drained node takes one pod at a time. A pod that cannot serve never holds up the drain, nor
    do the `unplaced` ones, which count as disrupted."""
    spec = {
        "maxUnavailable": 1 + unplaced,
        "unhealthyPodEvictionPolicy": "AlwaysAllow",
        "selector": {"matchLabels": selector(service)},
    }
    return _child(service, "policy/v1", "PodDisruptionBudget", service.name, {"spec": spec})


class _Asked(NamedTuple):
    """What the pods are of. `inputs`: a hash of all that makes their template; `sizes`: the cap and
    the memory that the object asks for."""

    inputs: str
    sizes: str
    model: str

    @classmethod
    def of(cls, service: InferenceService, settings: Settings, live: Object | None) -> "_Asked":
        """Those of `live`, where it says; else of the object."""
        spec = service.spec
        sizes = f"{spec.batching.max_num_seqs or _AUTO}/{spec.hardware.memory_bytes}"
        return cls(
            annotation(live, TEMPLATE_INPUTS_ANNOTATION) or digest(pod.inputs(service, settings)),
            annotation(live, ASKED_ANNOTATION) or sizes,
            annotation(live, MODEL_ANNOTATION) or model_of(service),
        )

    @property
    def annotations(self) -> dict[str, str]:
        """Those that the next operator compares."""
        return {
            TEMPLATE_INPUTS_ANNOTATION: self.inputs,
            ASKED_ANNOTATION: self.sizes,
            MODEL_ANNOTATION: self.model,
        }


def workload(
    service: InferenceService,
    settings: Settings,
    *,
    ceiling: int | None,
    replicas: int,
    live: Object | None,
    loading_bytes: int = HOST_BYTES,
    disk_bytes: int = 0,
    commit: str = "",
    is_unread: bool = False,
    is_pending: bool = False,
    unplaced: int = 0,
) -> Manifest:
    """Make what makes the pods. A template of the same inputs stays as `live` has it: an operator
    that renders others restarts no pod until its object changes.

    `ceiling`: `--max-num-seqs`; None lets the worker size itself. Pods with a higher one stay, as
    the cap is lowered live. A higher one takes new pods, and only if it was asked for.
    `is_unread`: the model cannot be read now, which is no reason to restart. `is_pending`: another
    model is not known yet, or does not fit: `live` stays until it does. `commit`: of a hub model's
    revision, so that all replicas run the same. `unplaced`: replicas that no node takes."""
    asked = _Asked.of(service, settings, live if is_pending else None)
    started, sizes = annotation(live, CEILING_ANNOTATION), annotation(live, ASKED_ANNOTATION)
    may_stay = sizes == asked.sizes or _suffices(started, ceiling)
    kept = _kept_template(live, asked.inputs) if may_stay else None
    if kept or (is_unread and annotation(live, MODEL_ANNOTATION) == asked.model):
        commit = pinned_commit(live)
    held, kind = pod.held(service, loading_bytes, disk_bytes), workload_of(service)
    template = kept or _templates(service, settings, ceiling, commit, held)
    annotations = asked.annotations | {
        CEILING_ANNOTATION: started if kept and started else str(ceiling or _AUTO),
        COMMIT_ANNOTATION: commit,
        TEMPLATE_ANNOTATION: json.dumps(template, sort_keys=True, separators=(",", ":")),
    }
    make = _groups if kind == GROUPS else _deployment
    body = {"spec": make(service, replicas, _rolling(service, unplaced), template)}
    return _child(service, _VERSIONS[kind], kind, name_of(service, kind), body, annotations)


def check(service: InferenceService, settings: Settings) -> None:
    """Raise SpecError if the object's overlay takes what is ours."""
    if service.spec.pod_template is not None:
        _templates(service, settings, None, "", {})


def _templates(
    service: InferenceService, settings: Settings, ceiling: int | None, commit: str, held: Manifest
) -> Manifest:
    """The template of the pods; those of a group's first pod and of the others."""
    given = to_builtins(service.spec.pod_template) if service.spec.pod_template else None
    spec = pod.pod_spec(service, settings, ceiling, commit, held)
    first = _template(service, labels(service), spec, given)
    if workload_of(service) != GROUPS:
        return first
    # No Service, budget or watch of ours is for the pods that only follow.
    theirs = {_NAME_LABEL: _FOLLOWER, INSTANCE_LABEL: service.name}
    spec = pod.follower_spec(service, settings, ceiling, commit, held)
    follower = _template(service, theirs, spec, given and overlay.without_gate(given))
    return {"leaderTemplate": first, "workerTemplate": follower}


def _template(
    service: InferenceService, marks: dict[str, str], spec: Manifest, given: Manifest | None
) -> Manifest:
    meta = {"labels": marks, "annotations": pod.metadata_annotations(service)}
    template = {"metadata": meta, "spec": spec}
    if given is None:
        return template
    devices = resources.limits(service.spec.hardware).keys() - {"cpu", "memory"}
    return overlay.merged(template, given, devices)


def _groups(
    service: InferenceService, replicas: int, rolling: Manifest, templates: Manifest
) -> Manifest:
    """A group restarts as one: an engine does not take back a part that was away."""
    return {
        "replicas": replicas,
        "rolloutStrategy": {"type": "RollingUpdate", "rollingUpdateConfiguration": rolling},
        "leaderWorkerTemplate": {
            "size": service.spec.hardware.nodes,
            "restartPolicy": "RecreateGroupOnPodRestart",
            **templates,
        },
    }


def _deployment(
    service: InferenceService, replicas: int, rolling: Manifest, template: Manifest
) -> Manifest:
    return {
        "replicas": replicas,
        "revisionHistoryLimit": 3,
        "progressDeadlineSeconds": _progress_seconds(template),
        "selector": {"matchLabels": selector(service)},
        "strategy": {"type": "RollingUpdate", "rollingUpdate": rolling},
        "template": template,
    }


def _progress_seconds(template: Manifest) -> int:
    """Seconds until pods that are not ready are called stuck."""
    text = json.dumps(template)
    marks = ("--model=hf://", '"name": "HF_HOME"', "s3://", "gs://")
    is_download = any(mark in text for mark in marks)
    return _FETCH_S if is_download else _LOAD_S


def _rolling(service: InferenceService, unplaced: int) -> Manifest:
    """With Replace, a pod that no node takes must not be the one that may be unavailable. Otherwise
    nothing would ever be replaced."""
    if service.spec.rollout == "Surge":
        return {"maxUnavailable": 0, "maxSurge": 1}
    return {"maxUnavailable": 1 + unplaced, "maxSurge": 0}


def pinned_commit(live: Object | None) -> str:
    """The commit that the pods of the Deployment `live` are pinned to, "" if none is known."""
    return annotation(live, COMMIT_ANNOTATION) or ""


def model_of(service: InferenceService) -> str:
    """Hash of the model that is asked for."""
    model = service.spec.model
    return digest([model.uri, model.dtype, model.revision, model.secret])


def is_of_model(service: InferenceService, live: Object | None) -> bool:
    """True if the pod template of `live` is of the model that is asked for now."""
    return annotation(live, MODEL_ANNOTATION) == model_of(service)


def is_as_asked(service: InferenceService, settings: Settings, live: Object) -> bool:
    """True if the pod template of `live` was made from what is asked for now."""
    return annotation(live, TEMPLATE_INPUTS_ANNOTATION) == digest(pod.inputs(service, settings))


def digest(value: object) -> str:
    """A short stable hash of JSON-like data."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _child(
    service: InferenceService,
    api_version: str,
    kind: str,
    name: str,
    body: Manifest,
    annotations: Mapping[str, str] | None = None,
) -> Manifest:
    queue = {QUEUE_LABEL: service.queue} if service.queue and kind in WORKLOADS else {}
    manifest: Manifest = {
        "apiVersion": api_version,
        "kind": kind,
        "metadata": {
            "name": name,
            "namespace": service.namespace,
            "labels": {**labels(service), **queue},
            "annotations": dict(annotations or {}),
            "ownerReferences": [owner_reference(KIND, service.name, service.uid)],
        },
        **body,
    }
    manifest["metadata"]["annotations"][MANIFEST_ANNOTATION] = digest(manifest)
    return manifest


def owner_reference(kind: str, name: str, uid: str) -> Manifest:
    """Names an object of ours as the owner of a child."""
    return {
        "apiVersion": API_VERSION,
        "kind": kind,
        "name": name,
        "uid": uid,
        "controller": True,
        # True would need the right to set finalizers; background collection does not.
        "blockOwnerDeletion": False,
    }


def annotation(live: Object | None, name: str) -> str | None:
    """An annotation of a live object; None without an object or a text."""
    annotations = (live or {}).get("metadata", {}).get("annotations") or {}
    value = annotations.get(name)
    return value if isinstance(value, str) else None


def _suffices(started: str | None, ceiling: int | None) -> bool:
    if started == _AUTO:  # a worker that sizes itself goes up to MAX_CEILING
        return ceiling is None or ceiling <= MAX_CEILING
    most = count(started)
    return most is not None and ceiling is not None and most >= ceiling


def _kept_template(live: Object | None, inputs: str) -> Manifest | None:
    if annotation(live, TEMPLATE_INPUTS_ANNOTATION) != inputs:
        return None
    try:
        template = json.loads(annotation(live, TEMPLATE_ANNOTATION) or "")
    except (ValueError, RecursionError):
        return None
    return template if isinstance(template, dict) else None
