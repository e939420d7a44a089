"""The Job of a batch: `sluice batch` once for each shard, alone or beside an engine. Pure."""

import math

from sluice_core.model.sizing import HOST_BYTES
from sluice_core.words import in_url

from ..settings import Settings
from ..spec.batch import BATCH_KIND, InferenceBatch
from . import manifests, pod
from .pod import Manifest, Volume
from .runtime import OWNER_ANNOTATION

CLIENT = "batch"
"""The container that sends and writes; the Job's policy is about its exit codes."""
REPORT_PORT = 8002
BAD_INPUT, ENDPOINT_GONE, INTERRUPTED = 2, 5, 130
"""Exit codes of `sluice batch`. The last two say nothing about the batch."""
_RETRIES = 6
"""Of one shard, for all other ends; a Job's own default of a backoffLimit."""
_TRIES = 5
"""Of a request beside others: 429 says that they leave no place now, and halves what is open."""
_GRACE_S = 45
"""Seconds to leave in: requests under way get 30."""
_INPUT, _OUTPUT = "/mnt/input", "/mnt/output"
_SHARD = "$(JOB_COMPLETION_INDEX)"
"""A variable that an Indexed Job gives each container."""
_HELD = {
    "limits": {"cpu": "2", "memory": "1Gi"},
    "requests": {"cpu": "100m", "memory": "128Mi"},
}


def labels(batch: InferenceBatch) -> dict[str, str]:
    """Labels of the Job and of its pods."""
    return {
        "app.kubernetes.io/name": "sluice-batch",
        manifests.INSTANCE_LABEL: manifests.batch_key(batch.name),
        manifests.MANAGED_BY_LABEL: manifests.MANAGED_BY,
    }


def owner(batch: InferenceBatch) -> Manifest:
    """The owner reference of the Job."""
    return manifests.owner_reference(BATCH_KIND, batch.name, batch.uid)


def steering(batch: InferenceBatch) -> Manifest:
    """Fields of the Job that follow the object. Where Kueue suspends it, nobody else does."""
    suspend = {} if batch.is_queued else {"suspend": batch.spec.suspend}
    return {"parallelism": batch.spec.parallelism, **suspend}


def job(
    batch: InferenceBatch,
    settings: Settings,
    address: str,
    keys: str,
    ceiling: int | None = None,
    loading_bytes: int = HOST_BYTES,
    disk_bytes: int = 0,
    commit: str = "",
) -> Manifest:
    """The Job. `address`: of the service that answers, as not every cluster has DNS; `keys`: the
    Secret with its keys, "" for none. The others are of an engine of its own, as of
    `manifests.workload`."""
    spec = batch.spec
    ttl = {} if spec.ttl_s is None else {"ttlSecondsAfterFinished": math.ceil(spec.ttl_s)}
    volumes = _volumes(batch, keys)
    held = pod.held(batch.engine, loading_bytes, disk_bytes) if batch.engine else {}
    template = _pod_spec(batch, settings, address, volumes, ceiling, commit, held)
    return {
        "apiVersion": "batch/v1",
        "kind": manifests.JOB,
        "metadata": _metadata(batch, settings),
        "spec": {
            "completionMode": "Indexed",
            "completions": spec.shards,
            **steering(batch),
            "backoffLimitPerIndex": _RETRIES,
            "podReplacementPolicy": "Failed",  # never two writers of one output
            "podFailurePolicy": {"rules": _failures()},
            "activeDeadlineSeconds": math.ceil(spec.window_s),
            **ttl,
            "template": {
                "metadata": {"labels": labels(batch), "annotations": _annotations(volumes)},
                "spec": template,
            },
        },
    }


