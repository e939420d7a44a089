"""`sluice from`: each manifest says the same as an object, and what it does not is a line."""

from __future__ import annotations

import contextlib
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from sluice.__main__ import main
from sluice.manifest import checks, documents
from sluice.manifest.command import _converted
from sluice.manifest.convert import Converted
from sluice.manifest.draft import Unreadable
from unit.cli.expected_objects import ENGINE, EXPECTED
from unit.operator.objects import INVALID, Invalid, valid_objects

MANIFESTS = Path(__file__).parent / "manifests"
FILES = sorted(path.name.removesuffix(".yaml") for path in MANIFESTS.glob("*.yaml"))
NONE = {"ollama-library"}
"""Files from which no object can be made."""
REFUSED = {"vllm-without-owner": "hf:// needs the form hf://OWNER/NAME"}


def text(name: str) -> str:
    return (MANIFESTS / f"{name}.yaml").read_text()


def objects(name: str) -> list[Converted]:
    return _converted(text(name), None)


def said(one: Converted) -> str:
    return "\n".join(map(str, one.lines))


def at(body: Any, path: str) -> Any:
    for part in path.split("."):
        body = body[int(part)] if isinstance(body, list) else body.get(part, {})
    return body


def test_each_manifest_is_expected_to_become_something() -> None:
    assert {*FILES} == {*EXPECTED, *NONE}
    assert len(FILES) >= 24


@pytest.mark.parametrize("name", EXPECTED)
def test_the_object_has_what_the_manifest_says(name: str) -> None:
    fields, lines = EXPECTED[name]
    first = objects(name)[0]
    for path, value in fields.items():
        assert at(first.body, path) == value, path
    for line in lines:
        assert line in "\n".join(map(said, objects(name)))


@pytest.mark.skipif(not checks.has_rules(), reason="the extra `from` is not installed")
@pytest.mark.parametrize("name", EXPECTED)
def test_the_object_passes_the_checks(name: str) -> None:
    for one in objects(name):
        refused = checks.refusal(one.body)
        assert refused is None if name not in REFUSED else REFUSED[name] in str(refused)


def leaves(value: Any, path: str) -> Iterator[tuple[str, str]]:
    """Each value of a template with its path; of a name's list the names are in the path."""
    if isinstance(value, dict):
        for key, one in value.items():
            yield from leaves(one, f"{path}.{key}".removeprefix("."))
    elif isinstance(value, list):
        for number, one in enumerate(value):
            mark = one["name"] if isinstance(one, dict) and "name" in one else number
            yield from leaves(one, f"{path}[{mark}]")
    else:
        yield path, str(value)


OWNED = (
    r"containers\[[^]]*\]\.name",  # the engine's is engine
    r"restartPolicy",
    r"containers\[[^]]*\]\.(command|args)\[\d+\]#(vllm|serve|python3?|-m|-c|sh|bash|/bin/\w+|exec)",
    r".*#(--\S+|-\w+)",  # a flag; its value is looked for
    r".*#(sglang\.launch_server|vllm\.entrypoints\.\S+|export|;|&&|half|16k)",
    r".*\.env\[(MODEL_ID|NUM_SHARD|MAX_TOTAL_TOKENS|LLAMA_\w+|OLLAMA_\w+)\]\.name",
    r".*\.env\[(HF_TOKEN|HUGGING_FACE_HUB_TOKEN)\]\.name",
    r".*\.volumeMounts\[(cache|weights|models|data|shm|scratch|dshm|hf-cache)\]\.(name|mountPath)",
    r"volumes\[(cache|weights|models|data|shm|scratch|dshm)\]\.(name|emptyDir\.medium)",
    r".*\.emptyDir",
    r"containers\[[^]]*\]\.resources\.requests\.(cpu|memory)",
)
"""What is said by another word: the engine's own names, flags that became fields, taken volumes."""


def words(path: str, value: str) -> Iterator[tuple[str, str]]:
    """A value; of a command line its words, and of a flag its value."""
    if not re.search(r"\.(command|args)\[\d+\]$", path):
        yield path, value
        return
    parts = shlex.split(value) if " " in value and not value.startswith("{") else [value]
    for part in parts:
        part = part.rstrip(";")
        flag, joined, given = part.partition("=")
        part = given if joined and re.fullmatch(r"-[\w-]+|[A-Z_0-9]+", flag) else part
        yield f"{path}#{part}", part


def templates(name: str) -> Iterator[dict[str, Any]]:
    for one in documents.read(text(name)):
        if documents.is_workload(one):
            spec = one["spec"]
            group = spec.get("leaderWorkerTemplate", {})
            yield group.get("leaderTemplate") or spec.get("template") or group["workerTemplate"]


