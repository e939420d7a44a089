"""Convert a workload, and what lies beside it in its file, to an InferenceService. Pure."""

import copy
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass

from sluice_operator.spec.rules import MAX_NAME_LENGTH
from sluice_operator.spec.service import API_VERSION, KIND

from . import fields, hardware, launch, model, pod
from .draft import Draft, Line, LineKind, NoEngine, Object

_SERVER = ("uid", "resourceVersion", "generation", "creationTimestamp", "managedFields", "selfLink",
           "deletionTimestamp", "deletionGracePeriodSeconds", "generateName")  # fmt: skip
_OF_TOOLS = re.compile(
    r"last-applied-configuration|deployment\.kubernetes\.io/|argocd|meta\.helm\.sh/|fluxcd"
)
_PACE = "the operator makes and replaces the pods"
_OWNED = {
    "selector": "the operator has labels of its own, so the old Service does not lead here",
    **dict.fromkeys(("strategy", "updateStrategy", "rolloutStrategy"), f"{_PACE}; see rollout"),
    **dict.fromkeys(("minReadySeconds", "progressDeadlineSeconds", "revisionHistoryLimit",
                     "serviceName", "podManagementPolicy", "startupPolicy"), _PACE),
    "restartPolicy": "the pods of a group restart together",
    "size": "hardware.nodes",
}  # fmt: skip
_MADE = {
    "Service": "the object makes one of its own name, with port 80",
    "PodDisruptionBudget": "the operator makes one",
    "HorizontalPodAutoscaler": "its bounds are `scaling`; delete it, as the operator scales",
}
_SLO = "the file has no promise; such as slo: {timeToFirstToken: 1s, interTokenLatency: 50ms}"
_LONGEST_DRAIN_S = 3600


@dataclass(frozen=True, slots=True)
class Converted:
    """`body`: the InferenceService. `lines`: what it does not say as the manifest did."""

    body: Object
    lines: tuple[Line, ...]


def convert(given: Object, beside: Sequence[Object], memory: str | None = None) -> Converted:
    """Convert one workload; raises Unreadable. `beside`: the file's other objects. `memory`: of
    one device."""
    workload = copy.deepcopy(given)
    spec, meta = workload["spec"], workload.get("metadata", {})
    group = spec.pop("leaderWorkerTemplate", {})
    worker = group.pop("workerTemplate", None)
    template = group.pop("leaderTemplate", None) or spec.pop("template", None) or worker
    size = group.get("size", 1) if worker else 1
    found = launch.find(template["spec"]["containers"])
    if found is None:
        raise NoEngine("no container of it runs vLLM, SGLang, TGI, llama.cpp or Ollama")
    at, start = found
    container = template["spec"]["containers"].pop(at)
    name = _name(
        meta.get("name", ""), workload["kind"], start.engine, spec.get("serviceName"), beside
    )
    draft = Draft(name, max(size, 1), template["spec"], container, start.engine)
    if name != meta.get("name"):
        draft.say("owned", "metadata.name", f"{meta.get('name')} is {name}, as the object's "
                  "Service and Deployment must not be the old ones")  # fmt: skip
    _claims(draft, spec.pop("volumeClaimTemplates", []))
    hardware.devices(draft)
    fields.read(draft, start)
    model.cache(draft)
    fields.variables(draft)
    hardware.read(draft, memory)
    _pace(draft, {**spec, **group}, meta.get("name"), beside)
    _template(draft, template.get("metadata", {}), spec)
    _workers(draft, worker, given)
    draft.say("missing", "slo", _SLO)
    body = {"apiVersion": API_VERSION, "kind": KIND, "metadata": _metadata(draft, meta)}
    return Converted({**body, "spec": _ordered(draft)}, tuple(draft.lines))


def _name(name: str, kind: str, engine: str, serves: object, beside: Sequence[Object]) -> str:
    """Return a name under which the object and what runs now have no child in common.

    A LeaderWorkerSet makes a Service too. `serves`: the Service that a StatefulSet names.
    """
    taken = {str(one.get("metadata", {}).get("name")) for one in beside
             if one.get("kind") == "Service" and isinstance(one.get("metadata"), dict)}  # fmt: skip
    if serves == name:
        taken.add(name)
    made = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-") or engine.lower()
    made = made if made[0].isalpha() else f"m-{made}"
    if kind != "StatefulSet" or made in taken:
        made = f"{made[: MAX_NAME_LENGTH - len('-sluice')].rstrip('-')}-sluice"
    return made[:MAX_NAME_LENGTH].rstrip("-")


def _claims(draft: Draft, claims: Sequence[Object]) -> None:
    """Carry a StatefulSet's claims, as volumes that end with their pod."""
    for one in claims:
        meta, spec = one.get("metadata", {}), one.get("spec", {})
        name = str(meta.pop("name", "data")) if isinstance(meta, dict) else "data"
        template = {**({"metadata": meta} if meta else {}), "spec": spec}
        volume = {"name": name, "ephemeral": {"volumeClaimTemplate": template}}
        draft.pod.setdefault("volumes", []).append(volume)
        draft.say("changed", f"volumeClaimTemplates[{name}]", "a claim now ends with its pod")


