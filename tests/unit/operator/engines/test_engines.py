"""Claims on the pods of other engines, and that our own pods are as they were."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, get_args

import pytest
from sluice_core.engines import FOREIGN
from sluice_operator.children import manifests
from sluice_operator.children.pod import GRACE_MARGIN_SECONDS
from sluice_operator.model.checkpoint import Refused, Unread, read
from sluice_operator.model.fit import ceiling_of, judge
from sluice_operator.settings import parse
from sluice_operator.spec.engine_rules import OWNED_FLAGS, OWNED_VARIABLES
from sluice_operator.spec.service import EngineName
from unit.operator.engines.sluice_objects import SLUICE_OBJECTS
from unit.operator.objects import FIELDS, HUB, REFUSED_FIELDS, field_of
from unit.operator.observations import CHECKPOINT, SETTINGS, create_service

FILE = {"uri": "file:///models/m.gguf"}
RECORDED = {
    "plain": "7b87d1b7e6e0271c",
    "claim": "df7a4ea386e10218",
    "gpu": "44a13721fbd601d9",
    "arguments": "3173b14a4fafeab9",
}
"""Hashes of the Deployments of SLUICE_OBJECTS before there were other engines."""
ENGINES = sorted(FOREIGN)


def _deployment(**changes: Any) -> dict[str, Any]:
    commit = changes.pop("commit", "c" * 40)
    known: dict[str, Any] = {"commit": commit, "loading_bytes": 4 << 30}
    service = create_service(**changes)
    return manifests.workload(service, SETTINGS, ceiling=32, replicas=2, live=None, **known)


def _pod(name: str, **changes: Any) -> dict[str, Any]:
    engine = {"name": name, "image": "r/e:1", **changes.pop("engine", {})}
    spec: dict[str, Any] = _deployment(engine=engine, **changes)["spec"]["template"]["spec"]
    return spec


def _engine(name: str, **changes: Any) -> dict[str, Any]:
    container: dict[str, Any] = _pod(name, **changes)["initContainers"][-1]
    return container


def _env(container: dict[str, Any]) -> dict[str, str]:
    return {one["name"]: one.get("value", "") for one in container["env"]}


@pytest.mark.parametrize("name", sorted(SLUICE_OBJECTS))
def test_pods_of_our_own_engine_are_byte_for_byte_as_they_were(name: str) -> None:
    assert manifests.digest(_deployment(**SLUICE_OBJECTS[name])) == RECORDED[name]


def test_every_engine_that_the_object_may_name_has_an_adapter() -> None:
    assert {"Sluice", *FOREIGN} == set(get_args(EngineName))


@pytest.mark.parametrize("name", ENGINES)
def test_the_gate_stands_before_an_engine_that_ends_after_it(name: EngineName) -> None:
    """The engine is the sidecar: the kubelet sends it SIGTERM when the gate has ended."""
    pod = _pod(name, drain__timeout="45s", apiKeySecretRef={"name": "keys"})
    [gate] = pod["containers"]
    engine = pod["initContainers"][-1]
    assert (gate["command"], gate["image"]) == (["sluice-gate"], SETTINGS.gate_image)
    assert engine["restartPolicy"] == "Always"
    assert {"startupProbe", "lifecycle"}.isdisjoint(engine), "the gate would wait for the engine"
    assert {
        "--upstream=http://127.0.0.1:8100", f"--engine={FOREIGN[name].name}",
        "--max-num-seqs=32", "--port=8000", "--admin-port=8001", "--shutdown-timeout=45",
        "--runtime-config-dir=/etc/sluice/runtime", "--admin-token-file=/etc/sluice/admin/token",
        "--api-key-file=/etc/sluice/keys/keys", "--served-model-name=demo",
    } <= set(gate["args"])  # fmt: skip
    assert [port["containerPort"] for port in gate["ports"]] == [8000, 8001]
    assert pod["terminationGracePeriodSeconds"] == 5 + 45 + GRACE_MARGIN_SECONDS
    assert pod["enableServiceLinks"] is False


@pytest.mark.parametrize("name", ENGINES)
def test_an_engine_is_restarted_for_its_own_hang_and_the_gate_is_not(name: EngineName) -> None:
    """At any age: the gate's image is there first, so the engine's probe may ask from the start."""
    pod = _pod(name, drain__timeout="200s")
    [gate], [first, engine] = pod["containers"], pod["initContainers"]
    assert first["image"] == gate["image"]
    assert "restartPolicy" not in first
    probe = engine["livenessProbe"]
    assert probe["httpGet"] == {"path": "/healthz", "port": 8001}
    until_gate_s = probe["initialDelaySeconds"] + probe["periodSeconds"] * probe["failureThreshold"]
    assert until_gate_s >= 60, "a gate that starts slowly costs no engine"
    hung_s = 30 + probe["periodSeconds"] * (probe["failureThreshold"] + 1)
    assert hung_s + probe["terminationGracePeriodSeconds"] <= 128
    for kind in ("startupProbe", "livenessProbe"):
        assert gate[kind]["httpGet"] == {"path": "/version", "port": "admin"}
    assert gate["livenessProbe"]["terminationGracePeriodSeconds"] < 60
    assert gate["readinessProbe"]["httpGet"] == {"path": "/readyz", "port": "admin"}
    [file] = [arg for arg in gate["args"] if arg.startswith("--served-file=")]
    mounts = {mount["mountPath"] for mount in gate["volumeMounts"]}
    assert file.partition("=")[2].startswith(tuple(f"{path}/" for path in mounts))


@pytest.mark.parametrize("name", ENGINES)
def test_an_engine_has_the_hardware_and_sees_no_secret_of_the_gate(name: str) -> None:
    hardware = {"accelerator": "nvidia", "memory": "22Gi"}
    pod = _pod(name, hardware=hardware, apiKeySecretRef={"name": "keys"})
    [gate], engine = pod["containers"], pod["initContainers"][-1]
    assert engine["resources"]["limits"]["nvidia.com/gpu"] == "1"
    assert "nvidia.com/gpu" not in gate["resources"]["limits"]
    mounted = {mount["name"] for mount in engine["volumeMounts"]}
    assert mounted.isdisjoint({"admin", "keys", "runtime"})
    assert {"admin", "keys", "runtime"} <= {mount["name"] for mount in gate["volumeMounts"]}
    there = {volume["name"] for volume in pod["volumes"]}
    for container in (gate, *pod["initContainers"]):
        paths = [mount["mountPath"] for mount in container["volumeMounts"]]
        assert len(paths) == len(set(paths))
        assert {mount["name"] for mount in container["volumeMounts"]} <= there


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("VLLM", ["/models/m.gguf", "--served-model-name=demo", "--max-model-len=512",
                  "--max-num-batched-tokens=256", "--gpu-memory-utilization=0.5",
                  "--no-enable-prefix-caching", "--dtype=auto",
                  "--scheduler-cls=sluice_vllm.Scheduler"]),
        ("SGLang", ["--model-path=/models/m.gguf", "--served-model-name=demo",
                    "--context-length=512", "--chunked-prefill-size=256",
                    "--mem-fraction-static=0.5", "--disable-radix-cache"]),
        ("TGI", ["--model-id=/models/m.gguf", "--max-total-tokens=512",
                 "--max-batch-prefill-tokens=256", "--cuda-memory-fraction=0.5"]),
        ("LlamaCpp", ["--model", "/models/m.gguf", "--alias", "--no-cache-prompt", "--ctx-size",
                      str(32 * 512), "--batch-size", "256", "--metrics"]),
    ],
)  # fmt: skip
def test_each_accepted_field_becomes_a_flag(name: str, expected: list[str]) -> None:
    changes: dict[str, Any] = {
        "model": {**FILE, "maxModelLen": 512},
        "batching": {
            "maxNumBatchedTokens": 256, "memoryUtilization": "0.5", "prefixCaching": False,
        },
    }  # fmt: skip
    engine = _engine(name, **changes)
    assert set(expected) <= set(engine["args"])
    if name == "TGI":
        assert _env(engine)["PREFIX_CACHING"] == "0"


def test_a_gpu_of_sglang_captures_graphs_up_to_its_capacity() -> None:
    hardware = {"accelerator": "nvidia", "memory": "22Gi"}
    assert "--cuda-graph-max-bs=32" in _engine("SGLang", hardware=hardware)["args"]
    assert "--device=cpu" in _engine("SGLang")["args"]


def test_the_gate_and_sglang_share_an_admin_key_that_is_not_the_gates_token() -> None:
    pod = _pod("SGLang")
    [gate], engine = pod["containers"], pod["initContainers"][-1]
    assert "--engine-admin-key-file=/etc/sluice/admin/engine" in gate["args"]
    assert engine["args"][-1] == "--admin-api-key=$(SLUICE_ENGINE_KEY)"
    [variable] = [one for one in engine["env"] if one["name"] == "SLUICE_ENGINE_KEY"]
    source = {"name": "demo-admin", "key": "engine"}
    assert variable["valueFrom"] == {"secretKeyRef": source}
    secret = manifests.secret(create_service(engine={"name": "SGLang"}), "token")
    assert (secret["metadata"]["name"], set(secret["data"])) == ("demo-admin", {"token", "engine"})
    assert secret["data"]["engine"] != secret["data"]["token"]
    assert set(manifests.secret(create_service(), "token")["data"]) == {"token"}


@pytest.mark.parametrize("name", sorted(OWNED_FLAGS))
def test_the_users_arguments_win_but_not_over_what_the_gate_must_own(name: str) -> None:
    args = _engine(name, engine={"args": ["--theirs=1"]})["args"]
    owned = args[args.index("--theirs=1") + 1 :]
    named = {part.split("=")[0] for part in owned if part.startswith("-")}
    assert named
    assert named <= set(OWNED_FLAGS[name]), "the API server refuses each of them"
    assert "32" in {part.split("=")[-1] for part in owned}, "its capacity is the ceiling"
    assert any("127.0.0.1" in part for part in owned)
    assert any("8100" in part for part in owned)


def test_ollama_is_told_by_variables_and_loads_its_model_first() -> None:
    engine = _engine("Ollama", model={"uri": "pvc://c/m.gguf", "maxModelLen": 512})
    env = _env(engine)
    assert env["OLLAMA_HOST"] == "127.0.0.1:8100"
    assert (env["OLLAMA_NUM_PARALLEL"], env["OLLAMA_KEEP_ALIVE"]) == ("32", "-1")
    assert (env["SLUICE_FILE"], env["OLLAMA_CONTEXT_LENGTH"]) == ("/mnt/models/m.gguf", "512")
    assert _env(_engine("Ollama", model=HUB))["SLUICE_PULL"] == "hf.co/a/b"
    assert "demo" not in engine["command"][-1], "the shell parses nothing of the object"


def test_a_custom_engine_brings_its_command_port_and_health() -> None:
    own = {"command": ["serve"], "args": ["$(SLUICE_MODEL)"], "port": 9000, "healthPath": "/up"}
    pod = _pod("Custom", engine={**own, "env": [{"name": "A", "value": "b"}]})
    [gate], engine = pod["containers"], pod["initContainers"][-1]
    assert {"--upstream=http://127.0.0.1:9000", "--health-path=/up"} <= set(gate["args"])
    assert (engine["command"], engine["args"]) == (["serve"], ["$(SLUICE_MODEL)"])
    env = _env(engine)
    assert (env["A"], env["SLUICE_MODEL"], env["SLUICE_CAPACITY"]) == ("b", "/models/demo", "32")


@pytest.mark.parametrize("name", ENGINES)
def test_a_program_of_the_user_gets_the_flags_of_the_engine(name: str) -> None:
    wrapper = ["sh", "-c", 'prepare && exec engine "$@"', "engine"]
    engine, plain = _engine(name, engine={"command": wrapper}), _engine(name)
    assert engine["command"] == wrapper
    assert {**engine, "command": None} == {**plain, "command": None}
    ours = _deployment(engine={"command": wrapper})["spec"]["template"]["spec"]["containers"][0]
    assert ours["command"] == wrapper
    assert "--model=/models/demo" in ours["args"]


@pytest.mark.parametrize("name", ENGINES)
def test_variables_come_from_secrets_and_config_maps(name: str) -> None:
    chosen = {"name": "a", "key": "b"}
    given = [
        {"name": "A", "valueFrom": {"secretKeyRef": chosen}},
        {"name": "B", "valueFrom": {"configMapKeyRef": {**chosen, "optional": True}}},
    ]
    assert _engine(name, engine={"env": given})["env"][-2:] == given


@pytest.mark.parametrize("name", ["VLLM", "SGLang", "Custom"])
@pytest.mark.parametrize("uri", ["s3://bucket/a/b", "gs://bucket/a/b"])
def test_a_model_in_object_storage_is_handed_to_an_engine_that_streams_it(
    name: EngineName, uri: str, tmp_path: Path
) -> None:
    deployment = _deployment(engine={"name": name, "image": "r/e:1"}, model={"uri": uri})
    engine = deployment["spec"]["template"]["spec"]["initContainers"][-1]
    told = [*engine["args"], *_env(engine).values()]
    assert any(one.removeprefix("--model-path=") == uri for one in told)
    assert deployment["spec"]["progressDeadlineSeconds"] == 6 * 3600
    spec = create_service(engine={"name": name, "image": "r/e:1"}, model={"uri": uri}).spec
    fit = judge(spec, read(uri, "auto", tmp_path, on_cpu=False))
    assert (fit.status, fit.reason) == ("Unknown", "LeftToEngine")
    assert uri in fit.message


def test_our_scheduler_comes_into_vllm_unless_the_user_names_another() -> None:
    pod = _pod("VLLM")
    copy, engine = pod["initContainers"]
    assert copy["command"][-1] == _env(engine)["PYTHONPATH"]
    assert "--engine-socket=/run/sluice/engine.sock" in pod["containers"][0]["args"]
    assert _env(engine)["SLUICE_GATE_SOCKET"] == "/run/sluice/engine.sock"
    theirs = _pod("VLLM", engine={"args": ["--scheduler_cls=a.B"]})
    engine = theirs["initContainers"][-1]
    assert "PYTHONPATH" not in _env(engine)
    assert not any("engine-socket" in arg for arg in theirs["containers"][0]["args"])


@pytest.mark.parametrize("name", ["VLLM", "SGLang", "TGI", "LlamaCpp", "Custom"])
def test_a_hub_model_is_pinned_and_fetched_with_its_token_into_the_cache(name: str) -> None:
    model = {**HUB, "secretRef": {"name": "hf"}, "cache": {"pvc": "models"}}
    manifest = _deployment(engine={"name": name, "image": "r/e:1"}, model=model)
    engine = manifest["spec"]["template"]["spec"]["initContainers"][-1]
    assert _env(engine)["HF_HOME"] == "/mnt/cache"
    assert "HF_TOKEN" in _env(engine)
    assert manifest["spec"]["progressDeadlineSeconds"] == 6 * 3600
    if name in ("VLLM", "SGLang", "TGI"):
        assert f"--revision={'c' * 40}" in engine["args"]


@pytest.mark.parametrize("name", ENGINES)
def test_variables_of_the_user_win_but_for_those_that_the_api_server_refuses(name: str) -> None:
    own = [one["name"] for one in _engine(name, model=HUB)["env"]]
    free = {"OMP_NUM_THREADS", "USER"}
    assert all(re.fullmatch("|".join(OWNED_VARIABLES), one) for one in own if one not in free)
    given = [{"name": "USER", "value": "a"}, {"name": "B", "value": "b"}]
    theirs = _engine(name, model=HUB, engine={"env": given})["env"]
    assert theirs[-2:] == given
    assert sorted(one["name"] for one in theirs) == sorted([*own, "B"])


_CUSTOM_ONLY = {"engine.port", "engine.healthPath"}


@pytest.mark.parametrize("name", ENGINES)
@pytest.mark.parametrize("path", FIELDS)
def test_no_field_is_accepted_and_ignored(name: str, path: str) -> None:
    is_refused = (
        name in REFUSED_FIELDS.get(path, ())
        or (path in _CUSTOM_ONLY and name != "Custom")
        or (name, path) == ("Ollama", "engine.args")
    )
    changed = _pod(name, commit="", **field_of(path))
    assert is_refused or changed != _pod(name, commit="", model=HUB)


@pytest.mark.parametrize(
    "change",
    [
        {"args": ["--a"]},
        {"command": ["a"]},
        {"env": [{"name": "A"}]},
        {"env": [{"name": "A", "valueFrom": {"secretKeyRef": {"name": "a", "key": "b"}}}]},
        {"name": "SGLang"},
        {"image": "r/e:2"},
    ],
)
def test_an_edit_of_the_engine_takes_new_pods(change: dict[str, Any]) -> None:
    before = create_service(engine={"name": "VLLM", "image": "r/e:1"})
    after = create_service(engine={"name": "VLLM", "image": "r/e:1", **change})
    live = manifests.workload(before, SETTINGS, ceiling=32, replicas=1, live=None)
    assert manifests.is_as_asked(before, SETTINGS, live)
    assert not manifests.is_as_asked(after, SETTINGS, live)


def test_default_images_are_the_installations_else_the_adapters() -> None:
    told = parse(["--worker-image=w", "--gate-image=g", "--engine-image=VLLM=r/v:2"])
    for name, image in (("VLLM", "r/v:2"), ("Ollama", FOREIGN["Ollama"].image)):
        service = create_service(engine={"name": name})
        made = manifests.workload(service, told, ceiling=4, replicas=1, live=None)
        pod = made["spec"]["template"]["spec"]
        assert pod["initContainers"][-1]["image"] == image
        assert pod["containers"][0]["image"] == "g"


@pytest.mark.parametrize("name", ENGINES)
def test_an_unknown_architecture_is_left_to_the_engine_with_a_known_capacity(
    name: EngineName,
) -> None:
    spec = create_service(engine={"name": name, "image": "r/e:1"}).spec
    for found in (Refused("the architecture is unknown."), Unread("the hub is away")):
        fit = judge(spec, found)
        assert (fit.status, fit.reason) == ("Unknown", "LeftToEngine")
        assert name in fit.message
        assert ceiling_of(spec, fit) == FOREIGN[name].capacity
    asked = create_service(engine={"name": name, "image": "r/e:1"}, batching={"maxNumSeqs": 7}).spec
    assert ceiling_of(asked, judge(asked, Refused("no."))) == 7
    budget = {"maxNumBatchedTokens": 16}
    small = create_service(engine={"name": "VLLM", "image": "r/e:1"}, batching=budget).spec
    assert ceiling_of(small, judge(small, Refused("no."))) == 16, "a step decodes all that run"


def test_a_file_that_only_the_engines_image_holds_is_left_to_the_engine(tmp_path: Path) -> None:
    found = read("file:///models/m.gguf", "auto", tmp_path, on_cpu=True)
    fit = judge(create_service(engine={"name": "LlamaCpp"}).spec, found)
    told = "the operator has no file:///models/m.gguf: LlamaCpp sizes itself"
    assert (fit.status, fit.reason, fit.message) == ("Unknown", "LeftToEngine", told)
    ours = judge(create_service().spec, found)
    assert (ours.reason, ours.message) == (
        "HeadersUnavailable",
        "the operator has no file:///models/m.gguf: the worker sizes itself",
    )


@pytest.mark.parametrize("name", ENGINES)
def test_no_engine_gets_a_secret_that_may_not_be_used(name: EngineName) -> None:
    spec = create_service(engine={"name": name, "image": "r/e:1"}).spec
    fit = judge(spec, Refused("spec.model.secretRef: no.", is_final=True))
    assert (fit.status, fit.message) == ("False", "spec.model.secretRef: no.")


@pytest.mark.parametrize("name", ENGINES)
def test_our_arithmetic_holds_where_the_engine_runs_the_checkpoint(name: str) -> None:
    fit = judge(create_service(engine={"name": name, "image": "r/e:1"}).spec, CHECKPOINT)
    assert (fit.status == "True") == (name in ("VLLM", "SGLang", "TGI"))