@pytest.mark.parametrize("name", EXPECTED)
def test_no_value_of_a_pod_is_dropped_in_silence(name: str) -> None:
    """Each is in the object, in a line or under a line's path, or says what the table says."""
    found = objects(name)
    everything = yaml.safe_dump_all([one.body for one in found], width=10_000)
    lines = "\n".join(map(said, found))
    paths = [line.path for one in found for line in one.lines]
    for template in templates(name):
        if "web" in [one["name"] for one in template["spec"]["containers"]]:
            continue  # it runs no engine, and stays
        for place, leaf in leaves({"metadata": template.get("metadata", {})}, ""):
            assert leaf in everything + lines, place
        for place, leaf in leaves(template["spec"], ""):
            for path, word in words(place, leaf):
                is_said = word in everything or f"'{word}'" in everything or word in lines
                is_under = any(path.startswith(one) for one in paths)
                is_owned = any(re.fullmatch(form, path) for form in OWNED)
                resolved = re.fullmatch(r"\$\(?\w+\)?", word)
                truth = word in ("True", "False") and word.lower() in everything
                assert is_said or is_under or is_owned or resolved or truth, (path, word)


def counts() -> dict[str, int]:
    """Files by how much of them an object says: fully where all lines are owned or missing."""
    result = {"fully": 0, "with lines": 0, "not": 0}
    for name in FILES:
        if name in NONE or name in REFUSED:
            result["not"] += 1
            continue
        kinds = {line.kind for one in objects(name) for line in one.lines}
        result["with lines" if kinds & {"changed", "lost"} else "fully"] += 1
    return result


def test_most_manifests_are_said_fully() -> None:
    assert counts() == {"fully": 15, "with lines": 12, "not": 2}


@pytest.mark.parametrize("name", ["vllm-claim", "vllm-several"])
def test_the_command_prints_objects_and_their_lines(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["from", str(MANIFESTS / f"{name}.yaml"), "--memory", "48Gi"]) == 0
    told = capsys.readouterr()
    bodies = list(yaml.safe_load_all(told.out))
    assert [one["kind"] for one in bodies] == ["InferenceService"] * len(bodies)
    assert {one["spec"]["hardware"]["memory"] for one in bodies} == {"48Gi"}
    assert all(
        re.match("(owned|missing|changed|lost|not checked): ", one) for one in told.err.splitlines()
    )
    assert "slo: the file has no promise" in told.err
    assert "hardware.memory" not in told.err


def test_a_file_may_come_from_standard_input() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "sluice", "from", "-"],
        input=text("vllm-claim"), capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip
    assert done.returncode == 0
    assert "name: chat-sluice" in done.stdout


@pytest.mark.skipif(not checks.has_rules(), reason="the extra `from` is not installed")
def test_a_refused_object_is_printed_with_the_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["from", str(MANIFESTS / "vllm-without-owner.yaml")]) == 1
    told = capsys.readouterr()
    assert "uri: hf://gpt2" in told.out
    assert "refused: old-sluice: spec.model.uri: hf:// needs the form" in told.err


def test_without_the_library_a_line_says_what_was_not_checked(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checks, "has_rules", lambda: False)
    assert main(["from", str(MANIFESTS / "vllm-without-owner.yaml")]) == 0
    assert "kubectl apply --dry-run=server" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"\xff\xfe\x00", "the file is no text"),
        (b"a: [", "this is no YAML"),
        (b"", "there is no Deployment"),
        (b"- a\n- b\n", "is no Kubernetes object"),
        (b"kind: Deployment\napiVersion: apps/v1\n", "this is no Deployment"),
        (b"a: &a [*a]\n", "too much"),
        (b"[" * 2000, "this is no YAML"),
        (b"x" * (5 << 20), "too large"),
    ],
)
def test_a_file_without_a_manifest_is_one_sentence_and_code_2(
    content: bytes, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "f.yaml").write_bytes(content)
    assert main(["from", str(tmp_path / "f.yaml")]) == 2
    told = capsys.readouterr()
    assert told.out == ""
    assert says in told.err
    assert told.err.count("\n") == 1


def test_a_file_that_is_not_there_and_an_unknown_engine_are_sentences(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["from", str(tmp_path / "none.yaml")]) == 2
    assert "No such file or directory" in capsys.readouterr().err
    web = text("vllm-several").split("---")[1]
    (tmp_path / "web.yaml").write_text(web)
    assert main(["from", str(tmp_path / "web.yaml")]) == 2
    assert "no container of it runs vLLM" in capsys.readouterr().err
    assert main(["from", str(MANIFESTS / "ollama-library.yaml")]) == 2
    assert "names no model" in capsys.readouterr().err


