"""Objects for tests: one that is valid, many that are not with what is said of them, and fuzz."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

from hypothesis import strategies as st

Object = dict[str, Any]
REMOVED = object()


def valid_object(name: str = "demo") -> Object:
    """A complete valid object as a user writes it."""
    return {
        "apiVersion": "sluice.dev/v1alpha1",
        "kind": "InferenceService",
        "metadata": {"name": name, "namespace": "default"},
        "spec": {
            "model": {"uri": "file:///models/demo"},
            "hardware": {"accelerator": "cpu", "cpu": "500m", "memory": "1500Mi"},
            "slo": {"timeToFirstToken": "500ms", "interTokenLatency": "50ms"},
            "scaling": {"maxReplicas": 10},
        },
    }


def changed(body: Object, path: str, value: Any) -> Object:
    """A copy of `body` with the field at dotted `path` set to `value`, or removed."""
    result = copy.deepcopy(body)
    *parents, last = path.split(".")
    at = result
    for part in parents:
        at = at.setdefault(part, {})
    if value is REMOVED:
        at.pop(last, None)
    else:
        at[last] = value
    return result


@dataclass(frozen=True, slots=True)
class Invalid:
    """One change that makes the valid object invalid, and what is said of it."""

    path: str
    value: Any
    says: str

    @property
    def body(self) -> Object:
        """The object with the change."""
        return changed(valid_object(), self.path, self.value)


_DURATION = "must be a duration between"
_ON_A_GPU = {"accelerator": "nvidia", "memory": "24Gi"}
_DEMO = {"uri": "file:///models/demo"}
_QUANTISED_ON_A_GPU = {
    "model": _DEMO,
    "engine": {"args": ["--seed=1", "--quantization=w8a8"]},
    "hardware": _ON_A_GPU,
}
_KEY = {"name": "a", "key": "b"}
_IMAGE, HUB = {"image": "r/e:1"}, {"uri": "hf://a/b"}
_TOO_MUCH = {
    "args": ["x" * 4096] * 8,
    "env": [{"name": f"A{n}", "value": "x" * 4096} for n in range(9)],
}
_OTHERS = ("VLLM", "SGLang", "TGI", "LlamaCpp", "Ollama", "Custom")
FIELDS: dict[str, Any] = {
    "model.name": "other",
    "model.revision": "a",
    "model.secretRef": {"name": "a"},
    "model.cache": {"pvc": "a"},
    "model.dtype": "float16",
    "model.maxModelLen": 512,
    "batching.maxNumBatchedTokens": 64,
    "batching.memoryUtilization": "0.5",
    "batching.prefixCaching": False,
    "batching.speculation": "Never",
    "engine.args": ["--other=1"],
    "engine.env": [{"name": "A"}],
    "engine.command": ["a"],
    "engine.port": 9000,
    "engine.healthPath": "/a",
}
"""Fields that an engine uses or refuses, each with a value that is not its default."""
REFUSED_FIELDS = {
    "model.revision": ("LlamaCpp", "Ollama"),
    "model.secretRef": ("Ollama",),
    "model.dtype": ("LlamaCpp", "Ollama", "Custom"),
    "model.maxModelLen": ("Custom",),
    "batching.maxNumBatchedTokens": ("Ollama", "Custom"),
    "batching.memoryUtilization": ("LlamaCpp", "Ollama", "Custom"),
    "batching.prefixCaching": ("Ollama", "Custom"),
    "batching.speculation": _OTHERS,
}
"""Engines for which the API server refuses a field of FIELDS."""


def field_of(path: str) -> Object:
    """The spec's part with the field of FIELDS at `path`, over a model of the hub."""
    part, name = path.split(".")
    return {"model": HUB, part: {**(HUB if part == "model" else {}), name: FIELDS[path]}}


def _of(engine: str, says: str, **changes: Any) -> Invalid:
    """The valid object with another engine, and `changes` of its spec."""
    return _with(says, engine={"name": engine, **_IMAGE}, **changes)


def _with(says: str, **changes: Any) -> Invalid:
    """The valid object with `changes` of its spec."""
    return Invalid("spec", {**valid_object()["spec"], **changes}, says)


