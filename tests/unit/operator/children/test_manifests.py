"""Claims on the children's manifests."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from sluice_core.contract import Slo
from sluice_operator.children import manifests, pod, resources
from sluice_operator.children.runtime import DecidedRuntime
from sluice_operator.settings import Settings
from unit.operator.observations import SETTINGS, create_service
from unit.worker.api.tiny import write_checkpoint


def _deployment(live: Any = None, *, ceiling: int | None = 32, **changes: Any) -> dict[str, Any]:
    told = ("is_unread", "is_pending", "commit")
    known = {name: changes.pop(name) for name in told if name in changes}
    service = create_service(**changes)
    known = {"ceiling": ceiling, "loading_bytes": 4 << 30, "replicas": 1, **known}
    return manifests.workload(service, SETTINGS, live=live, **known)


def _pod(**changes: Any) -> dict[str, Any]:
    spec: dict[str, Any] = _deployment(**changes)["spec"]["template"]["spec"]
    return spec


def _container(**changes: Any) -> dict[str, Any]:
    container: dict[str, Any] = _pod(**changes)["containers"][0]
    return container


def test_every_child_is_owned_by_the_object_and_named_after_it() -> None:
    service = create_service()
    made = [
        manifests.configmap(service, SETTINGS, DecidedRuntime(1, 4, 1)),
        manifests.secret(service, "token"),
        manifests.kube_service(service),
        manifests.disruption_budget(service),
        _deployment(),
    ]
    for manifest in made:
        meta = manifest["metadata"]
        assert meta["name"].startswith("demo")
        assert meta["ownerReferences"][0]["uid"] == "uid-1"
        assert meta["ownerReferences"][0]["controller"] is True


def test_pods_satisfy_pod_security_restricted() -> None:
    pod, container = _pod(), _container()
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert pod["automountServiceAccountToken"] is False
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }


def test_a_worker_is_told_where_its_last_sentence_goes_and_the_log_stands_in_for_none() -> None:
    container = _container()
    word = {"name": "SLUICE_TERMINATION_LOG", "value": "/dev/termination-log"}
    assert word in container["env"]
    assert "terminationMessagePath" not in container  # which is that file by default
    assert container["terminationMessagePolicy"] == "FallbackToLogsOnError"


def test_a_leaving_pod_has_time_for_endpoints_drain_and_exit() -> None:
    pod = _pod(drain__timeout="45s")
    [container] = pod["containers"]
    assert "lifecycle" not in container, "a hook would keep from the worker that it leaves"
    assert {"--shutdown-delay=5", "--shutdown-timeout=45"} <= set(container["args"])
    assert pod["terminationGracePeriodSeconds"] >= 5 + 45 + 10


def test_a_pod_is_restarted_where_that_helps_and_left_alone_while_it_loads() -> None:
    """It has half an hour to begin to listen; then half a minute, and 4 s for its readiness."""
    container = _container()
    [port] = [one["containerPort"] for one in container["ports"] if one["name"] == "http"]
    assert f"--port={port}" in container["args"]
    asked = {
        name.removesuffix("Probe"): (
            probe["httpGet"],
            probe["periodSeconds"] * probe["failureThreshold"],
            probe["timeoutSeconds"],
        )
        for name, probe in container.items()
        if name.endswith("Probe")
    }
    alive, ready = ({"path": path, "port": "http"} for path in ("/healthz", "/readyz"))
    assert asked == {
        "startup": (alive, 1800, 5), "liveness": (alive, 30, 5), "readiness": (ready, 4, 5),
    }  # fmt: skip


def test_no_pod_goes_before_its_successor_is_ready() -> None:
    rolling = _deployment()["spec"]["strategy"]["rollingUpdate"]
    assert rolling == {"maxUnavailable": 0, "maxSurge": 1}


def test_where_all_room_is_taken_a_pod_goes_first() -> None:
    """Surge waits for ever on a cluster whose GPUs are all in use; the change restarts no pod."""
    surge = _deployment()
    replace = _deployment(surge, rollout="Replace")
    assert replace["spec"]["strategy"]["rollingUpdate"] == {"maxUnavailable": 1, "maxSurge": 0}
    assert replace["spec"]["template"] == surge["spec"]["template"]


def test_a_model_of_the_hub_may_take_hours_to_come() -> None:
    ours, hub = _deployment(), _deployment(model=HUB)
    assert ours["spec"]["progressDeadlineSeconds"] == 1800
    assert hub["spec"]["progressDeadlineSeconds"] == 6 * 3600


def test_autoscalers_and_meshes_are_told_what_a_pod_allows_and_older_pods_stay() -> None:
    def told(made: dict[str, Any]) -> dict[str, str]:
        annotations: dict[str, str] = made["spec"]["template"]["metadata"]["annotations"]
        return {name.rpartition("/")[2]: text for name, text in annotations.items()}

    made = _deployment(model=HUB)
    scratch = "safe-to-evict-local-volumes"
    assert told(made) == {scratch: "tmp,cache", "excludeInboundPorts": "8001"}
    assert told(_deployment(model={**HUB, "cache": {"pvc": "models"}}))[scratch] == "tmp"
    before = json.loads(json.dumps(made))
    template = before["spec"]["template"]
    del template["metadata"]["annotations"]
    before["metadata"]["annotations"][manifests.TEMPLATE_ANNOTATION] = json.dumps(template)
    assert _deployment(before, model=HUB)["spec"]["template"] == template


def test_user_and_groups_are_left_to_the_cluster_where_it_assigns_them() -> None:
    """New pods then, as those of before are refused; and none for who does not ask for it."""
    assigned = dataclasses.replace(SETTINGS, assigned_user=True)
    live, service = _deployment(), create_service()
    made = manifests.workload(service, assigned, ceiling=32, replicas=1, live=live)
    context = made["spec"]["template"]["spec"]["securityContext"]
    assert context["runAsNonRoot"] is True
    assert not {"runAsUser", "runAsGroup", "fsGroup"} & context.keys()
    ours = live["spec"]["template"]["spec"]["securityContext"]
    assert {ours[name] for name in ("runAsUser", "runAsGroup", "fsGroup")} == {65532}


def test_cpu_pod_is_limited_to_what_the_model_was_planned_into() -> None:
    asked = _container(hardware__memory="1536Mi", hardware__cpu="500m")["resources"]
    assert asked["limits"] == {"cpu": "500m", "memory": "1536Mi"}
    assert asked["limits"] == asked["requests"]


_GPU: dict[str, Any] = {"hardware__accelerator": "nvidia", "hardware__memory": "24Gi"}


def test_gpu_pod_asks_for_the_gpu_and_for_the_memory_that_loading_needs() -> None:
    container = _container(**_GPU)
    asked = {"cpu": "500m", "nvidia.com/gpu": "1"}
    assert container["resources"]["limits"] == asked
    assert container["resources"]["requests"] == {**asked, "memory": "4Gi"}
    assert "--device=cuda" in container["args"]


def test_a_worker_plans_with_the_gpu_memory_that_the_object_names() -> None:
    """Also where the card has more: it may be shared, and the operator planned with the same."""
    assert "--gpu-memory-bytes=25769803776" in _container(**_GPU)["args"]
    assert not any(word.startswith("--gpu-memory-bytes") for word in _container()["args"])
    made, less = _deployment(**_GPU), {**_GPU, "hardware__memory": "10Gi"}
    edited = _deployment(made, **less)["spec"]["template"]["spec"]["containers"][0]
    assert "--gpu-memory-bytes=10737418240" in edited["args"]


def test_a_pod_waits_for_the_keys_of_its_api_instead_of_ending_without_them() -> None:
    pod = _pod(apiKeySecretRef={"name": "demo-keys"})
    assert "--api-key-file=/etc/sluice/keys/keys" in pod["containers"][0]["args"]
    [mount] = [m for m in pod["containers"][0]["volumeMounts"] if m["name"] == "keys"]
    assert (mount["mountPath"], mount["readOnly"]) == ("/etc/sluice/keys", True)
    [volume] = [v for v in pod["volumes"] if v["name"] == "keys"]
    items = [{"key": "keys", "path": "keys"}]  # and nothing else that the Secret may hold
    assert volume["secret"] == {"secretName": "demo-keys", "items": items}
    assert "keys" not in [volume["name"] for volume in _pod()["volumes"]]


def test_a_lock_on_the_api_takes_new_pods() -> None:
    made = _deployment()
    locked = _deployment(made, apiKeySecretRef={"name": "demo-keys"})
    assert locked["spec"]["template"] != made["spec"]["template"]


@pytest.mark.parametrize(("accelerator", "cpu"), [("nvidia", "2"), ("cpu", "1")])
def test_a_pod_with_a_gpu_has_a_cpu_for_each_of_its_processes(accelerator: str, cpu: str) -> None:
    asked = _container(hardware={"accelerator": accelerator, "memory": "24Gi"})["resources"]
    assert asked["limits"]["cpu"] == asked["requests"]["cpu"] == cpu


def test_memory_beside_a_gpu_is_request_and_limit_where_it_is_given() -> None:
    asked = _container(**_GPU, hardware__hostMemory="10Gi")["resources"]
    assert asked["limits"] == {"cpu": "500m", "nvidia.com/gpu": "1", "memory": "10Gi"}
    assert asked["limits"] == asked["requests"]


def test_pods_that_were_made_without_a_request_stay() -> None:
    """An operator that asks for memory restarts none of an older one's; an edit makes new ones."""
    made = _deployment(**_GPU)
    annotations, container = made["metadata"]["annotations"], _container(**_GPU)
    del container["resources"]["requests"]["memory"]
    template = {"spec": {"containers": [container]}}
    annotations["sluice.dev/template"] = json.dumps(template)
    assert _deployment(made, **_GPU)["spec"]["template"] == template
    edited = _deployment(made, **_GPU, hardware__hostMemory="10Gi")
    assert edited["spec"]["template"] != template


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (1 << 30, "1Gi"),
        (1536 << 20, "1536Mi"),
        (1_500_000_000, "1500M"),
        (3 << 40, "3Ti"),
        (1_000_000_001, "1000000001"),
    ],
)
def test_bytes_are_spelled_as_the_api_server_spells_them(num_bytes: int, text: str) -> None:
    assert resources.bytes_quantity(num_bytes) == text