def pod(**container: Any) -> str:
    """A Deployment of one container of vLLM, with `pod` of the pod's other fields."""
    others = container.pop("pod", {})
    one = {"name": "vllm", "image": "vllm/vllm-openai:v1", "args": ["--model=a/b"], **container}
    spec = {"template": {"spec": {"containers": [one], **others}}}
    meta = {"name": "d"}
    return yaml.safe_dump(
        {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": meta, "spec": spec}
    )


GPUS = {"limits": {"nvidia.com/gpu": 2, "cpu": 2, "memory": "4Gi"}}


@pytest.mark.parametrize(
    ("container", "path", "value"),
    [
        ({"args": ["--model", "a/b", "--max_model_len", "1K"]}, "spec.model.maxModelLen", 1024),
        ({"args": ["--trust-remote-code", "a/b"]}, "spec.model.uri", "hf://a/b"),
        ({"args": ["--model=a/b", "--dtype=fp4"]}, "spec.engine.args", ["--dtype=fp4"]),
        (
            {
                "args": ["--model=$(M)"],
                "env": [{"name": "M", "value": "c/d"}],
                "command": ["vllm", "serve"],
            },
            "spec.model.uri",
            "hf://c/d",
        ),
        (
            {"command": ["numactl", "-l", "/opt/bin/vllm", "serve", "a/b"], "args": ["--seed=1"]},
            "spec.engine.command",
            ["numactl", "-l", "/opt/bin/vllm", "serve"],
        ),
        ({"command": ["/opt/start.sh"]}, "spec.engine.command", ["/opt/start.sh"]),
        (
            {"command": ["sh", "-c", "exec vllm serve ${M:-a/b} --seed 1"]},
            "spec.engine.args",
            ["--seed=1"],
        ),
        (
            {"command": ["sh", "-c", "set -e\nexport A=1\nvllm serve a/b"], "args": []},
            "spec.engine.env",
            [{"name": "A", "value": "1"}],
        ),
        ({"resources": GPUS}, "spec.engine.args", ["--tensor-parallel-size=1"]),
        (
            {"resources": GPUS, "command": ["sh", "-c", "vllm serve a/b & wait"]},
            "spec.engine.args",
            {},
        ),
        ({"resources": GPUS, "args": ["--model=a/b", "-tp=2"]}, "spec.engine.args", {}),
        (
            {
                "env": [
                    {
                        "name": "VLLM_API_KEY",
                        "valueFrom": {"secretKeyRef": {"name": "s", "key": "keys"}},
                    }
                ]
            },
            "spec.apiKeySecretRef",
            {"name": "s"},
        ),
        (
            {"args": ["--model=$(M)"], "env": [{"name": "M", "value": "c/d"}]},
            "spec.model.uri",
            "hf://c/d",
        ),
        (
            {"command": ["bash", "-eu", "-o", "pipefail", "-c", "vllm serve a/b --seed=1 2>&1"]},
            "spec.engine.args",
            ["--seed=1"],
        ),
        (
            {"command": ["sh", "-c", 'vllm serve a/b "$@" | cat', "x", "y"], "args": []},
            "spec.engine.command.4",
            "y",
        ),
        ({"env": [{"name": "a.b", "value": "1"}]}, f"{ENGINE}.env.0.name", "a.b"),
        (
            {
                "image": "ollama/ollama",
                "args": [],
                "lifecycle": {"postStart": {"exec": {"command": ["ollama", "pull", "hf.co/a/b"]}}},
            },
            "spec.model",
            {"uri": "hf://a/b", "name": "hf.co/a/b"},
        ),
        (
            {
                "command": ["sh", "-c", "fetch /data/m\nvllm serve /data/m"],
                "args": [],
                "volumeMounts": [{"name": "d", "mountPath": "/data"}],
                "pod": {"volumes": [{"name": "d", "persistentVolumeClaim": {"claimName": "c"}}]},
            },
            f"{ENGINE}.volumeMounts",
            [{"name": "d", "mountPath": "/data"}],
        ),
        ({"pod": {"serviceAccount": "a"}}, "spec.podTemplate.spec.serviceAccountName", "a"),
        (
            {"pod": {"automountServiceAccountToken": True}},
            "spec.podTemplate.spec.serviceAccountName",
            "default",
        ),
        (
            {"securityContext": {"privileged": True}},
            f"{ENGINE}.securityContext.allowPrivilegeEscalation",
            True,
        ),
        ({"pod": {"terminationGracePeriodSeconds": 7200}}, "spec.drain.timeout", "3600s"),
        ({"args": ["--model=a/b", "--task", "embed"]}, "spec.model.task", "Embed"),
        ({"pod": {"runtimeClassName": "nvidia"}}, "spec.hardware.accelerator", "other"),
    ],
)
def test_a_detail_of_a_pod_is_carried(container: dict[str, Any], path: str, value: Any) -> None:
    [one] = _converted(pod(**container), "24Gi")
    assert at(one.body, path) == value


@pytest.mark.parametrize(
    ("container", "line"),
    [
        (
            {"env": [{"name": "HF_TOKEN", "value": "hf_secret"}]},
            "lost: containers[vllm].env.HF_TOKEN: a token",
        ),
        (
            {"env": [{"name": "HF_ENDPOINT", "value": "http://hub"}]},
            "lost: containers[vllm].env.HF_ENDPOINT",
        ),
        (
            {"env": [{"name": "A", "value": "1"}, {"name": "A", "value": "2"}]},
            "lost: containers[vllm].env.A",
        ),
        ({"args": ["--model=a/b", "--headless"]}, "lost: containers[vllm].args: --headless"),
        (
            {"args": ["--model=a/b", "--api-key=hunter2"]},
            "missing: containers[vllm].args: --api-key",
        ),
        (
            {
                "ports": [{"containerPort": 8080}],
                "lifecycle": {
                    "postStart": {
                        "exec": {"command": ["curl", "http://localhost:8080/v1/load_lora_adapter"]}
                    }
                },
            },
            "changed: localhost:8080",
        ),
        ({"pod": {"hostPID": True}}, "lost: hostPID"),
        (
            {
                "args": ["--model=a/b", "--download-dir=/weights"],
                "env": [{"name": "HF_HOME", "value": "/weights"}],
                "volumeMounts": [{"name": "w", "mountPath": "/weights"}],
                "pod": {"volumes": [{"name": "w", "persistentVolumeClaim": {"claimName": "c"}}]},
            },
            "changed: containers[vllm].volumeMounts[w]: is kept",
        ),
        (
            {"resources": {"requests": {"cpu": 2}, "limits": {"nvidia.com/gpu": 1}}},
            "cpu 2 is a limit too",
        ),
    ],
)
def test_a_detail_that_is_not_carried_is_a_line(container: dict[str, Any], line: str) -> None:
    [one] = _converted(pod(**container), "24Gi")
    assert line in said(one)
    assert not re.search("hunter2|hf_secret", said(one) + str(one.body))


def test_of_several_workloads_each_is_an_object_or_a_line() -> None:
    library = text("ollama-library")
    found = _converted("---\n".join([text("vllm-several"), library]), None)
    assert [one.body["metadata"]["name"] for one in found] == ["big-sluice", "small-sluice"]
    assert "owned: big-sluice: metadata.name" in said(found[0])
    assert "owned: Deployment web: stays as it is" in said(found[1])
    assert "lost: Deployment playground: containers[ollama] names no model" in said(found[1])


def test_a_worker_that_differs_from_its_leader_is_said() -> None:
    body = yaml.safe_load_all(text("vllm-lws-ray"))
    group, service = body
    group["spec"]["leaderWorkerTemplate"]["workerTemplate"]["spec"]["priorityClassName"] = "low"
    [one] = _converted(yaml.safe_dump_all([group, service]), None)
    assert "lost: workerTemplate.spec.priorityClassName: low: the first pod has None" in said(one)


@pytest.mark.skipif(not checks.has_rules(), reason="the extra `from` is not installed")
@pytest.mark.parametrize("case", INVALID, ids=lambda case: f"{case.path}={case.value!r:.40}")
def test_what_the_api_server_refuses_the_checks_refuse(case: Invalid) -> None:
    assert checks.refusal(case.body) is not None


@pytest.mark.skipif(not checks.has_rules(), reason="the extra `from` is not installed")
@given(valid_objects())
def test_what_the_api_server_takes_the_checks_take(body: dict[str, Any]) -> None:
    assert checks.refusal(body) is None


_JUNK: st.SearchStrategy[Any] = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-9, 2**70)
    | st.floats()
    | st.text(max_size=9)
    | st.sampled_from(["--model", "sh", "-c", "vllm serve a/b", "/models", "hf://", "1Gi", "$(A)"]),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=8,
)


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield path
    if isinstance(value, dict | list):
        for key in value if isinstance(value, dict) else range(len(value)):
            yield from places(value[key], (*path, key))


@given(st.data())
def test_a_manifest_with_anything_anywhere_is_an_object_or_a_sentence(data: st.DataObject) -> None:
    found = list(yaml.safe_load_all(text(data.draw(st.sampled_from(FILES)))))
    for _ in range(data.draw(st.integers(1, 3))):
        *above, last = data.draw(st.sampled_from([one for one in places(found) if one]))
        inside: Any = found
        for key in above:
            inside = inside[key]
        inside[last] = data.draw(_JUNK)
    with contextlib.suppress(Unreadable):
        for one in _converted(yaml.safe_dump_all(found), None):
            checks.refusal(one.body)
            assert said(one)


@given(st.text() | st.binary().map(lambda data: data.decode("latin-1")))
def test_any_text_is_a_sentence(content: str) -> None:
    with pytest.raises(Unreadable):
        _converted(content, None)
