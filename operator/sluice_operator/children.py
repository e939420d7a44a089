"""The manifests of an object's children. Pure: the same arguments give the same bytes.

Names are deterministic and quantities in the API server's own spelling, so that what is live can be
compared with what is wanted, and a pass over an object that is as it should be writes nothing.
"""

import base64
import hashlib
import json
import math
from collections.abc import Mapping
from typing import Any

from sluice_worker.sizing import HOST_BYTES, MAX_CEILING

from . import resources
from .observed import controller_of
from .runtime import OWNER_ANNOTATION, Runtime
from .settings import Settings
from .spec import API_VERSION, KIND, InferenceService, Rollout

Object = Mapping[str, Any]
Manifest = dict[str, Any]

API_PORT = 8000
ADMIN_PORT = 8001
SERVICE_PORT = 80
MANAGED_BY = "sluice-operator"
INSTANCE_LABEL = "app.kubernetes.io/instance"
MANAGED_BY_LABEL = "app.kubernetes.io/managed-by"
MANIFEST_ANNOTATION = "sluice.dev/manifest"
"""Hash of the manifest that was applied last: a field that we no longer want shows up in it."""
TEMPLATE_ANNOTATION = "sluice.dev/template"
TEMPLATE_INPUTS_ANNOTATION = "sluice.dev/template-inputs"
"""Hash of what the pod template was made from; the same hash keeps the template as it was."""
CEILING_ANNOTATION = "sluice.dev/ceiling"
"""`--max-num-seqs` of the template, or that the workers size themselves."""
ASKED_ANNOTATION = "sluice.dev/asked-ceiling"
"""`spec.batching.maxNumSeqs` as it was then, or that it was left to us, and bytes of memory."""
MODEL_ANNOTATION = "sluice.dev/model"
"""Hash of which model the template is of."""
COMMIT_ANNOTATION = "sluice.dev/commit"
"""What the revision of a hub's model stood for when the template was made; "" where not known."""
_AUTO = "auto"
PRE_STOP_SECONDS = 5
"""Longer than endpoints take to leave kube-proxy, so that no request meets a closed port."""
GRACE_MARGIN_SECONDS = 10
_USER = 65532
_CLAIM_MOUNT = "/mnt/models"
_CACHE_MOUNT = "/mnt/cache"
_ADMIN_DIR = "/etc/sluice/admin"
_RUNTIME_DIR = "/etc/sluice/runtime"
_ROLLING: Mapping[Rollout, Manifest] = {
    "Surge": {"maxUnavailable": 0, "maxSurge": 1},
    "Replace": {"maxUnavailable": 1, "maxSurge": 0},
}
_SPECULATION = '{"method":"ngram","num_speculative_tokens":8}'
"""What Auto means: drafts by lookup, which the engine stops where they do not pay."""


def deployment_name(service: InferenceService) -> str:
    """Also the Service's and the PodDisruptionBudget's."""
    return service.name


def runtime_name(name: str) -> str:
    """The ConfigMap with cap and epoch of the object `name`."""
    return f"{name}-runtime"


def secret_name(service: InferenceService) -> str:
    """The Secret with the admin token."""
    return f"{service.name}-admin"


def selector(service: InferenceService) -> dict[str, str]:
    """Labels that pick the object's pods, and only them."""
    return {"app.kubernetes.io/name": "sluice-worker", INSTANCE_LABEL: service.name}


def labels(service: InferenceService) -> dict[str, str]:
    """Labels of every child."""
    return {**selector(service), MANAGED_BY_LABEL: MANAGED_BY}


def is_ours(service: InferenceService, live: Object) -> bool:
    """Whether `live` is a child of exactly this object, or was before a person edited it."""
    controller = controller_of(live)
    if controller:
        return controller == service.uid
    return (live["metadata"].get("labels") or {}).items() >= labels(service).items()


