"""The particular texts and quantities of the object, with the sentences that refuse them."""

from .fields import Rule, auto_or_integer, decimal_text, matching, quantity, text

ENGINE_FLAGS = (
    "block-size", "liveness-timeout", "load-format", "max-num-queued-reqs",
    "num-gpu-blocks-override", "seed",
)  # fmt: skip
"""Flags of the worker that `engine.args` may give; all others have a field or belong to us."""

OBJECT_NAME = text(
    matching(r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?", "must be the name of a Kubernetes object")
)
REVISION = text(matching(r"[A-Za-z0-9][A-Za-z0-9._/-]*", "must be a branch, a tag or a commit"))
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
        f"--({'|'.join(ENGINE_FLAGS)})=[A-Za-z0-9][A-Za-z0-9._-]*",
        "must be --FLAG=VALUE with FLAG one of " + ", ".join(ENGINE_FLAGS),
    ),
    max_length=64,
)
MEMORY = quantity(
    ("Ki", "Mi", "Gi", "Ti", "k", "M", "G", "T"),
    scale=1,
    most="1024Ti",
    message="must be bytes over zero and at most 1024Ti, such as 24Gi or 1500Mi",
)
CPU = quantity(
    ("m",),
    scale=1000,
    most="1024",
    message="must be CPUs over zero and at most 1024, such as 2 or 500m",
)
NUM_SEQS = auto_or_integer(1, 4096)
UTILIZATION = decimal_text(
    matching(r"0\.[0-9]*[1-9][0-9]*|1(\.0+)?", 'must be a decimal in (0, 1], as "0.90"')
)
PERCENTILE = text(
    matching(r"[5-9][0-9](\.[0-9]{1,2})?", 'must be a string from "50" to "99.99", as "99.9"'),
    max_length=5,
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
    Rule(
        "!self.startsWith('hf://')",
        "hf:// is not built yet: download the checkpoint into a volume and use pvc://CLAIM/PATH",
        lambda uri: not uri.startswith("hf://"),
    ),
    matching("(hf|pvc|file|s3)://.*", "must start with hf://, pvc:// or file:///models/"),
    Rule("!self.contains('..')", "must not contain '..'", lambda uri: ".." not in uri),
    _if_prefixed(
        "hf://",
        r"hf://[A-Za-z0-9][A-Za-z0-9._-]*/[A-Za-z0-9][A-Za-z0-9._-]*",
        "hf:// needs the form hf://OWNER/NAME",
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
