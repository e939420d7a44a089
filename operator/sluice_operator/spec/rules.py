"""The CEL rules of the CRD. Only the API server checks them.

Each is a rule with a sentence, not a bare `pattern`: the API server would print the pattern.
The rules of amounts and durations stand beside their bounds in `kinds`.
"""

from collections.abc import Mapping
from typing import Final

from msgspec import structs

from .batch import BatchSpec
from .engine_rules import ENGINE_RULES, MODEL_RULES, SPEC_RULES
from .kinds import Schema, matches

MAX_NAME_LENGTH = 40
"""Names of children and of their pods are the object's name and a suffix, within 63 characters."""
_NAME = matches(r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?")
_NAME_SAYS = "must be the name of a Kubernetes object"
_IS_NAME = {_NAME: _NAME_SAYS}
_LABEL = "[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?"
_LABEL_KEY = rf"([a-z0-9][-a-z0-9.]{{0,200}}/)?{_LABEL}"
_IS_LABEL = {matches(f"({_LABEL})?"): "must be the value of a label"}
_HF = matches(r"hf://[A-Za-z0-9][A-Za-z0-9._-]*/[A-Za-z0-9][A-Za-z0-9._-]*")
_PVC = matches(r"pvc://[a-z0-9]([-a-z0-9.]*[a-z0-9])?(/[A-Za-z0-9][A-Za-z0-9._/-]*)?")
_FILE = matches(r"file:///[A-Za-z0-9][A-Za-z0-9._/-]*")
_BUCKET = matches(r"(s3|gs)://[a-z0-9][a-z0-9._-]*(/[A-Za-z0-9][A-Za-z0-9._/-]*)?")
_KEY = {matches("[-._A-Za-z0-9]+"): "must be a key of a Secret or a ConfigMap"}
_IMAGE = matches(r"[a-z0-9][A-Za-z0-9._:/-]*(@sha256:[a-f0-9]{64})?")

RULES: Final[dict[str, dict[str, str]]] = {
    "": {
        f"self.metadata.name.size() <= {MAX_NAME_LENGTH}":
            f"metadata.name must have at most {MAX_NAME_LENGTH} characters",
        "self.metadata.name.matches('^[a-z]([-a-z0-9]*[a-z0-9])?$')":
            "metadata.name must be lower-case letters, digits and -, starting with a letter",
    },
    "spec": SPEC_RULES,
    "spec.apiKeySecretRef.name": _IS_NAME,
    "spec.model": {
        "self.uri.startsWith('hf://') || "
        "(!has(self.revision) && !has(self.secretRef) && !has(self.cache))":
            "revision, secretRef and cache belong to hf:// models only",
    },
    "spec.model.uri": {
        matches("(hf|pvc|file|s3|gs)://.*"):
            "must start with hf://, pvc://, file:///, s3:// or gs://",
        "!self.contains('..')": "must not contain '..'",
        f"!self.startsWith('hf://') || {_HF}":
            "hf:// needs the form hf://OWNER/NAME; give a revision in spec.model.revision",
        f"!self.startsWith('pvc://') || {_PVC}":
            "pvc:// needs the form pvc://CLAIM or pvc://CLAIM/PATH",
        f"!self.startsWith('file://') || {_FILE}": "file:// needs a path: file:///PATH",
        f"!self.matches('^(s3|gs)://') || {_BUCKET}":
            "s3:// and gs:// need the form s3://BUCKET/PATH",
    },
    "spec.model.revision": {
        matches("[A-Za-z0-9][A-Za-z0-9._/-]*"): "must be a branch, a tag or a commit",
        "!self.contains('..')": "must not contain '..'",
    },
    "spec.model.name": {
        matches("[/A-Za-z0-9][A-Za-z0-9._/:-]*"):
            "must be letters, digits and . _ / : -, starting with a letter, a digit or /",
    },
    "spec.model.secretRef.name": _IS_NAME,
    "spec.model.secretRef.key": _KEY,
    "spec.model.cache.pvc": _IS_NAME,
    "spec.batches.claimName": _IS_NAME,
    "spec.engine": ENGINE_RULES,
    "spec.engine.image": {
        f"self == '' || {_IMAGE}":
            "must be an image such as registry/worker:1.0, or with @sha256:...",
    },
    "spec.engine.env[].name": {
        matches("[A-Za-z_][A-Za-z0-9_]*"): "must be the name of a variable",
    },
    "spec.engine.env[]": {
        "!has(self.valueFrom) || !has(self.value) || self.value == ''":
            "value and valueFrom exclude each other",
    },
    "spec.engine.env[].valueFrom": {
        "has(self.secretKeyRef) != has(self.configMapKeyRef)":
            "must have one of secretKeyRef and configMapKeyRef",
    },
    "spec.engine.env[].valueFrom.secretKeyRef.name": _IS_NAME,
    "spec.engine.env[].valueFrom.secretKeyRef.key": _KEY,
    "spec.engine.env[].valueFrom.configMapKeyRef.name": _IS_NAME,
    "spec.engine.env[].valueFrom.configMapKeyRef.key": _KEY,
    "spec.engine.healthPath": {matches("/[A-Za-z0-9._/-]*"): "must be a path such as /health"},
    "spec.api.trustedProxies[]": {
        "isCIDR(self) && cidr(self).masked() == cidr(self)":
            "must be a network such as 10.0.0.0/8 or fd00::/8",
    },
    "spec.hardware": {
        "self.accelerator != 'cpu' || !has(self.gpus) || self.gpus == 0":
            "gpus must be 0 or left out with accelerator cpu",
        "self.accelerator == 'cpu' || !has(self.gpus) || self.gpus > 0":
            "gpus must be 1 or more, but for accelerator cpu",
        "self.accelerator != 'cpu' || !has(self.resource)":
            "resource must be left out with accelerator cpu",
        "self.accelerator != 'cpu' || !has(self.hostMemory)":
            "hostMemory must be left out with accelerator cpu: memory is the container's",
    },
    "spec.hardware.resource": {
        matches(rf"[a-z0-9]([-a-z0-9.]{{0,180}}[a-z0-9])?/{_LABEL}"):
            "must be the name of an extended resource, such as amd.com/gpu",
    },
    "spec.hardware.nodeSelector": {
        f"self.all(key, {matches(_LABEL_KEY, 'key')})":
            "keys must be label keys, such as example.com/zone",
    },
    "spec.hardware.nodeSelector[]": _IS_LABEL,
    "spec.hardware.tolerations[]": {
        "has(self.key) || (has(self.operator) && self.operator == 'Exists')":
            "operator must be Exists where key is left out",
        "!has(self.value) || !has(self.operator) || self.operator != 'Exists'":
            "value must be left out with operator Exists",
        "!has(self.tolerationSeconds) || (has(self.effect) && self.effect == 'NoExecute')":
            "tolerationSeconds needs effect NoExecute",
    },
    "spec.hardware.tolerations[].key": {matches(_LABEL_KEY): "must be the key of a label"},
    "spec.hardware.tolerations[].value": _IS_LABEL,
    "spec.hardware.runtimeClassName": {f"self == '' || {_NAME}": _NAME_SAYS},
    "spec.batching": {
        "self.mode != 'Static' || has(self.static)": "mode Static needs static.size",
        "self.mode == 'Static' || !has(self.static)": "static belongs to mode Static only",
        "!has(self.static) || type(self.maxNumSeqs) != int || self.static.size <= self.maxNumSeqs":
            "static.size must not be over maxNumSeqs",
        "!has(self.static) || (type(self.initialNumSeqs) != int && self.minNumSeqs == 1)":
            "initialNumSeqs and minNumSeqs must be left out with static: its size is the cap",
        "type(self.maxNumSeqs) != int || (self.minNumSeqs <= self.maxNumSeqs && "
        "(type(self.initialNumSeqs) != int || self.initialNumSeqs <= self.maxNumSeqs))":
            "minNumSeqs and initialNumSeqs must not be over maxNumSeqs",
        "type(self.initialNumSeqs) != int || self.initialNumSeqs >= self.minNumSeqs":
            "initialNumSeqs must not be under minNumSeqs",
    },
    "spec.slo": {
        "has(self.timeToFirstToken) || has(self.interTokenLatency) || has(self.endToEnd)":
            "slo needs at least one of timeToFirstToken, interTokenLatency and endToEnd",
        "!has(self.timeToFirstToken) || !has(self.endToEnd) || "
        "duration(self.timeToFirstToken) <= duration(self.endToEnd)":
            "timeToFirstToken must not be over endToEnd",
        "self.overload != 'Shed' || has(self.timeToFirstToken)":
            "overload Shed needs timeToFirstToken, the target that it sheds for",
        "string(self.holdShare).startsWith('1') || has(self.timeToFirstToken)":
            "holdShare needs timeToFirstToken, the target that it is a share of",
    },
    "spec.scaling": {
        "self.minReplicas <= self.maxReplicas":
            "minReplicas must not be over maxReplicas (1 where left out)",
    },
}  # fmt: skip
"""By path, each rule and what the API server says where it does not hold. `[]`: each item."""


_CHANGEABLE = ("suspend", "parallelism")
_IS_PATH = {
    matches("[A-Za-z0-9_][A-Za-z0-9._/-]*"):
        "must be letters, digits and . _ / -, without a / in front",
    "!self.contains('..')": "must not contain '..'",
}  # fmt: skip


def _is_kept() -> str:
    """CEL, at `spec`: no field differs, but for those that may."""
    kept = []
    for name, is_required in ((f.encode_name, f.required) for f in structs.fields(BatchSpec)):
        if name in _CHANGEABLE:
            continue
        is_same, has = f"self.{name} == oldSelf.{name}", f"has(self.{name})"
        both = f"{has} == has(oldSelf.{name}) && (!{has} || {is_same})"
        kept.append(is_same if is_required else f"({both})")
    return " && ".join(kept)


BATCH_RULES: Final[dict[str, dict[str, str]]] = {
    "": RULES[""],
    "spec": {
        "has(self.serviceRef) != has(self.model)":
            "exactly one of serviceRef and model must be given",
        "has(self.model) == has(self.engine) && has(self.model) == has(self.hardware)":
            "model, engine and hardware go together; engine: {name: Sluice} is Sluice's own",
        **{f"!has(self.model) || !has(self.engine) || !has(self.hardware) || ({rule})": says
           for rule, says in MODEL_RULES.items()},
        "!has(self.hardware) || self.hardware.nodes == 1":
            "hardware.nodes: a batch's own engine runs on one node; serviceRef may name many",
        "self.parallelism <= self.shards": "parallelism must not be over shards",
        _is_kept(): "spec cannot be changed, but for suspend and parallelism; make another object",
    },
    "spec.input": {
        "has(self.claimName) != has(self.configMap)":
            "exactly one of claimName and configMap must be given",
        "has(self.claimName) == has(self.path)": "path goes with claimName",
    },
    "spec.input.claimName": _IS_NAME,
    "spec.input.path": _IS_PATH,
    "spec.input.configMap.name": _IS_NAME,
    "spec.input.configMap.key": _KEY,
    "spec.output.claimName": _IS_NAME,
    "spec.output.path": _IS_PATH,
    "spec.serviceRef.name": _IS_NAME,
    **{path: rules for path, rules in RULES.items()
       if path.startswith(("spec.model", "spec.engine", "spec.hardware"))},
}  # fmt: skip
"""Those of an InferenceBatch."""


def add_rules(root: Schema, of_paths: Mapping[str, Mapping[str, str]] = RULES) -> Schema:
    """Write rules into the schema of the whole object, and give it back."""
    for path, rules in of_paths.items():
        schema = root
        for part in path.split(".") if path else ():
            schema = schema["properties"][part.removesuffix("[]")]
            if part.endswith("[]"):
                schema = schema["items" if "items" in schema else "additionalProperties"]
        entries = [{"rule": rule, "message": message} for rule, message in rules.items()]
        schema["x-kubernetes-validations"] = entries
    return root
