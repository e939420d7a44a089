"""The particular texts and quantities of the object, with the sentences that refuse them."""

import re

from .fields import (
    Rule,
    auto_or_integer,
    decimal_text,
    list_of,
    map_of,
    matching,
    number_text,
    quantity,
    quoted,
    text,
)

ENGINE_FLAGS = {
    "block-size": "[1-9][0-9]{0,3}",
    "liveness-timeout": "[1-9][0-9]{0,4}",
    "load-format": "(auto|safetensors|dummy)",
    "max-num-queued-reqs": "[0-9]{1,6}",
    "num-gpu-blocks-override": "[1-9][0-9]{0,8}",
    "parse-special": "(true|false)",
    "quantization": "w8a8",
    "seed": "[0-9]{1,9}",
}
"""Flags of the worker that `engine.args` may give, and their values; all others have a field here
or belong to the operator, so the object is no way to more rights than its fields give."""

OBJECT_NAME = text(
    matching(r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?", "must be the name of a Kubernetes object")
)
REVISION = text(
    matching(r"[A-Za-z0-9][A-Za-z0-9._/-]*", "must be a branch, a tag or a commit"),
    Rule("!self.contains('..')", "must not contain '..'", lambda revision: ".." not in revision),
)
MODEL_NAME = text(
    matching(
        r"[A-Za-z0-9][A-Za-z0-9._/:-]*",
        "must be letters, digits and . _ / : -, starting with a letter or digit",
    ),
    max_length=128,
)
IMAGE = text(
    matching(
        r"[a-z0-9][A-Za-z0-9._:/-]*(@sha256:[a-f0-9]{64})?",
        "must be an image such as registry/worker:1.0, or with @sha256:...",
    )
)
ENGINE_ARGUMENT = text(
    matching(
        "--(" + "|".join(f"{flag}={value}" for flag, value in ENGINE_FLAGS.items()) + ")",
        "must be --FLAG=VALUE with a value that fits and FLAG one of " + ", ".join(ENGINE_FLAGS),
    ),
    max_length=64,
)


def _names_each_flag_once(arguments: tuple[str, ...]) -> bool:
    names = [argument.split("=")[0] for argument in arguments if "=" in argument]
    return len(set(names)) == len(names)


ENGINE_ARGUMENTS = list_of(
    ENGINE_ARGUMENT,
    len(ENGINE_FLAGS),
    Rule(
        "self.all(a, !a.contains('=') || self.exists_one(b, b.startsWith(a.split('=')[0] + '=')))",
        "must not give a flag twice",
        _names_each_flag_once,
    ),
)
_LABEL = "[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?"
_LABEL_KEY = rf"([a-z0-9][-a-z0-9.]{{0,200}}/)?{_LABEL}"
LABEL_KEY = text(matching(_LABEL_KEY, "must be the key of a label"))
LABEL_VALUE = text(
    matching(f"({_LABEL})?", "must be the value of a label"), min_length=0, max_length=63
)
LABELS = map_of(
    LABEL_VALUE,
    16,
    Rule(
        f"self.all(key, key.matches('{quoted(_LABEL_KEY)}'))",
        "keys must be label keys, such as example.com/zone",
        lambda labels: all(re.fullmatch(_LABEL_KEY, key) for key in labels),
    ),
)
MEMORY = quantity(
    ("Ki", "Mi", "Gi", "Ti", "k", "M", "G", "T"),
    scale=1,
    least="1",
    most="1024Ti",
    message="must be bytes over zero and at most 1024Ti, such as 24Gi or 1500Mi",
)
CPU = quantity(
    ("m",),
    scale=1000,
    least="1m",
    most="1024",
    message="must be CPUs from 1m to 1024, such as 2 or 500m",
)
MAX_NUM_SEQS = 4096
NUM_SEQS = auto_or_integer(1, MAX_NUM_SEQS)
UTILIZATION = decimal_text(
    matching(
        r"0\.(0[1-9]|[1-9])[0-9]*|1(\.0+)?", 'must be a string from "0.01" to "1", such as "0.90"'
    )
)
PERCENTILE = number_text(
    matching(r"[5-9][0-9](\.[0-9]{1,2})?", 'must be a string from "50" to "99.99", such as "99.9"')
)


def _if_prefixed(prefix: str, pattern: str, message: str) -> Rule:
    """A URI with `prefix` must match `pattern` as a whole; others pass."""
    whole = matching(pattern, message)
    cel = f"!self.startsWith('{prefix}') || {whole.cel}"
    return Rule(cel, message, lambda uri: not uri.startswith(prefix) or whole.holds(uri))


MODEL_URI = text(
    Rule(
        "!self.startsWith('s3://')",
        "s3:// is not built yet: copy the checkpoint into a volume and use pvc://CLAIM/PATH",
        lambda uri: not uri.startswith("s3://"),
    ),
    matching("(hf|pvc|file|s3)://.*", "must start with hf://, pvc:// or file:///models/"),
    Rule("!self.contains('..')", "must not contain '..'", lambda uri: ".." not in uri),
    _if_prefixed(
        "hf://",
        r"hf://[A-Za-z0-9][A-Za-z0-9._-]*/[A-Za-z0-9][A-Za-z0-9._-]*",
        "hf:// needs the form hf://OWNER/NAME; give a revision in spec.model.revision",
    ),
    _if_prefixed(
        "pvc://",
        r"pvc://[a-z0-9]([-a-z0-9.]*[a-z0-9])?(/[A-Za-z0-9][A-Za-z0-9._/-]*)?",
        "pvc:// needs the form pvc://CLAIM or pvc://CLAIM/PATH",
    ),
    _if_prefixed(
        "file://",
        r"file:///models/[A-Za-z0-9][A-Za-z0-9._/-]*",
        "file:// is read only under file:///models/",
    ),
)