def test_whole_cpus_are_spelled_without_millis() -> None:
    assert resources.cpu_quantity(2000) == "2"
    assert resources.cpu_quantity(1500) == "1500m"


@pytest.mark.parametrize(
    "change",
    [
        {"slo__timeToFirstToken": "900ms"},
        {"slo__overload": "Shed"},
        {"scaling__maxReplicas": 3},
        {"batching__minNumSeqs": 2},
        {"batching__initialNumSeqs": 2},
        {"replicas": 2},
    ],
)
def test_targets_bounds_and_replicas_restart_no_pod(change: dict[str, Any]) -> None:
    assert _deployment(**change)["spec"]["template"] == _deployment()["spec"]["template"]


def test_another_model_restarts_pods() -> None:
    other = _deployment(model__uri="file:///models/other")
    assert other["spec"]["template"] != _deployment()["spec"]["template"]


def test_what_an_upgraded_operator_asks_of_a_pod_has_the_hash_that_it_had() -> None:
    """Another hash restarts the pods of all objects: what is new counts where it is set only."""
    inputs = _deployment()["metadata"]["annotations"][manifests.TEMPLATE_INPUTS_ANNOTATION]
    assert inputs == "7e53282d8cb63681"


def test_an_upgraded_operator_keeps_the_template_of_an_unchanged_object() -> None:
    live = json.loads(json.dumps(_deployment()))
    old = {"metadata": {"labels": {}}, "spec": {"containers": ["as an older operator made it"]}}
    live["metadata"]["annotations"][manifests.TEMPLATE_ANNOTATION] = json.dumps(old)
    assert _deployment(live)["spec"]["template"] == old
    assert _deployment(live, model__dtype="bfloat16")["spec"]["template"] != old


