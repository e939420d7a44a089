"""The template of a pod: our worker, or a gate before another engine. Pure: equal arguments give
equal bytes."""

import json
import math
from collections.abc import Collection, Sequence
from typing import Any

from msgspec import to_builtins
from sluice_core.engines import FOREIGN
from sluice_core.engines.engine import (
    ADMIN_KEY,
    LOOPBACK,
    PORT,
    Group,
    Inside,
    Invocation,
    Start,
    flags,
)
from sluice_core.engines.vllm import PACKAGES

from ..settings import Settings
from ..spec.hardware import Hardware
from ..spec.service import Api, EngineSpec, InferenceService, Model
from . import resources
from .runtime import runtime_name
from .worker_flags import worker_flags

Manifest = dict[str, Any]
Volume = tuple[str, Manifest, Manifest]
"""A volume's name, source and mount."""

API_PORT = 8000
ADMIN_PORT = 8001
OWN_URL = f"http://{LOOPBACK}:{API_PORT}"
"""The API, from another container of its pod."""
DELAY_SECONDS = 5
"""Seconds, longer than endpoints take to leave kube-proxy, so that no request meets a closed port.
No preStop hook waits so long: the worker must know that it leaves, and says so in its answers."""
GRACE_MARGIN_SECONDS = 10
_USER = 65532
_CLAIM_MOUNT = "/mnt/models"
_CACHE_MOUNT = "/mnt/cache"
_ADMIN_DIR = "/etc/sluice/admin"
_RUNTIME_DIR = "/etc/sluice/runtime"
KEYS_DIR = "/etc/sluice/keys"
_BATCHES_DIR = "/mnt/batches"
_TERMINATION_LOG = "/dev/termination-log"
"""Kubernetes' default path, which the kubelet mounts writable."""
_SHARED_MEMORY = "/dev/shm"  # noqa: S108
"""64 MiB in a container: an engine's processes on many devices exchange more, and end by SIGBUS."""
_RANK, _LEADER = "$(LWS_WORKER_INDEX)", "$(LWS_LEADER_ADDRESS)"
"""Variables that a LeaderWorkerSet gives each container."""
_AUTHORITIES_DIR, _AUTHORITIES = "/etc/sluice/ca", "ca.crt"
PACKAGES_DIR, SOCKET_DIR = "/opt/sluice-vllm", "/run/sluice"
SOCKET = f"{SOCKET_DIR}/engine.sock"
"""Where our scheduler inside vLLM finds the gate."""
FOLLOWER = "follower"
"""An engine in a pod that serves with the first one of its group."""
KEYS = "keys"
"""Key of the Secret of spec.apiKeySecretRef."""
ENGINE_KEY = "engine"
"""Key of our own Secret, for the admin key of an engine that takes one."""
_HOME = {"name": "HOME", "value": "/tmp"}  # noqa: S108 - an emptyDir; the root is read-only
_USER_NAME = {"name": "USER", "value": "sluice"}
"""torch looks for the name of the user, whom these images do not know."""
_OWN_HOSTS = "localhost,127.0.0.1,::1,.svc,.cluster.local"
"""Never asked through a hub's proxy: an engine may ask itself when it starts (sglang#9155). Both
spellings of each variable are read, and by many only one of them."""
_LAST_WORDS = {"name": "SLUICE_TERMINATION_LOG", "value": _TERMINATION_LOG}
UNPRIVILEGED = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
_GATE_START_S = 30
"""Seconds until the engine's probe first asks the gate. Its image is on the node by then, because
`_gate_image` has run."""
_HUNG_GRACE_SECONDS = 15
"""Seconds to leave for what does not answer its liveness probe. A drain would wait for answers that
cannot come, and a stopped process takes no SIGTERM."""
_LOADED_S = 6 * 3600
"""Most seconds until an engine that serves one client has fetched its model and is ready."""
_SERVED_FILE = "/tmp/engine-served"  # noqa: S108 - on an emptyDir, which outlives a container
_GATE_REQUESTS, _GATE_CPU = {"cpu": "100m", "memory": "128Mi"}, "2"
"""A limit that a loop and a reader beside it never reach. Some quotas demand one."""
_GATE_BYTES, _BODIES_HELD, _BODIES_READ = 192 << 20, 4, 3
"""A gate's memory: its two programs and their connections, the largest bodies that are held at
once, and what reading one of them takes (`gate.config.reading_bytes`)."""
_GATE_BODY_BYTES = 64 << 20
"""Largest body before another engine: images and audio come in bodies."""
_LEAST_BODY_BYTES = 16 << 20
"""Memory is given for this one at least: many small bodies take it as well."""
_PACKAGES_FROM = "/opt/sluice/src"