def _pace(draft: Draft, spec: Object, name: object, beside: Sequence[Object]) -> None:
    """Carry how many pods there are, and how they come and go."""
    number = spec.pop("replicas", 1)
    if number == 0:
        draft.put("replicas", 0)
    elif number != 1:
        draft.put("scaling", {"minReplicas": number, "maxReplicas": number})
    for one in beside:
        bounds, target = one.get("spec", {}), {}
        if one.get("kind") == "HorizontalPodAutoscaler" and isinstance(bounds, dict):
            target = bounds.get("scaleTargetRef", {})
        if isinstance(target, dict) and target.get("name") == name and target:
            most = bounds.get("maxReplicas", 1)
            draft.put("scaling", {"minReplicas": bounds.get("minReplicas", 1), "maxReplicas": most})
    strategy = spec.get("strategy", {})
    if strategy.get("type") == "Recreate" or _surges_not(strategy.get("rollingUpdate")):
        draft.put("rollout", "Replace")
    for key in list(spec):
        if key in _OWNED:
            draft.say("owned", key, f"{_short(spec[key])}: {_OWNED[key]}")
        else:
            draft.say("lost", key, f"{_short(spec[key])}: the object has no such field")
    grace = draft.pod.pop("terminationGracePeriodSeconds", None)
    if grace is not None:
        drain = min(max(grace, 1), _LONGEST_DRAIN_S)
        draft.put("drain.timeout", f"{drain}s")
        if drain != grace:
            draft.say("changed", "terminationGracePeriodSeconds", f"{grace} is {drain}s")


def _surges_not(rolling: object) -> bool:
    return isinstance(rolling, dict) and rolling.get("maxSurge") in (0, "0", "0%")


def _template(draft: Draft, meta: Object, spec: Object) -> None:
    """Write the overlay: labels and annotations of the pods, and all that no rule took."""
    labels, kept = meta.pop("labels", {}), {}
    chosen = spec.get("selector", {}).get("matchLabels", {})
    for key, value in labels.items():
        if key.startswith("app.kubernetes.io/") and key.rpartition("/")[2] in (
            "name", "instance", "managed-by",
        ):  # fmt: skip
            draft.say("owned", f"metadata.labels.{key}", f"{value}: the operator sets it")
        elif key in chosen:
            draft.say("owned", f"metadata.labels.{key}", f"{value}: the old Service would lead to "
                      "the new pods at once")  # fmt: skip
        else:
            kept[key] = value
    annotations = meta.pop("annotations", {})
    if annotations.get("prometheus.io/port") not in (None, "8000", "8001"):
        said = f"{annotations['prometheus.io/port']} is 8001, the gate's port for metrics"
        draft.say("changed", "metadata.annotations.prometheus.io/port", said)
        annotations["prometheus.io/port"] = "8001"
    for key in [one for one in meta if meta[one]]:
        draft.say("owned", f"metadata.{key}", f"{_short(meta[key])}: pods are named by theirs")
    parts = {"labels": kept, "annotations": annotations}
    given = {key: value for key, value in parts.items() if value}
    overlay = {"metadata": given, "spec": pod.read(draft)}
    if any(overlay.values()):
        draft.put("podTemplate", {key: value for key, value in overlay.items() if value})


def _workers(draft: Draft, worker: Object | None, given: Object) -> None:
    """Add a line for each value that the first pod of a group has not."""
    leader = given["spec"].get("leaderWorkerTemplate", {}).get("leaderTemplate")
    if worker is None or leader is None:
        return
    draft.say("owned", "workerTemplate", "the operator makes the other pods as the first one")
    first = dict(_leaves(leader, ""))
    for path, value in _leaves(worker, ""):
        mine = first.get(path)
        if mine != value and not re.search(
            r"\.(command|args|ports|\w+Probe)\b|containers\[\d+\]\.name$", path
        ):
            draft.say("lost", f"workerTemplate{path}", f"{value}: the first pod has {mine}")


def _leaves(value: object, path: str) -> list[tuple[str, object]]:
    if isinstance(value, dict):
        return [leaf for key, one in value.items() for leaf in _leaves(one, f"{path}.{key}")]
    if isinstance(value, list):
        return [leaf for at, one in enumerate(value) for leaf in _leaves(one, f"{path}[{at}]")]
    return [(path, value)]


def other(one: Object) -> Line:
    """Return the line of a document that makes no pods of an engine."""
    kind, meta = str(one.get("kind")), one.get("metadata")
    path = f"{kind} {meta.get('name') if isinstance(meta, dict) else None}"
    words = _MADE.get(kind, "stays as it is: apply it as before")
    return Line("changed" if kind == "HorizontalPodAutoscaler" else "owned", path, words)


def _metadata(draft: Draft, meta: Object) -> Object:
    """Return the object's metadata. A label of the workload may name Kueue's queue."""
    notes = meta.get("annotations", {})
    for key in [one for one in notes if _OF_TOOLS.search(one)]:
        draft.say(
            "owned", f"metadata.annotations.{key}", "is of the tool that applied the manifest"
        )
        del notes[key]
    kept = {key: meta.pop(key) for key in ("namespace", "labels", "annotations") if meta.get(key)}
    for key in sorted(meta.keys() - {"name", "labels", "annotations"}):
        kind: LineKind = "owned" if key in _SERVER else "lost"
        draft.say(kind, f"metadata.{key}", _short(meta[key])[:200])
    return {"name": draft.name, **kept}


def _short(value: object) -> str:
    return json.dumps(value) if isinstance(value, dict | list) else str(value)


_ORDER = ("engine", "model", "hardware", "batching", "scaling", "replicas", "rollout", "drain",
          "apiKeySecretRef", "podTemplate")  # fmt: skip


def _ordered(draft: Draft) -> Object:
    if draft.args:
        draft.put("engine.args", draft.args)
    return {key: draft.spec[key] for key in _ORDER if key in draft.spec}