def _failures() -> list[Manifest]:
    """A node that goes, or an endpoint, is no failure of the shard; bad input is for good."""

    def on(*codes: int) -> Manifest:
        return {"onExitCodes": {"containerName": CLIENT, "operator": "In", "values": list(codes)}}

    disrupted = {"onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]}
    return [
        {"action": "Ignore", **disrupted},
        {"action": "FailIndex", **on(BAD_INPUT)},
        {"action": "Ignore", **on(ENDPOINT_GONE, INTERRUPTED)},
    ]


def _pod_spec(
    batch: InferenceBatch,
    settings: Settings,
    address: str,
    volumes: list[Volume],
    ceiling: int | None,
    commit: str,
    held: Manifest,
) -> Manifest:
    client = _client(batch, settings, address, volumes)
    if batch.engine is None:
        made = pod.bare_spec(settings, _GRACE_S, {"containers": [client]}, volumes)
    else:
        made = pod.sidecar_spec(batch.engine, settings, ceiling, commit, held, client)
        made["volumes"] = [*made["volumes"], *({"name": n, **source} for n, source, _ in volumes)]
        made["terminationGracePeriodSeconds"] = _GRACE_S
    return {**made, "restartPolicy": "Never"}


def _client(
    batch: InferenceBatch, settings: Settings, address: str, volumes: list[Volume]
) -> Manifest:
    return {
        "name": CLIENT,
        "image": settings.gate_image,
        "imagePullPolicy": settings.image_pull_policy,
        "command": ["sluice", "batch"],
        "args": _arguments(batch, address, any(name == pod.KEYS for name, _, _ in volumes)),
        "env": [*pod.own_environment(), {"name": "SQLITE_TMPDIR", "value": "/tmp"}],  # noqa: S108
        "ports": [{"name": "report", "containerPort": REPORT_PORT, "protocol": "TCP"}],
        "resources": _HELD,
        "securityContext": {**pod.UNPRIVILEGED, "readOnlyRootFilesystem": True},
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "volumeMounts": [{"name": name, **mount} for name, mount in _mounts(batch, volumes)],
    }


def _arguments(batch: InferenceBatch, address: str, has_keys: bool) -> list[str]:
    spec, service = batch.spec, batch.spec.service_ref
    at = f"{_INPUT}/{spec.input.config_map.key if spec.input.config_map else spec.input.path}"
    url = f"http://{in_url(address)}" if service else pod.OWN_URL
    return [
        at,
        f"--out={_OUTPUT}/{spec.output.path}/out.{_SHARD}.jsonl",
        f"--url={url}",
        f"--shard={_SHARD}/{spec.shards}",
        f"--report-port={REPORT_PORT}",
        *(["--background", f"--max-retries={_TRIES}"] if service else []),
        *([f"--api-key-file={pod.KEYS_DIR}/{pod.KEYS}"] if has_keys else []),
    ]


def _metadata(batch: InferenceBatch, settings: Settings) -> Manifest:
    return {
        "name": batch.name,
        "namespace": batch.namespace,
        "labels": {**labels(batch), **batch.labels},
        "annotations": {OWNER_ANNOTATION: settings.instance},
        "ownerReferences": [owner(batch)],
    }


def _annotations(volumes: list[Volume]) -> dict[str, str]:
    scratch = [name for name, source, _ in volumes if "emptyDir" in source]
    return {
        "cluster-autoscaler.kubernetes.io/safe-to-evict-local-volumes": ",".join(scratch),
        "traffic.sidecar.istio.io/excludeInboundPorts": str(REPORT_PORT),
    }


def _volumes(batch: InferenceBatch, keys: str) -> list[Volume]:
    """One claim is one volume, also where it has input and output."""
    given, claim = batch.spec.input, batch.spec.output.claim_name
    volumes: list[Volume] = [
        ("scratch", {"emptyDir": {}}, {"mountPath": "/tmp"}),  # noqa: S108
        ("output", {"persistentVolumeClaim": {"claimName": claim}}, {"mountPath": _OUTPUT}),
    ]
    if given.config_map:
        source: Manifest = {"configMap": {"name": given.config_map.name}}
        volumes.append(("input", source, pod.read_only(_INPUT)))
    elif given.claim_name != claim:
        source = {"persistentVolumeClaim": {"claimName": given.claim_name, "readOnly": True}}
        volumes.append(("input", source, pod.read_only(_INPUT)))
    if keys:
        chosen = {"secretName": keys, "items": [{"key": pod.KEYS, "path": pod.KEYS}]}
        volumes.append((pod.KEYS, {"secret": chosen}, pod.read_only(pod.KEYS_DIR)))
    return volumes


def _mounts(batch: InferenceBatch, volumes: list[Volume]) -> list[tuple[str, Manifest]]:
    mounts = [(name, mount) for name, _, mount in volumes]
    if batch.spec.input.claim_name == batch.spec.output.claim_name:
        mounts.append(("output", pod.read_only(_INPUT)))
    return mounts