def configmap(service: InferenceService, settings: Settings, runtime: Runtime) -> Manifest:
    """Cap, epoch, targets and the tuner's memory; mounted into the pods, which read it once, when
    they start: an edit of the targets restarts none."""
    data = {**runtime.data(), **_targets(service)}
    owner = {OWNER_ANNOTATION: settings.instance}
    return _child(service, "v1", "ConfigMap", runtime_name(service.name), {"data": data}, owner)


def _targets(service: InferenceService) -> dict[str, str]:
    """Named as the worker's flags: a pod predicts its first cap, and sizes chunks, for them."""
    slo = service.spec.slo
    targets = {"slo_ttft_ms": slo.ttft_ms, "slo_itl_ms": slo.itl_ms, "slo_e2e_ms": slo.e2e_ms}
    given = {name: str(ms) for name, ms in targets.items() if ms is not None}
    # Without a first-token target there is nothing to shed for, and the worker's flag refuses it.
    return {**given, "overload": slo.overload if slo.ttft_ms is not None else "Queue"}


def secret(service: InferenceService, token: str) -> Manifest:
    """The bearer token of the pods' admin port, which only the operator knows."""
    encoded = base64.b64encode(token.encode()).decode()
    body = {"type": "Opaque", "data": {"token": encoded}}
    return _child(service, "v1", "Secret", secret_name(service), body)


def kube_service(service: InferenceService) -> Manifest:
    """Where clients go. The admin port is not in it."""
    port = {"name": "http", "port": SERVICE_PORT, "targetPort": "http", "protocol": "TCP"}
    body = {"spec": {"type": "ClusterIP", "selector": selector(service), "ports": [port]}}
    return _child(service, "v1", "Service", deployment_name(service), body)


def disruption_budget(service: InferenceService) -> Manifest:
    """A drained node takes one pod at a time; one that cannot serve anyway never holds it up."""
    spec = {
        "maxUnavailable": 1,
        "unhealthyPodEvictionPolicy": "AlwaysAllow",
        "selector": {"matchLabels": selector(service)},
    }
    name = deployment_name(service)
    return _child(service, "policy/v1", "PodDisruptionBudget", name, {"spec": spec})


def deployment(
    service: InferenceService,
    settings: Settings,
    *,
    ceiling: int | None,
    replicas: int,
    live: Object | None,
    loading_bytes: int = HOST_BYTES,
    commit: str = "",
    is_unread: bool = False,
    is_pending: bool = False,
) -> Manifest:
    """The pods. A template made from the same inputs stays as `live` has it.

    So an operator that renders templates differently restarts no pod until its object changes.
    `loading_bytes`: of the host, for a pod with a GPU whose object does not say.
    `ceiling`: `--max-num-seqs`; None lets the worker size itself. Pods that started with a higher
    one stay too, as the cap is lowered live; to go beyond what they started with takes new ones,
    if it was asked for: an operator that finds room for more in the same memory restarts none.
    `is_unread`: the model cannot be read now (its hub is away), which is no reason to.
    `is_pending`: another model is asked for and is not known yet, or does not fit: until then
    `live` stays, whatever was asked for since.
    `commit`: what the revision of a hub's model stands for, so that all replicas run the same;
    where it cannot be asked now, the one of `live`.
    """
    inputs = _inputs_of(service, settings)
    started = _annotation(live, CEILING_ANNOTATION)
    asked = f"{service.spec.batching.max_num_seqs or _AUTO}/{service.spec.hardware.memory_bytes}"
    model = model_of(service)
    if is_pending:
        model = _annotation(live, MODEL_ANNOTATION) or model
        inputs = _annotation(live, TEMPLATE_INPUTS_ANNOTATION) or inputs
        asked = _annotation(live, ASKED_ANNOTATION) or asked
    is_as_asked = _annotation(live, ASKED_ANNOTATION) == asked
    kept = _kept_template(live, inputs) if is_as_asked or _suffices(started, ceiling) else None
    if kept or (is_unread and _annotation(live, MODEL_ANNOTATION) == model):
        commit = pinned_commit(live)
    template = kept or _template(service, settings, ceiling, commit, loading_bytes)
    spec = {
        "replicas": replicas,
        "revisionHistoryLimit": 3,
        "progressDeadlineSeconds": 1800,  # a large checkpoint loads for minutes
        "selector": {"matchLabels": selector(service)},
        "strategy": {"type": "RollingUpdate", "rollingUpdate": _ROLLING[service.spec.rollout]},
        "template": template,
    }
    annotations = {
        TEMPLATE_INPUTS_ANNOTATION: inputs,
        CEILING_ANNOTATION: started if kept and started else str(ceiling or _AUTO),
        ASKED_ANNOTATION: asked,
        MODEL_ANNOTATION: model,
        COMMIT_ANNOTATION: commit,
        TEMPLATE_ANNOTATION: json.dumps(template, sort_keys=True, separators=(",", ":")),
    }
    name = deployment_name(service)
    return _child(service, "apps/v1", "Deployment", name, {"spec": spec}, annotations)