@pytest.mark.parametrize(("started", "ceiling"), [(16, 1), (16, 16), (None, 8), (None, None)])
def test_a_lower_ceiling_than_the_pods_started_with_restarts_none(
    started: int | None, ceiling: int | None
) -> None:
    live = _deployment(ceiling=started)
    lowered = _deployment(live, ceiling=ceiling, batching__maxNumSeqs=ceiling or "Auto")
    assert lowered["spec"]["template"] == live["spec"]["template"]
    lifted = _deployment(lowered, ceiling=started)
    assert lifted == live


def test_a_higher_ceiling_takes_new_pods() -> None:
    live = _deployment(ceiling=16, batching__maxNumSeqs=16)
    more = _deployment(live, ceiling=17, batching__maxNumSeqs=17)
    assert more["spec"]["template"] != live["spec"]["template"]
    sized_by_itself = _deployment(ceiling=None)
    beyond = _deployment(sized_by_itself, ceiling=1024, batching__maxNumSeqs=1024)
    assert beyond["spec"]["template"] != sized_by_itself["spec"]["template"]
    on_gpu = {"hardware__accelerator": "nvidia"}
    live = _deployment(ceiling=16, hardware__memory="24Gi", **on_gpu)
    more = _deployment(live, ceiling=99, hardware__memory="80Gi", **on_gpu)
    assert more["spec"]["template"] != live["spec"]["template"]