def static_batches(size: int, wait: str = "100ms", **changes: Any) -> Object:
    """`spec.batching` of mode Static."""
    return {"mode": "Static", "static": {"size": size, "wait": wait}, **changes}


INVALID = [
    Invalid("spec.model.uri", "s3://bucket/demo", "only VLLM, SGLang and Custom read s3:// and"),
    _of("VLLM", "s3:// and gs:// need the form", model={"uri": "gs://Bucket/demo"}),
    Invalid("spec.model", {**HUB, "secretRef": {**_KEY, "key": "a b"}}, "must be a key of a"),
    Invalid("spec.model.uri", "hf://Qwen/Qwen3-0.6B@v1", "give a revision in spec.model.revision"),
    Invalid("spec.model", {"uri": "hf://a/b", "revision": "a/../b"}, "must not contain '..'"),
    Invalid("spec.model.uri", "hf://Qwen", "hf:// needs the form hf://OWNER/NAME"),
    Invalid("spec.model.uri", "http://169.254.169.254/latest/meta-data", "must start with hf://"),
    Invalid("spec.model.uri", "file://localhost/models/a", "file:// needs a path: file:///PATH"),
    Invalid("spec.model.uri", "file:///models/../etc", "must not contain '..'"),
    Invalid("spec.model.uri", "file:///models/a\n", "file:// needs a path"),
    Invalid("spec.model.uri", "pvc://Claim/a", "pvc:// needs the form"),
    Invalid("spec.model.uri", REMOVED, "Required value"),
    Invalid("spec.model.uri", 7, "must be of type string"),
    Invalid("spec.model.uri", "file:///models/" + "a" * 300, "Too long"),
    Invalid("spec.model.revision", "main", "belong to hf:// models only"),
    Invalid("spec.model.task", "Embed", "first tokens and gaps are of task Generate"),
    Invalid("spec.model.task", "Sing", "Unsupported value"),
    Invalid("spec.model.dtype", "int8", "Unsupported value"),
    Invalid("spec.model.maxModelLen", 0, "greater than or equal to 1"),
    Invalid("spec.model.maxModelLen", "4k", "must be of type integer"),
    Invalid("spec.model.name", "a b", "must be letters, digits and"),
    Invalid("spec.model", REMOVED, "Required value"),
    Invalid("spec.engine.name", "TensorRT", "Unsupported value"),
    Invalid("spec.engine", {"name": "VLLM", **_IMAGE, "args": ["--port=1"]}, "operator sets"),
    Invalid("spec.engine", {"name": "VLLM", **_IMAGE, "args": ["--max_num_seqs=1"]}, "args: the"),
    Invalid("spec.engine", {"name": "SGLang", **_IMAGE, "args": ["--nnodes=2"]}, "operator sets"),
    Invalid("spec.engine", {"name": "TGI", **_IMAGE, "args": ["-p=1"]}, "operator sets"),
    Invalid("spec.engine", {"name": "Ollama", "args": ["-v"]}, "Ollama takes no flags; use env"),
    Invalid("spec.engine", {"name": "VLLM"}, "the default image needs accelerator nvidia"),
    Invalid("spec.engine", {"name": "Custom"}, "Custom has no default image"),
    Invalid("spec.engine", {"name": "Custom", **_IMAGE, "port": 8001}, "the gate has 8000"),
    Invalid("spec.engine", {"name": "Custom", **_IMAGE, "healthPath": "a"}, "must be a path such"),
    Invalid("spec.engine", {"name": "Ollama", "port": 9000}, "belong to Custom only"),
    *(
        Invalid("spec.engine", {"name": "Ollama", "env": [{"name": "A", **source}]}, says)
        for source, says in (
            ({"value": "a", "valueFrom": {"secretKeyRef": _KEY}}, "exclude each other"),
            ({"valueFrom": {}}, "must have one of secretKeyRef and configMapKeyRef"),
            ({"valueFrom": {"secretKeyRef": {**_KEY, "key": "/"}}}, "must be a key of a Secret"),
            ({"valueFrom": {"configMapKeyRef": {**_KEY, "name": "A"}}}, "name of a Kubernetes"),
            ({"valueFrom": {"secretKeyRef": {"name": "a"}}}, "Required value"),
        )
    ),
    Invalid("spec.engine.env", [{"name": "A"}], "env belongs to other engines than Sluice"),
    Invalid("spec.engine", {"name": "Ollama", "env": [{"name": "a-b"}]}, "the name of a variable"),
    Invalid(
        "spec.engine", {"name": "Ollama", "env": [{"name": "OLLAMA_HOST"}]}, "set by the operator"
    ),
    Invalid(
        "spec.engine",
        {"name": "Ollama", "env": [{"name": "A"}, {"name": "A"}]},
        "must not name a variable twice",
    ),
    _of("LlamaCpp", "model.uri: LlamaCpp and Ollama need the path of a .gguf file"),
    _of("Ollama", "model.uri: LlamaCpp and Ollama need the path of a .gguf file"),
    _of("TGI", "TGI has no float32", model={**HUB, "dtype": "float32"}),
    *(
        _of(engine, f"{path}: ", **field_of(path))
        for path, engines in REFUSED_FIELDS.items()
        for engine in engines
    ),
    Invalid("spec.engine.image", "a;reboot", "must be an image"),
    Invalid("spec.engine.args", ["--model=/etc"], "must be --FLAG=VALUE"),
    Invalid("spec.engine.args", ["--seed=1 --model=/"], "--seed must have a value that fits"),
    Invalid("spec.engine.args", ["--seed=x"], "--seed must have a value that fits"),
    Invalid("spec.engine.args", ["--parse-special=no"], "must have a value that fits"),
    Invalid("spec.engine.args", ["--seed=1", "--seed=2"], "must not give a flag twice"),
    Invalid("spec.engine", {"name": "Custom", **_IMAGE, "args": ["x" * 4097]}, "Too long"),
    Invalid("spec.engine", {"name": "Custom", **_IMAGE, "args": ["x"] * 129}, "at most 128 items"),
    Invalid("spec.engine", {"name": "Custom", **_IMAGE, **_TOO_MUCH}, "at most 65536 characters"),
    Invalid("spec", _QUANTISED_ON_A_GPU, "--quantization=w8a8 is for accelerator cpu only"),
    Invalid("spec.engine.args", "--seed=1", "must be of type array"),
    Invalid("spec.hardware.gpus", 1, "gpus must be 0 or left out with accelerator cpu"),
    Invalid("spec.hardware.accelerator", "tpu", "Unsupported value"),
    Invalid("spec.hardware", {**_ON_A_GPU, "gpus": 0}, "gpus must be 1 or more"),
    Invalid("spec.hardware", {**_ON_A_GPU, "gpus": 2}, "runs on CPUs or one NVIDIA GPU"),
    Invalid("spec.hardware", {**_ON_A_GPU, "gpus": 129}, "less than or equal to 128"),
    Invalid("spec.hardware", {**_ON_A_GPU, "resource": "gpu"}, "name of an extended resource"),
    Invalid("spec.hardware.resource", "amd.com/gpu", "resource must be left out with"),
    Invalid("spec.hardware", {"accelerator": "other", "memory": "8Gi"}, "has no default image"),
    Invalid("spec.hardware.nodes", 2, "only VLLM, SGLang and Custom serve from more than one"),
    Invalid("spec.suspend", "yes", "type boolean"),
    Invalid("spec.hardware.memory", "24GB", "must be bytes over zero"),
    Invalid("spec.hardware.memory", "0Gi", "must be bytes over zero"),
    Invalid("spec.hardware.memory", -1, "must be bytes over zero"),
    Invalid("spec.hardware.memory", REMOVED, "Required value"),
    Invalid("spec.hardware.cpu", "0.5m", "must be CPUs from 1m to 1024"),
    Invalid("spec.hardware.hostMemory", "8Gi", "hostMemory must be left out with"),
    Invalid("spec.hardware", {**_ON_A_GPU, "hostMemory": "8GB"}, "must be bytes over zero"),
    Invalid("spec.hardware.runtimeClassName", "A b", "must be the name of a Kubernetes object"),
    Invalid("spec.hardware.nodeSelector", {"a b": "c"}, "keys must be label keys"),
    Invalid("spec.hardware.nodeSelector", {"zone": "a b"}, "must be the value of a label"),
    Invalid("spec.hardware.tolerations", [{"value": "x"}], "must be Exists where key is left out"),
    Invalid("spec.batching.mode", "Static", "mode Static needs static.size"),
    Invalid("spec.batching.mode", "Padded", "Unsupported value"),
    Invalid("spec.batching", {"mode": "Static", "static": {"wait": "1s"}}, "Required value"),
    Invalid("spec.batching.static", {"size": 8}, "static belongs to mode Static only"),
    Invalid("spec.batching", static_batches(0), "greater than or equal to 1"),
    Invalid("spec.batching", static_batches(8, wait="11s"), _DURATION),
    Invalid("spec.batching", static_batches(9, maxNumSeqs=8), "size must not be over maxNumSeqs"),
    Invalid("spec.batching", static_batches(9, minNumSeqs=2), "minNumSeqs must be left out with"),
    Invalid("spec.batching", static_batches(9, initialNumSeqs=9), "must be left out with static"),
    _of("VLLM", "Static is for Sluice's own engine", batching=static_batches(8)),
    _with("task Generate only", model={**_DEMO, "task": "Embed"}, batching=static_batches(8)),
    _with("at most a third of --liveness-timeout", engine={"args": ["--liveness-timeout=3"]},
          batching=static_batches(8, wait="1001ms")),
    Invalid("spec.batching.maxNumSeqs", "Many", "must be Auto or a whole number"),
    Invalid("spec.batching.maxNumSeqs", 0, "must be Auto or a whole number"),
    Invalid("spec.batching", {"minNumSeqs": 9, "maxNumSeqs": 8}, "must not be over maxNumSeqs"),
    Invalid("spec.batching", {"initialNumSeqs": 9, "maxNumSeqs": 8}, "not be over maxNumSeqs"),
    Invalid("spec.batching", {"initialNumSeqs": 1, "minNumSeqs": 2}, "not be under minNumSeqs"),
    Invalid("spec.batching.order", "Priority", "Unsupported value"),
    Invalid("spec.batching.memoryUtilization", "1.5", 'from "0.01" to "1"'),
    Invalid("spec.batching.memoryUtilization", 0.9, "must be of type string"),
    Invalid("spec.batching.prefixCaching", "yes", "type boolean"),
    Invalid("spec.slo.percentile", "100", 'must be a string from "50" to "99.99"'),
    Invalid("spec.slo.percentile", "p99", 'must be a string from "50" to "99.99"'),
    Invalid("spec.slo.percentile", 99.9, "must be of type"),
    Invalid("spec.slo.timeToFirstToken", "half a second", _DURATION),
    Invalid("spec.slo.timeToFirstToken", "0s", _DURATION),
    Invalid("spec.slo.endToEnd", "100ms", "timeToFirstToken must not be over endToEnd"),
    Invalid("spec.slo", {"interTokenLatency": "50ms", "overload": "Shed"}, "Shed needs timeToFi"),
    Invalid("spec.slo", {"interTokenLatency": "50ms", "holdShare": "0.5"}, "holdShare needs time"),
    Invalid("spec.slo.holdShare", "1.5", 'must be a string from "0" to "1"'),
    Invalid("spec.slo.holdShare", "50%", 'must be a string from "0" to "1"'),
    Invalid("spec.slo.holdShare", 0.5, "must be of type"),
    Invalid("spec.apiKeySecretRef", {"name": "A b"}, "apiKeySecretRef.name"),
    Invalid("spec.slo.window", "1h", "workers keep evidence of half an hour"),
    Invalid("spec.slo", {"percentile": "99"}, "slo needs at least one of"),
    Invalid("spec.scaling", {"minReplicas": 3, "maxReplicas": 2}, "not be over maxReplicas"),
    Invalid("spec.scaling.minReplicas", 0, "greater than or equal to 1"),
    Invalid("spec.replicas", -1, "greater than or equal to 0"),
    Invalid("spec.rollout", "Recreate", "Unsupported value"),
    Invalid("spec.drain.timeout", "2h", _DURATION),
    Invalid("spec.api.maxBodySize", "2Gi", "must be bytes from 1Ki to 1Gi"),
    Invalid("spec.api.maxBodySize", "64MB", "must be bytes from 1Ki to 1Gi"),
    Invalid("spec.api.keepAliveTimeout", "10", _DURATION),
    Invalid("spec.api.trustedProxies", ["10.0.0.1/8"], "must be a network such as 10.0.0.0/8"),
    Invalid("spec.api.trustedProxies", ["10.0.0.1"], "must be a network such as 10.0.0.0/8"),
    Invalid("spec.api.trustedProxies", ["10.0.0.0/8"] * 65, "at most 64 items"),
    Invalid("metadata.name", "a" * 41, "metadata.name must have at most 40 characters"),
    Invalid("metadata.name", "1demo", "metadata.name must be lower-case letters"),
    Invalid("metadata.name", "demo.v1", "metadata.name must be lower-case letters"),
]  # fmt: skip
"""Each is refused by the API server, which says so."""