def pinned_commit(live: Object | None) -> str:
    """The commit that the pods of the Deployment `live` are pinned to, "" where none is known."""
    return _annotation(live, COMMIT_ANNOTATION) or ""


def _inputs_of(service: InferenceService, settings: Settings) -> str:
    """Hash of what the pod template is made from."""
    return digest(_template_inputs(service, settings))


def model_of(service: InferenceService) -> str:
    """Hash of which model is asked for."""
    model = service.spec.model
    secret = model.secret_ref.name if model.secret_ref else None
    return digest([model.uri, model.dtype, model.revision, secret])


def is_of_model(service: InferenceService, settings: Settings, live: Object | None) -> bool:
    """Whether the pod template of `live` is of the model that is asked for now."""
    known = _annotation(live, MODEL_ANNOTATION)
    if known is None:  # written before there was this annotation
        return _annotation(live, TEMPLATE_INPUTS_ANNOTATION) == _inputs_of(service, settings)
    return known == model_of(service)


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
    manifest: Manifest = {
        "apiVersion": api_version,
        "kind": kind,
        "metadata": {
            "name": name,
            "namespace": service.namespace,
            "labels": labels(service),
            "annotations": dict(annotations or {}),
            "ownerReferences": [_owner(service)],
        },
        **body,
    }
    manifest["metadata"]["annotations"][MANIFEST_ANNOTATION] = digest(manifest)
    return manifest


def _owner(service: InferenceService) -> Manifest:
    return {
        "apiVersion": API_VERSION,
        "kind": KIND,
        "name": service.name,
        "uid": service.uid,
        "controller": True,
        # Would need the right to set finalizers; background collection does not.
        "blockOwnerDeletion": False,
    }


def _annotation(live: Object | None, name: str) -> str | None:
    annotations = (live or {}).get("metadata", {}).get("annotations") or {}
    value = annotations.get(name)
    return value if isinstance(value, str) else None


def _suffices(started: str | None, ceiling: int | None) -> bool:
    if started == _AUTO:  # a worker that sizes itself goes up to this
        return ceiling is None or ceiling <= MAX_CEILING
    return (
        started is not None
        and started.isdigit()
        and ceiling is not None
        and int(started) >= ceiling
    )


def _template_inputs(service: InferenceService, settings: Settings) -> dict[str, object]:
    """What restarts pods: never the cap, the epoch, the targets or the replicas.

    Wishes of the object and the image, not what we render from them, or an upgrade that renders
    them differently would restart every pod.
    """
    spec = service.spec
    return {
        **_hub_inputs(service, settings),
        "image": [spec.engine.image or settings.worker_image, settings.image_pull_policy],
        "model": [spec.model.uri, spec.model.name, spec.model.dtype, spec.model.max_model_len],
        "tokens": spec.batching.max_num_batched_tokens,
        "utilization": spec.batching.memory_utilization,
        "caching": spec.batching.prefix_caching,
        "speculation": spec.batching.speculation,
        "args": list(spec.engine.args),
        "resources": resources.limits(spec.hardware),
        "nodes": dict(spec.hardware.node_selector),
        "tolerations": [toleration.manifest() for toleration in spec.hardware.tolerations],
        "runtime": spec.hardware.runtime_class_name,
        "drain": spec.drain.timeout_s,
    }