def test_room_for_more_that_nobody_asked_for_takes_none() -> None:
    live = _deployment(ceiling=16)
    assert _deployment(live, ceiling=17)["spec"]["template"] == live["spec"]["template"]


def test_a_model_that_cannot_be_read_just_now_takes_none() -> None:
    """An operator that restarts while the hub is away knows neither ceiling nor commit."""
    live = _deployment(ceiling=16)
    unread = _deployment(live, ceiling=None, is_unread=True)
    assert unread["spec"]["template"] == live["spec"]["template"]
    asked = _deployment(ceiling=16, batching__maxNumSeqs=128)
    unread = _deployment(asked, ceiling=128, batching__maxNumSeqs=128, is_unread=True)
    assert unread["spec"]["template"] == asked["spec"]["template"]
    lifted = _deployment(asked, ceiling=None, is_unread=True)
    assert lifted["spec"]["template"] != asked["spec"]["template"]


def test_new_pods_run_the_known_commit_while_the_hub_is_away() -> None:
    """An edit takes new pods then: they size themselves, and load what the others have."""
    asked = {"model__uri": "hf://org/model", "model__revision": "main"}
    live = _deployment(ceiling=16, commit="c0ffee", **asked)
    edited = _deployment(live, ceiling=None, is_unread=True, engine__args=["--seed=1"], **asked)
    args = edited["spec"]["template"]["spec"]["containers"][0]["args"]
    assert "--revision=c0ffee" in args
    assert "--seed=1" in args
    moved = _deployment(edited, ceiling=16, commit="decade", engine__args=["--seed=1"], **asked)
    assert moved["spec"]["template"] == edited["spec"]["template"]
    still = _deployment(moved, ceiling=None, is_unread=True, **asked)
    assert "--revision=c0ffee" in still["spec"]["template"]["spec"]["containers"][0]["args"]
    other = {**asked, "model__uri": "hf://org/other"}
    another = _deployment(live, ceiling=None, is_unread=True, **other)
    assert "--revision=main" in another["spec"]["template"]["spec"]["containers"][0]["args"]


def test_while_a_model_is_being_read_what_serves_stays() -> None:
    live = _deployment(ceiling=16)
    another = {"model__uri": "hf://org/other", "batching__maxNumSeqs": 128}
    pending = _deployment(live, ceiling=128, is_unread=True, is_pending=True, **another)
    assert pending == live
    read = _deployment(pending, ceiling=8, **another)
    assert read["spec"]["template"] != live["spec"]["template"]
    assert "--max-num-seqs=8" in read["spec"]["template"]["spec"]["containers"][0]["args"]


def test_the_targets_are_where_a_starting_worker_reads_them(tmp_path: Path) -> None:
    """It predicts its first cap for them; the object's edits restart no pod."""
    from sluice_worker.base import config

    changes = {"slo__overload": "Shed", "slo__interTokenLatency": "40ms", "slo__holdShare": "0.25"}
    service = create_service(**changes)
    data = manifests.configmap(service, SETTINGS, DecidedRuntime(3, 7, 1))["data"]
    for name, text in data.items():
        (tmp_path / name).write_text(text)
    model = write_checkpoint(tmp_path / "model")
    given = ("--model", str(model), "--runtime-config-dir", str(tmp_path))
    worker = config.parse([*given, "--load-format", "dummy", "--slo-itl-ms", "1000"])
    assert worker.server.slo == Slo(500.0, 40.0)
    assert worker.server.overload == "Shed"
    assert worker.engine.scheduling_policy == "deadline"
    assert (worker.engine.itl_ms, worker.engine.epoch) == (40.0, 3)
    assert (worker.engine.initial_num_seqs, worker.engine.hold_share) == (7, 0.25)