def _texts(*values: str) -> st.SearchStrategy[str]:
    return st.sampled_from(values)


def _durations(low_ms: int, high_ms: int) -> st.SearchStrategy[str]:
    return st.integers(low_ms, high_ms).flatmap(
        lambda ms: st.sampled_from(
            [f"{ms}ms", f"{ms / 1000:.3f}s", f"{ms // 1000}s{ms % 1000}ms"],
        )
    )


_NUM_SEQS: st.SearchStrategy[Any] = st.just("Auto") | st.integers(1, 4096)
_GOOD: dict[str, st.SearchStrategy[Any]] = {
    "spec.model": st.fixed_dictionaries(
        {"uri": _texts("file:///models/a", "file:///data/a-b/c.d_e/", "pvc://c/d", "pvc://c")}
    )
    | st.fixed_dictionaries(
        {"uri": _texts("hf://Qwen/Qwen3-0.6B", "hf://a/B.c_d-e")},
        optional={
            "revision": _texts("main", "refs/pr/3", "v1.0", "0" * 40),
            "secretRef": st.sampled_from([{"name": "hf"}, {"name": "hf", "key": "HF.TOKEN_1"}]),
            "cache": st.just({"pvc": "models"}),
        },
    ),
    "spec.model.name": _texts("a", "/data/a", "Qwen/Qwen3-0.6B", "a:b_c.d-e", "x" * 128),
    "spec.model.dtype": _texts("auto", "float32", "bfloat16", "float16"),
    "spec.model.maxModelLen": st.integers(1, 1_048_576),
    "spec.engine.image": _texts("", "a", "10.0.0.1:5000/w/x:1.0", "r/w@sha256:" + "0" * 64),
    "spec.engine.args": st.lists(
        _texts("--seed=1", "--block-size=16", "--quantization=w8a8", "--parse-special=false"),
        unique=True,
    ),
    "spec.hardware.memory": st.integers(1, 2**50)
    | _texts("1", "0.5Gi", "24Gi", "1.125Ti", "1024Ti", "1500M", "7k"),
    "spec.hardware.cpu": st.integers(1, 1024) | _texts("1m", "0.5", "500m", "1.250", "1024"),
    "spec.hardware.nodeSelector": st.dictionaries(
        _texts("zone", "example.com/zone", "a_b.c"), _texts("", "a", "A-b_c.9"), max_size=3
    ),
    "spec.hardware.runtimeClassName": _texts("", "nvidia", "a-b.c"),
    "spec.hardware.tolerations": st.lists(
        st.sampled_from(
            [
                {"operator": "Exists"},
                {"key": "gpu", "value": "yes", "effect": "NoSchedule"},
                {"key": "a/b", "effect": "NoExecute", "tolerationSeconds": 3},
            ]
        ),
        max_size=3,
    ),
    "spec.batching.order": _texts("Deadline", "FCFS"),
    "spec.batching.maxNumSeqs": st.just("Auto") | st.integers(64, 4096),
    "spec.batching.initialNumSeqs": st.just("Auto") | st.integers(8, 64),
    "spec.batching.minNumSeqs": st.integers(1, 8),
    "spec.batching.maxNumBatchedTokens": st.just("Auto") | st.integers(16, 65_536),
    "spec.batching.memoryUtilization": _texts("0.90", "1", "1.0", "0.015", "0.5"),
    "spec.batching.prefixCaching": st.booleans(),
    "spec.batching.speculation": _texts("Auto", "Never"),
    "spec.slo.percentile": _texts("50", "99", "99.9", "99.99") | st.integers(50, 99),
    "spec.slo.timeToFirstToken": _durations(1, 3_600_000),
    "spec.slo.endToEnd": _durations(3_600_000, 86_400_000),
    "spec.slo.window": _durations(10_000, 1_800_000),
    "spec.slo.overload": _texts("Queue", "Shed"),
    "spec.slo.holdShare": _texts("0", "0.5", "0.9999", "1", "1.0") | st.integers(0, 1),
    "spec.slo.mode": _texts("Enforce", "Advisory"),
    "spec.scaling.minReplicas": st.integers(1, 10),
    "spec.scaling.maxReplicas": st.integers(10, 1000),
    "spec.scaling.behavior.scaleDown.stabilizationWindowSeconds": st.integers(0, 3600),
    "spec.scaling.behavior.scaleUp": st.just({}),
    "spec.replicas": st.none() | st.integers(0, 1000),
    "spec.rollout": _texts("Surge", "Replace"),
    "spec.apiKeySecretRef": st.just({"name": "demo-keys"}),
    "spec.drain.timeout": _durations(1000, 3_600_000),
    "spec.api.maxBodySize": st.integers(1024, 2**30) | _texts("1Ki", "0.5Mi", "64Mi", "1Gi"),
    "spec.api.keepAliveTimeout": _durations(1000, 86_400_000),
    "spec.api.trustedProxies": st.lists(_texts("10.0.0.0/8", "fd00::/8", "0.0.0.0/0"), max_size=3),
}  # fmt: skip
_JUNK: st.SearchStrategy[Any] = st.sampled_from(
    [
        None, True, -1, 0, 2**31, 2**63 - 1, 0.5, "", " ", "auto", "Auto", "0", "1e3", "-5s", "1 s",
        "٣ms", "NaN", "a\n", "\x00", "..", "'", "{{ .Values }}", "$(HOME)", "x" * 300, [], [None],
        [[]], {}, {"a": 1}, ["--seed=1\n"], "1h1m1s1ms1h", "5m", "file:///models/", "99.999",
    ]
)  # fmt: skip