def _hub_inputs(service: InferenceService, settings: Settings) -> dict[str, object]:
    """The revision as it was asked for: pods stay at the commit that it stood for, until then."""
    model = service.spec.model
    if model.repo is None:
        return {}
    secret = model.secret_ref.name if model.secret_ref else None
    return {"hub": [settings.hub_endpoint, model.revision, secret, _cache(service)]}


def _kept_template(live: Object | None, inputs: str) -> Manifest | None:
    if _annotation(live, TEMPLATE_INPUTS_ANNOTATION) != inputs:
        return None
    try:
        template = json.loads(_annotation(live, TEMPLATE_ANNOTATION) or "")
    except ValueError:
        return None
    return template if isinstance(template, dict) else None


def _template(
    service: InferenceService,
    settings: Settings,
    ceiling: int | None,
    commit: str,
    loading_bytes: int,
) -> Manifest:
    hardware, drain_s = service.spec.hardware, math.ceil(service.spec.drain.timeout_s)
    spec: Manifest = {
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": PRE_STOP_SECONDS + drain_s + GRACE_MARGIN_SECONDS,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": _USER,
            "runAsGroup": _USER,
            "fsGroup": _USER,
            "fsGroupChangePolicy": "OnRootMismatch",  # not a walk over a large cache at each start
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "containers": [_container(service, settings, ceiling, commit, loading_bytes)],
        "volumes": _volumes(service),
    }
    if hardware.node_selector:
        spec["nodeSelector"] = dict(hardware.node_selector)
    if hardware.tolerations:
        spec["tolerations"] = [toleration.manifest() for toleration in hardware.tolerations]
    if hardware.runtime_class_name:
        spec["runtimeClassName"] = hardware.runtime_class_name
    return {"metadata": {"labels": labels(service)}, "spec": spec}


def _container(
    service: InferenceService,
    settings: Settings,
    ceiling: int | None,
    commit: str,
    loading_bytes: int,
) -> Manifest:
    hardware = service.spec.hardware
    return {
        "name": "worker",
        "image": service.spec.engine.image or settings.worker_image,
        "imagePullPolicy": settings.image_pull_policy,
        "args": _arguments(service, ceiling, commit),
        "env": [*_environment(service), *_hub_environment(service, settings)],
        "ports": [
            {"name": "http", "containerPort": API_PORT, "protocol": "TCP"},
            {"name": "admin", "containerPort": ADMIN_PORT, "protocol": "TCP"},
        ],
        "resources": {
            "limits": resources.limits(hardware),
            "requests": resources.requests(hardware, loading_bytes),
        },
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        },
        "startupProbe": _probe("/healthz", period=2, failures=900),  # half an hour to load
        "livenessProbe": _probe("/healthz", period=10, failures=3),
        "readinessProbe": _probe("/readyz", period=2, failures=2),
        "lifecycle": {"preStop": {"sleep": {"seconds": PRE_STOP_SECONDS}}},
        # The worker's last line names what is wrong; it becomes the reason in our status.
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "volumeMounts": _mounts(service),
    }


def _probe(path: str, *, period: int, failures: int) -> Manifest:
    return {
        "httpGet": {"path": path, "port": "http"},
        "periodSeconds": period,
        "timeoutSeconds": 5,
        "failureThreshold": failures,
    }