def test_a_new_default_image_reaches_the_pods() -> None:
    live = _deployment()
    newer = dataclasses.replace(SETTINGS, worker_image="registry/worker:2")
    made = manifests.workload(create_service(), newer, ceiling=32, replicas=1, live=live)
    assert made["spec"]["template"]["spec"]["containers"][0]["image"] == "registry/worker:2"


@pytest.mark.parametrize("spoilt", ["", "{", "[]", "null"])
def test_a_spoilt_template_annotation_is_made_anew(spoilt: str) -> None:
    live = json.loads(json.dumps(_deployment()))
    live["metadata"]["annotations"][manifests.TEMPLATE_ANNOTATION] = spoilt
    assert _deployment(live) == _deployment()


def test_a_volume_claim_is_mounted_read_only_and_served_from_its_path() -> None:
    pod = _pod(model__uri="pvc://models/llama/8b")
    volume = pod["volumes"][-1]["persistentVolumeClaim"]
    assert volume == {"claimName": "models", "readOnly": True}
    assert "--model=/mnt/models/llama/8b" in pod["containers"][0]["args"]


def test_worker_sizes_itself_where_no_ceiling_is_known() -> None:
    arguments = _container(ceiling=None)["args"]
    assert not any(argument.startswith("--max-num-seqs") for argument in arguments)


def test_advice_sheds_nothing() -> None:
    service = create_service(slo__overload="Shed", slo__mode="Advisory")
    data = manifests.configmap(service, SETTINGS, DecidedRuntime(1, 4, 1))["data"]
    assert (data["slo_ttft_ms"], data["overload"]) == ("500.0", "Queue")


@pytest.mark.parametrize(
    ("changes", "policy"),
    [
        ({}, "deadline"),
        ({"batching__order": "FCFS"}, "fcfs"),
        ({"slo": {"interTokenLatency": "50ms"}}, "fcfs"),
        ({"slo__mode": "Advisory"}, "deadline"),
    ],
)
def test_the_order_is_a_file_and_edits_of_it_restart_no_pod(
    changes: dict[str, Any], policy: str
) -> None:
    service = create_service(**changes)
    data = manifests.configmap(service, SETTINGS, DecidedRuntime(1, 4, 1))["data"]
    assert data["scheduling_policy"] == policy
    live = _deployment()
    made = manifests.workload(service, SETTINGS, ceiling=32, replicas=1, live=live)
    assert made["spec"]["template"] == live["spec"]["template"]


@pytest.mark.parametrize("changes", [{}, _GPU])
def test_the_worker_accepts_every_flag_that_it_is_given(
    tmp_path: Path, changes: dict[str, Any]
) -> None:
    from sluice_worker.base import config

    (tmp_path / "token").write_text("secret")
    for name in ("config.json", "tokenizer.json", "model.safetensors"):
        (tmp_path / name).write_text("{}")
    arguments = [
        argument.replace("/models/demo", str(tmp_path))
        .replace("/etc/sluice/admin", str(tmp_path))
        .replace("/etc/sluice/runtime", str(tmp_path))
        .replace("/etc/sluice/keys/keys", str(tmp_path / "token"))
        for argument in _container(
            batching__prefixCaching=False, apiKeySecretRef={"name": "keys"}, **changes
        )["args"]
    ]
    parsed = config.parse(arguments)
    assert parsed.engine.max_num_seqs == 32
    assert parsed.engine.enable_prefix_caching is False
    assert parsed.engine.speculative_config is not None
    assert (parsed.server.shutdown_delay, parsed.server.shutdown_timeout) == (5.0, 60.0)


def test_drafts_are_switched_off_by_the_object() -> None:
    arguments = _container(batching__speculation="Never")["args"]
    assert not any(argument.startswith("--speculative-config") for argument in arguments)


HUB = {"uri": "hf://Qwen/Qwen3-0.6B", "revision": "main"}
COMMIT = "0" * 40