def secret_name(service: InferenceService) -> str:
    """The Secret with the admin token."""
    return f"{service.name}-admin"


def inputs(service: InferenceService, settings: Settings) -> dict[str, object]:
    """Inputs that restart pods: never cap, epoch, targets, replicas or the API's keys.

    They are the object's wishes and the image, not what we render from them. An upgrade that
    renders them differently must restart no pod.
    """
    spec = service.spec
    return {
        **_hub_inputs(service, settings),
        **({"user": "assigned"} if settings.assigned_user else {}),
        # A CPU pod's memory is its container's limit.
        **({"gpu": spec.hardware.memory_bytes} if spec.hardware.has_devices else {}),
        **_group_inputs(spec.hardware),
        **({"keys": spec.api_key_secret_ref.name} if spec.api_key_secret_ref else {}),
        **_api_inputs(service),
        **({"batches": spec.batches.claim_name} if spec.batches else {}),
        **_engine_inputs(service),
        **({"template": to_builtins(spec.pod_template)} if spec.pod_template else {}),
        **({"static": to_builtins(spec.batching.static)} if spec.batching.static else {}),
        "image": [image_of(spec.engine, settings), settings.image_pull_policy],
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


def _group_inputs(hardware: Hardware) -> dict[str, object]:
    if not hardware.is_spread and hardware.accelerator != "other":
        return {}
    return {"group": [hardware.accelerator, hardware.num_gpus, hardware.nodes]}


def _api_inputs(service: InferenceService) -> dict[str, object]:
    given = to_builtins(service.spec.api)
    return {"api": given} if service.spec.api != Api() else {}


def _engine_inputs(service: InferenceService) -> dict[str, object]:
    """Another engine's own fields. The gate's image is none: a new operator restarts no pod."""
    engine = service.spec.engine
    if engine.name == "Sluice":
        return {"command": list(engine.command)} if engine.command else {}
    variables = [
        [one.name, one.manifest()["valueFrom"] if one.value_from else one.value]
        for one in engine.env
    ]
    return {
        "engine": [engine.name, list(engine.command), variables, engine.port, engine.health_path]
    }


def _hub_inputs(service: InferenceService, settings: Settings) -> dict[str, object]:
    """The revision as it was asked for: pods stay at its commit until that changes."""
    model = service.spec.model
    if model.repo is None:
        return {}
    given = [one for one in (settings.hub_proxy, settings.hub_authorities) if one]
    return {"hub": [settings.hub_endpoint, model.revision, model.secret, _cache(service), *given]}


def pod_spec(
    service: InferenceService,
    settings: Settings,
    ceiling: int | None,
    commit: str,
    held: Manifest,
) -> Manifest:
    """`spec` of the template. `manifests.workload` explains `ceiling` and `commit`; `held`:
    resources of what loads the model."""
    return _spec(service, settings, _containers(service, settings, ceiling, commit, held))


def follower_spec(
    service: InferenceService,
    settings: Settings,
    ceiling: int | None,
    commit: str,
    held: Manifest,
) -> Manifest:
    """`spec` of the pods that serve with the first one of their group: the engine alone."""
    capacity = ceiling or FOREIGN[service.spec.engine.name].capacity
    engine = _engine(service, settings, capacity, commit, held, follows=True)
    spec = _spec(service, settings, {"containers": [engine]})
    # The first pod has drained when they are ended; the next group waits until they are gone.
    return {**spec, "terminationGracePeriodSeconds": _HUNG_GRACE_SECONDS}


def _spec(service: InferenceService, settings: Settings, containers: Manifest) -> Manifest:
    """A pod's spec, with the volumes that its containers mount."""
    hardware = service.spec.hardware
    spec = bare_spec(settings, grace_seconds(service), containers, _volumes(service, settings))
    if hardware.node_selector:
        spec["nodeSelector"] = dict(hardware.node_selector)
    if hardware.tolerations:
        spec["tolerations"] = [toleration.manifest() for toleration in hardware.tolerations]
    if hardware.runtime_class_name:
        spec["runtimeClassName"] = hardware.runtime_class_name
    return spec


def bare_spec(
    settings: Settings, grace_s: int, containers: Manifest, volumes: Sequence[Volume]
) -> Manifest:
    """A spec that Pod Security `restricted` takes, with the volumes that are mounted. `grace_s`:
    seconds to leave in."""
    mounts = [m for each in containers.values() for one in each for m in one["volumeMounts"]]
    mounted = {mount["name"] for mount in mounts}
    return {
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": grace_s,
        "securityContext": {
            "runAsNonRoot": True,
            **_user(settings),
            "fsGroupChangePolicy": "OnRootMismatch",  # not a walk over a large cache at each start
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        **containers,
        "volumes": [{"name": name, **source} for name, source, _ in volumes if name in mounted],
    }


def sidecar_spec(
    service: InferenceService,
    settings: Settings,
    ceiling: int | None,
    commit: str,
    held: Manifest,
    client: Manifest,
) -> Manifest:
    """`spec` of a pod in which all of `pod_spec` serves one container, `client`, and ends with it.
    The client starts once the engine is ready."""
    made = _containers(service, settings, ceiling, commit, held)
    [front] = made["containers"]
    started = _probe("/readyz", "http", period=2, failures=_LOADED_S // 2)
    sidecar = {**front, "restartPolicy": "Always", "startupProbe": started}
    del sidecar["readinessProbe"]
    first = [*made.get("initContainers", []), sidecar]
    return _spec(service, settings, {"initContainers": first, "containers": [client]})


def held(service: InferenceService, loading_bytes: int, disk_bytes: int) -> Manifest:
    """Resources of the container that loads the model, which may have to fetch it first."""
    model, hardware = service.spec.model, service.spec.hardware
    fetched_bytes = disk_bytes if model.repo and model.cache is None else 0
    return {
        "limits": resources.limits(hardware),
        "requests": resources.requests(hardware, loading_bytes, fetched_bytes),
    }


def metadata_annotations(service: InferenceService) -> dict[str, str]:
    """An autoscaler of nodes would keep a node because of our scratch files. A mesh that asks for
    its own certificates would keep the operator from the admin port."""
    scratch = [name for name, source, _ in _storage(service) if "emptyDir" in source]
    return {
        "cluster-autoscaler.kubernetes.io/safe-to-evict-local-volumes": ",".join(scratch),
        "traffic.sidecar.istio.io/excludeInboundPorts": str(ADMIN_PORT),
    }


def _user(settings: Settings) -> dict[str, int]:
    """OpenShift's `restricted-v2` gives each namespace a range, and refuses any other user."""
    if settings.assigned_user:
        return {}
    return {"runAsUser": _USER, "runAsGroup": _USER, "fsGroup": _USER}


def grace_seconds(service: InferenceService) -> int:
    """Seconds that a pod may take to leave."""
    return DELAY_SECONDS + math.ceil(service.spec.drain.timeout_s) + GRACE_MARGIN_SECONDS


def _containers(
    service: InferenceService,
    settings: Settings,
    ceiling: int | None,
    commit: str,
    held: Manifest,
) -> Manifest:
    """Our worker alone, or a gate beside an engine, which is the sidecar: it starts first, and gets
    SIGTERM when the gate has drained and ended (KEP-753)."""
    if service.spec.engine.name == "Sluice":
        image, arguments = (
            image_of(service.spec.engine, settings),
            _arguments(service, ceiling, commit),
        )
        told = {
            **_command(service.spec.engine.command),
            "args": arguments,
            "env": _worker_environment(service, settings),
        }
        return {"containers": [_front(service, settings, "worker", image, told, held, "http")]}
    capacity = ceiling or FOREIGN[service.spec.engine.name].capacity
    told = {
        "command": ["sluice-gate"],
        "args": _gate_arguments(service, capacity),
        "env": own_environment(),
    }
    gate_held = {
        "limits": {
            "cpu": _GATE_CPU,
            "memory": resources.bytes_quantity(gate_bytes(service)),
        },
        "requests": _GATE_REQUESTS,
    }
    probed = "http" if service.is_offline else "admin"
    gate = _front(service, settings, "gate", settings.gate_image, told, gate_held, probed)
    engine = _engine(service, settings, capacity, commit, held)
    first = _gate_image(service, settings)
    return {"initContainers": [first, engine], "containers": [gate]}


def _front(
    service: InferenceService,
    settings: Settings,
    name: str,
    image: str,
    told: Manifest,
    held: Manifest,
    probed: str,
) -> Manifest:
    """The container that clients reach. `probed`: name of the port that the kubelet asks."""
    is_gate = name == "gate"
    # Any answer means that a gate's loop turns. Its engine is no reason to restart it.
    alive = "/version" if is_gate else "/healthz"
    grace = {"terminationGracePeriodSeconds": _HUNG_GRACE_SECONDS} if is_gate else {}
    return {
        "name": name,
        "image": image,
        "imagePullPolicy": settings.image_pull_policy,
        **told,
        "ports": [
            {"name": "http", "containerPort": API_PORT, "protocol": "TCP"},
            {"name": "admin", "containerPort": ADMIN_PORT, "protocol": "TCP"},
        ],
        "resources": held,
        "securityContext": {**UNPRIVILEGED, "readOnlyRootFilesystem": True},
        "startupProbe": _probe(alive, probed, period=2, failures=900),
        "livenessProbe": {**_probe(alive, probed, period=10, failures=3), **grace},
        "readinessProbe": _probe("/readyz", probed, period=2, failures=2),
        # For an end without a message: the worker writes why it ends, for our status, if it can.
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "volumeMounts": _mounts(service, settings, name),
    }


def image_of(engine: EngineSpec, settings: Settings) -> str:
    """Return the image that the object names, else the installation's, else the engine's own."""
    if engine.image:
        return engine.image
    if engine.name == "Sluice":
        return settings.worker_image
    return dict(settings.engine_images).get(engine.name) or FOREIGN[engine.name].image


def _engine(
    service: InferenceService,
    settings: Settings,
    capacity: int,
    commit: str,
    held: Manifest,
    *,
    follows: bool = False,
) -> Manifest:
    """The engine of another maker. Beside a gate it is the sidecar. A hung one is ended by its own
    probe, which asks the gate: a restart of the gate would not help. The gate answers 200 while the
    engine starts, however long that takes. Five failures leave a gate that ends the time to be
    started again. `follows`: it has no gate, but the first pod's engine."""
    spec, run = service.spec, _invocation(service, capacity, commit, follows=follows)
    own = [{"name": name, "value": value} for name, value in run.env.items()]
    given = {one.name: one.manifest() for one in spec.engine.env}
    taken = {*given, *_other_spellings(given)}
    home = [{"name": "HF_HOME", "value": _CACHE_MOUNT}] if spec.model.repo else []
    hub = _hub_environment(service, settings)
    ours = [*_environment(service), _USER_NAME, *home, *hub, *own, *_admin_key(service)]
    alive = {
        **_probe("/healthz", API_PORT if service.is_offline else ADMIN_PORT, period=10, failures=5),
        "initialDelaySeconds": _GATE_START_S,
        "terminationGracePeriodSeconds": _HUNG_GRACE_SECONDS,
    }
    return {
        "name": "engine",
        "image": image_of(spec.engine, settings),
        "imagePullPolicy": settings.image_pull_policy,
        **({} if follows else {"restartPolicy": "Always"}),
        **_command(spec.engine.command or run.command),
        "args": [*run.args, *spec.engine.args, *run.owned],
        # A variable that is there twice is refused by the API server.
        "env": [*(one for one in ours if one["name"] not in taken), *given.values()],
        "resources": held,
        "securityContext": dict(UNPRIVILEGED),  # these images write beside their programs
        **({} if follows else {"livenessProbe": alive}),
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "volumeMounts": _mounts(service, settings, FOLLOWER if follows else "engine"),
    }


def _command(program: Sequence[str]) -> Manifest:
    """Nothing where the image's own entry point runs."""
    return {"command": list(program)} if program else {}


def _invocation(
    service: InferenceService, capacity: int, commit: str, *, follows: bool
) -> Invocation:
    spec, model, hardware = service.spec, service.spec.model, service.spec.hardware
    engine = FOREIGN[spec.engine.name]
    is_split = engine.splits(spec.engine.args)
    group = Group(hardware.nodes, _RANK, _LEADER, follows) if hardware.nodes > 1 else None
    start = Start(
        model=model.repo or _model_directory(model),
        name=model.name,
        capacity=capacity,
        is_hub=model.repo is not None,
        revision=commit or model.revision,
        cache=_CACHE_MOUNT,
        budget=spec.batching.max_num_batched_tokens,
        max_model_len=model.max_model_len or engine.slot_tokens,
        dtype=model.dtype,
        utilization=spec.batching.memory_utilization,
        prefix_caching=spec.batching.prefix_caching,
        accelerator=hardware.accelerator,
        inside=Inside(PACKAGES_DIR, SOCKET) if _has_scheduler(service) and not follows else None,
        tensor=hardware.num_gpus if hardware.num_gpus > 1 and not is_split else None,
        pipeline=hardware.nodes if hardware.nodes > 1 and not is_split else None,
        group=group,
    )
    return engine.invoke(start)


def _admin_key(service: InferenceService) -> list[Manifest]:
    if not takes_admin_key(service):
        return []
    source = {"secretKeyRef": {"name": secret_name(service), "key": ENGINE_KEY}}
    return [{"name": ADMIN_KEY, "valueFrom": source}]


def takes_admin_key(service: InferenceService) -> bool:
    """Whether the gate sets a cap inside the engine with a key."""
    engine = FOREIGN.get(service.spec.engine.name)
    return engine is not None and engine.takes_admin_key and not service.is_offline


def _gate_image(service: InferenceService, settings: Settings) -> Manifest:
    """The container that brings the gate's image to the node before the engine starts, because the
    engine's probe asks the gate. In vLLM's pod it brings our scheduler class too."""
    command, mounts = ["true"], []
    if _has_scheduler(service):
        sources = [f"{_PACKAGES_FROM}/{name}" for name in PACKAGES]
        command = ["cp", "-r", *sources, PACKAGES_DIR]
        mounts = [{"name": "packages", "mountPath": PACKAGES_DIR}]
    return {
        "name": "scheduler" if mounts else "gate-image",
        "image": settings.gate_image,
        "imagePullPolicy": settings.image_pull_policy,
        "command": command,
        "resources": {
            "limits": {"cpu": _GATE_CPU, "memory": "512Mi"},
            "requests": _GATE_REQUESTS,
        },
        "securityContext": {**UNPRIVILEGED, "readOnlyRootFilesystem": True},
        "volumeMounts": mounts,
    }


_FOR = {
    "admin": ("worker", "gate"),
    "runtime": ("worker", "gate"),
    "keys": ("worker", "gate"),
    "batches": ("worker", "gate"),
    "models": ("worker", "engine", FOLLOWER),
    "cache": ("worker", "engine", FOLLOWER),
    "ca": ("worker", "engine", FOLLOWER),
    "packages": ("engine",),
    "socket": ("gate", "engine"),
    "shm": ("engine", FOLLOWER),
    "tmp-gate": ("gate",),
    "tmp": ("worker", "engine", FOLLOWER),
}
"""Containers that mount a volume. An engine never sees the gate's secrets."""


def _mounts(service: InferenceService, settings: Settings, container: str) -> list[Manifest]:
    return [
        {"name": name, **mount}
        for name, _, mount in _volumes(service, settings)
        if container in _FOR[name]
    ]


def _probe(path: str, port: str | int, *, period: int, failures: int) -> Manifest:
    return {
        "httpGet": {"path": path, "port": port},
        "periodSeconds": period,
        "timeoutSeconds": 5,
        "failureThreshold": failures,
    }


def _environment(service: InferenceService) -> list[Manifest]:
    # More threads than the quota carries are only throttled: 4 ms steps had an ITL P99 of 54 ms.
    threads = max(service.spec.hardware.cpu_millis // 1000, 1)
    return [_HOME, {"name": "OMP_NUM_THREADS", "value": str(threads)}]


def _worker_environment(service: InferenceService, settings: Settings) -> list[Manifest]:
    return [*_environment(service), _LAST_WORDS, *_hub_environment(service, settings)]


def own_environment() -> list[Manifest]:
    """Variables of every program of ours."""
    return [_HOME, _LAST_WORDS]


def _hub_environment(service: InferenceService, settings: Settings) -> list[Manifest]:
    """The hub, its proxy, and the token from the Secret: no manifest of ours holds the token."""
    model = service.spec.model
    if model.repo is None:
        return []
    environment: list[Manifest] = [{"name": "HF_ENDPOINT", "value": settings.hub_endpoint}]
    if settings.hub_proxy:
        proxies = {"HTTPS_PROXY": settings.hub_proxy, "HTTP_PROXY": settings.hub_proxy}
        for name, value in {**proxies, "NO_PROXY": _OWN_HOSTS}.items():
            environment += [{"name": one, "value": value} for one in (name, name.lower())]
    if settings.hub_authorities:
        file = f"{_AUTHORITIES_DIR}/{_AUTHORITIES}"
        environment.append({"name": "SSL_CERT_FILE", "value": file})  # replaces httpx's public ones
    if model.secret_ref is not None:
        source = {
            "secretKeyRef": {"name": model.secret_ref.name, "key": model.secret_ref.token_key}
        }
        environment.append({"name": "HF_TOKEN", "valueFrom": source})
    return environment


def _other_spellings(given: Collection[str]) -> set[str]:
    """Of the proxy's variables that the user gives: ours in the other one would win over it."""
    return {one.swapcase() for one in given if one.upper().endswith("_PROXY")}


def _storage(service: InferenceService) -> list[Volume]:
    """Volumes that an object's pods need on any node."""
    keys, (claim, _) = service.spec.api_key_secret_ref, _claim(service.spec.model)
    storage: list[Volume] = [("tmp", {"emptyDir": {}}, {"mountPath": "/tmp"})]  # noqa: S108
    if not service.is_offline:
        secret, runtime = {"secretName": secret_name(service)}, {"name": runtime_name(service.name)}
        storage.append(("admin", {"secret": secret}, read_only(_ADMIN_DIR)))
        storage.append(("runtime", {"configMap": runtime}, read_only(_RUNTIME_DIR)))
    if keys:
        # Required: without it pods wait instead of ending. The image needs no other keys.
        chosen = {"secretName": keys.name, "items": [{"key": KEYS, "path": KEYS}]}
        storage.append(("keys", {"secret": chosen}, read_only(KEYS_DIR)))
    if service.spec.batches:
        kept = {"persistentVolumeClaim": {"claimName": service.spec.batches.claim_name}}
        storage.append(("batches", kept, {"mountPath": _BATCHES_DIR}))
    if claim:
        source = {"claimName": claim, "readOnly": True}
        storage.append(("models", {"persistentVolumeClaim": source}, read_only(_CLAIM_MOUNT)))
    if service.spec.model.repo or service.spec.engine.name == "Ollama":
        storage.append(("cache", _cache(service), {"mountPath": _CACHE_MOUNT}))
    if service.spec.engine.name != "Sluice":
        storage.append(("tmp-gate", {"emptyDir": {}}, {"mountPath": "/tmp"}))  # noqa: S108
    if service.spec.hardware.is_spread and not _mounts_shared_memory(service):
        shared = {"emptyDir": {"medium": "Memory"}}
        storage.append(("shm", shared, {"mountPath": _SHARED_MEMORY}))
    if _has_scheduler(service):
        storage.append(("packages", {"emptyDir": {}}, read_only(PACKAGES_DIR)))
        storage.append(("socket", {"emptyDir": {}}, {"mountPath": SOCKET_DIR}))
    return storage


def _mounts_shared_memory(service: InferenceService) -> bool:
    """True if the object's overlay mounts it somewhere, whatever its form."""
    return f'"{_SHARED_MEMORY}"' in json.dumps(to_builtins(service.spec.pod_template))


def _has_scheduler(service: InferenceService) -> bool:
    """Whether a scheduler class of ours runs inside the engine."""
    engine = FOREIGN.get(service.spec.engine.name)
    return engine is not None and engine.loads_scheduler(service.spec.engine.args)


def _volumes(service: InferenceService, settings: Settings) -> list[Volume]:
    """All volumes of a pod: also a hub's certificate authorities, if they are not the public
    ones."""
    volumes = _storage(service)
    if service.spec.model.repo and settings.hub_authorities:
        name, key = settings.hub_authorities
        source = {"name": name, "items": [{"key": key, "path": _AUTHORITIES}]}
        volumes.append(("ca", {"configMap": source}, read_only(_AUTHORITIES_DIR)))
    return volumes


def read_only(path: str) -> Manifest:
    """A mount."""
    return {"mountPath": path, "readOnly": True}


def _cache(service: InferenceService) -> Manifest:
    """Storage of a hub's files: the object's claim, which pods may share, or the pod's own disk."""
    cache = service.spec.model.cache
    if cache is None:
        return {"emptyDir": {}}
    return {"persistentVolumeClaim": {"claimName": cache.pvc}}


def _claim(model: Model) -> tuple[str, str]:
    """Claim and path of a pvc:// model, empty for others."""
    claim, _, path = model.uri.removeprefix("pvc://").partition("/")
    return (claim, path.rstrip("/")) if model.scheme == "pvc" else ("", "")


def _model_directory(model: Model) -> str:
    claim, path = _claim(model)
    if claim:
        return f"{_CLAIM_MOUNT}/{path}" if path else _CLAIM_MOUNT
    return model.directory or model.uri


def _arguments(service: InferenceService, ceiling: int | None, commit: str) -> list[str]:
    """The worker's flags, as a list: nothing from the object is ever parsed by a shell."""
    spec, model = service.spec, service.spec.model
    is_hub = model.repo is not None
    start = {
        "model": _model_directory(model),
        "revision": commit or model.revision if is_hub else None,
        "download-dir": _CACHE_MOUNT if is_hub else None,
    }
    told = worker_flags(spec, start, _door(service), _frontend(service), ceiling)
    return [*told, *spec.engine.args]


def _door(service: InferenceService) -> dict[str, object]:
    """What clients reach, of a worker and of a gate."""
    name = service.spec.model.name
    return {"served-model-name": name, "host": "", "port": API_PORT, "admin-port": ADMIN_PORT}


def _frontend(service: InferenceService) -> dict[str, object]:
    """Files and times of a worker and of a gate."""
    spec, api = service.spec, service.spec.api
    tuned = {"admin-token-file": f"{_ADMIN_DIR}/token", "runtime-config-dir": _RUNTIME_DIR}
    return {
        "max-body-bytes": _body_bytes(service),
        "keep-alive-timeout": None if api.keep_alive_s is None else f"{api.keep_alive_s:g}",
        "trusted-proxies": json.dumps(api.trusted_proxies) if api.trusted_proxies else None,
        "api-key-file": f"{KEYS_DIR}/{KEYS}" if spec.api_key_secret_ref else None,
        **(dict.fromkeys(tuned) if service.is_offline else tuned),
        "batch-dir": _BATCHES_DIR if spec.batches else None,
        "shutdown-delay": 0 if service.is_offline else DELAY_SECONDS,
        "shutdown-timeout": f"{spec.drain.timeout_s:g}",
    }


def _gate_arguments(service: InferenceService, capacity: int) -> list[str]:
    spec, has_key = service.spec, takes_admin_key(service)
    given = flags(
        {
            "upstream": f"http://{LOOPBACK}:{spec.engine.port or PORT}",
            "engine": FOREIGN[spec.engine.name].name,
            "max-num-seqs": capacity,
            "max-num-batched-tokens": spec.batching.max_num_batched_tokens,
            "health-path": spec.engine.health_path,
            "engine-socket": SOCKET if _has_scheduler(service) else None,
            "engine-admin-key-file": f"{_ADMIN_DIR}/{ENGINE_KEY}" if has_key else None,
            "served-file": _SERVED_FILE,
            "memory-bytes": _BODIES_HELD * _largest_body(service),
            **_door(service),
            **_frontend(service),
        }
    )
    return list(given)


def gate_bytes(service: InferenceService) -> int:
    """Memory that a gate may take."""
    return _GATE_BYTES + (_BODIES_HELD + _BODIES_READ) * _largest_body(service)


def _largest_body(service: InferenceService) -> int:
    return max(_body_bytes(service) or 0, _LEAST_BODY_BYTES)


def _body_bytes(service: InferenceService) -> int | None:
    """Bytes of the largest body; None leaves it to our worker."""
    default = None if service.spec.engine.name == "Sluice" else _GATE_BODY_BYTES
    return service.spec.api.max_body_bytes or default