def _environment(service: InferenceService) -> list[Manifest]:
    # More threads than the quota carries only get throttled: 4 ms steps at an ITL P99 of 54 ms.
    threads = max(service.spec.hardware.cpu_millis // 1000, 1)
    return [
        {"name": "HOME", "value": "/tmp"},  # noqa: S108 - an emptyDir; the root is read-only
        {"name": "OMP_NUM_THREADS", "value": str(threads)},
    ]


def _hub_environment(service: InferenceService, settings: Settings) -> list[Manifest]:
    """Which hub, and the token from the Secret: it is in no manifest of ours."""
    model = service.spec.model
    if model.repo is None:
        return []
    environment: list[Manifest] = [{"name": "HF_ENDPOINT", "value": settings.hub_endpoint}]
    if model.secret_ref is not None:
        source = {"secretKeyRef": {"name": model.secret_ref.name, "key": "token"}}
        environment.append({"name": "HF_TOKEN", "valueFrom": source})
    return environment


def _mounts(service: InferenceService) -> list[Manifest]:
    mounts: list[Manifest] = [
        {"name": "tmp", "mountPath": "/tmp"},  # noqa: S108
        {"name": "admin", "mountPath": _ADMIN_DIR, "readOnly": True},
        {"name": "runtime", "mountPath": _RUNTIME_DIR, "readOnly": True},
    ]
    if _claim(service):
        mounts.append({"name": "models", "mountPath": _CLAIM_MOUNT, "readOnly": True})
    if service.spec.model.repo:
        mounts.append({"name": "cache", "mountPath": _CACHE_MOUNT})
    return mounts


def _volumes(service: InferenceService) -> list[Manifest]:
    volumes: list[Manifest] = [
        {"name": "tmp", "emptyDir": {}},
        {"name": "admin", "secret": {"secretName": secret_name(service)}},
        {"name": "runtime", "configMap": {"name": runtime_name(service.name)}},
    ]
    claim = _claim(service)
    if claim:
        source = {"claimName": claim, "readOnly": True}
        volumes.append({"name": "models", "persistentVolumeClaim": source})
    if service.spec.model.repo:
        volumes.append({"name": "cache", **_cache(service)})
    return volumes


def _cache(service: InferenceService) -> Manifest:
    """What keeps a hub's files: the object's claim, which pods may share, or the pod's own disk."""
    cache = service.spec.model.cache
    if cache is None:
        return {"emptyDir": {}}
    return {"persistentVolumeClaim": {"claimName": cache.pvc}}


def _claim(service: InferenceService) -> str | None:
    model = service.spec.model
    if model.scheme != "pvc":
        return None
    return model.uri.removeprefix("pvc://").partition("/")[0]


def _model_directory(service: InferenceService) -> str:
    model = service.spec.model
    if model.scheme == "pvc":
        path = model.uri.removeprefix("pvc://").partition("/")[2].rstrip("/")
        return f"{_CLAIM_MOUNT}/{path}" if path else _CLAIM_MOUNT
    return model.directory or model.uri


def _arguments(service: InferenceService, ceiling: int | None, commit: str) -> list[str]:
    """The worker's flags, as a list: nothing from the object is ever parsed by a shell."""
    spec = service.spec
    is_hub = spec.model.repo is not None
    chosen: dict[str, object] = {
        "model": _model_directory(service),
        "revision": commit or spec.model.revision if is_hub else None,
        "download-dir": _CACHE_MOUNT if is_hub else None,
        "served-model-name": spec.model.name,
        "host": "",
        "port": API_PORT,
        "admin-port": ADMIN_PORT,
        "device": "cuda" if spec.hardware.accelerator == "nvidia" else "cpu",
        "dtype": spec.model.dtype,
        "max-model-len": spec.model.max_model_len,
        "max-num-seqs": ceiling,
        "max-num-batched-tokens": spec.batching.max_num_batched_tokens,
        "gpu-memory-utilization": f"{spec.batching.memory_utilization:g}",
        "admin-token-file": f"{_ADMIN_DIR}/token",
        "runtime-config-dir": _RUNTIME_DIR,
        "shutdown-timeout": f"{spec.drain.timeout_s:g}",
    }
    flags = [f"--{name}={value}" for name, value in chosen.items() if value is not None]
    caching = [] if spec.batching.prefix_caching else ["--no-enable-prefix-caching"]
    drafts = [f"--speculative-config={_SPECULATION}"] if spec.batching.speculation == "Auto" else []
    return [*flags, *caching, *drafts, *spec.engine.args]