def test_a_hub_model_is_fetched_into_a_writable_cache_on_a_read_only_root() -> None:
    pod = _pod(model=HUB)
    container = pod["containers"][0]
    assert container["securityContext"]["readOnlyRootFilesystem"] is True
    assert {"name": "cache", "mountPath": "/mnt/cache"} in container["volumeMounts"]
    assert {"name": "cache", "emptyDir": {}} in pod["volumes"]
    for flag in ("--model=hf://Qwen/Qwen3-0.6B", "--revision=main", "--download-dir=/mnt/cache"):
        assert flag in container["args"]


def test_a_claim_keeps_what_the_pods_of_a_hub_model_fetch() -> None:
    volumes = _pod(model={**HUB, "cache": {"pvc": "models"}})["volumes"]
    assert {"name": "cache", "persistentVolumeClaim": {"claimName": "models"}} in volumes


def test_the_token_of_a_hub_model_reaches_the_pod_by_reference_only() -> None:
    for given, key in (({"name": "hf"}, "token"), ({"name": "hf", "key": "HF"}, "HF")):
        environment = _container(model={**HUB, "secretRef": given})["env"]
        source = {"secretKeyRef": {"name": "hf", "key": key}}
        assert {"name": "HF_TOKEN", "valueFrom": source} in environment
    assert {"name": "HF_ENDPOINT", "value": "https://huggingface.co"} in environment
    assert not any(one["name"].startswith("HF_") for one in _container()["env"])


def test_pods_of_a_hub_model_fetch_it_by_the_proxy_that_the_operator_was_given() -> None:
    by_proxy = dataclasses.replace(SETTINGS, hub_proxy="http://proxy:3128")

    def made(settings: Settings, **model: Any) -> dict[str, Any]:
        service = create_service(**model)
        return manifests.workload(service, settings, ceiling=32, replicas=1, live=None)

    hub, plain, own = made(by_proxy, model=HUB), made(SETTINGS, model=HUB), made(by_proxy)
    environment = hub["spec"]["template"]["spec"]["containers"][0]["env"]
    for name in ("HTTPS_PROXY", "HTTP_PROXY"):
        assert {"name": name, "value": "http://proxy:3128"} in environment
    assert hub["metadata"]["annotations"] != plain["metadata"]["annotations"]  # pods are replaced
    assert own == made(SETTINGS)


def test_pods_of_a_hub_model_trust_the_authorities_that_the_operator_names_and_no_others_roll() -> (
    None
):
    settings = dataclasses.replace(SETTINGS, hub_authorities=("authorities", "all.pem"))

    def made(settings: Settings, **model: Any) -> dict[str, Any]:
        service = create_service(**model)
        return manifests.workload(service, settings, ceiling=32, replicas=1, live=None)

    hub, plain, own = made(settings, model=HUB), made(SETTINGS, model=HUB), made(settings)
    spec = hub["spec"]["template"]["spec"]
    [container] = spec["containers"]
    source = {"name": "authorities", "items": [{"key": "all.pem", "path": "ca.crt"}]}
    assert {"name": "ca", "configMap": source} in spec["volumes"]
    mount = {"name": "ca", "mountPath": "/etc/sluice/ca", "readOnly": True}
    assert mount in container["volumeMounts"]
    assert {"name": "SSL_CERT_FILE", "value": "/etc/sluice/ca/ca.crt"} in container["env"]
    assert hub["metadata"]["annotations"] != plain["metadata"]["annotations"]  # pods are replaced
    assert own == made(SETTINGS)


def test_an_empty_image_or_runtime_class_is_as_one_left_out() -> None:
    empty = create_service(engine__image="", hardware__runtimeClassName="")
    assert empty == create_service()
    assert pod.inputs(empty, SETTINGS) == pod.inputs(create_service(), SETTINGS)


def test_replicas_stay_at_the_commit_that_the_revision_stood_for_when_they_were_made() -> None:
    service = create_service(model=HUB)

    def made(commit: str, live: Any = None) -> dict[str, Any]:
        manifest = manifests.workload(
            service, SETTINGS, ceiling=32, replicas=1, live=live, commit=commit
        )
        pod: dict[str, Any] = manifest["spec"]["template"]["spec"]
        assert f"--revision={COMMIT}" in pod["containers"][0]["args"]
        return manifest

    later = made("1" * 40, live=made(COMMIT))
    assert later["spec"]["template"] == made(COMMIT)["spec"]["template"]