@st.composite
def valid_objects(draw: st.DrawFn) -> Object:
    """Valid objects with any subset of the optional fields given."""
    body = valid_object()
    for path in draw(st.lists(st.sampled_from(sorted(_GOOD)), unique=True)):
        body = changed(body, path, draw(_GOOD[path]))
    batching = body["spec"].get("batching", {})
    if batching.keys().isdisjoint({"initialNumSeqs", "minNumSeqs"}) and draw(st.booleans()):
        static = static_batches(draw(st.integers(1, 64)), draw(_durations(1, 10_000)), **batching)
        body = changed(body, "spec.batching", static)
    return body


@st.composite
def arbitrary_objects(draw: st.DrawFn) -> Object:
    """Valid objects with one to three fields, at any depth, replaced by something odd."""
    body = draw(valid_objects())
    paths = [
        *sorted(_GOOD),
        "spec.model.uri",
        "spec.slo",
        "spec.batching",
        "spec.scaling",
        "spec.drain",
    ]
    for path in draw(st.lists(st.sampled_from(paths), min_size=1, max_size=3, unique=True)):
        if _reaches_an_object(body, path):
            body = changed(body, path, draw(_JUNK))
    return body


def _reaches_an_object(body: Object, path: str) -> bool:
    at: Any = body
    for part in path.split(".")[:-1]:
        if not isinstance(at, dict):
            return False
        at = at.get(part, {})
    return isinstance(at, dict)
