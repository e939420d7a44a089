"""The CustomResourceDefinition from `spec`; `python -m sluice_operator.status.crd` prints it."""

import sys
from typing import Any

import yaml

from ..spec.kinds import Schema
from ..spec.rules import add_rules
from ..spec.schema import object_schema
from ..spec.service import GROUP, KIND, PLURAL, VERSION, Spec
from .schema import STATUS

HEADER = "# Made by `python -m sluice_operator.status.crd` from spec; do not edit.\n"
KEEP = {"helm.sh/resource-policy": "keep"}
"""Helm must not delete the definition: every object would go with it."""


def _condition(kind: str, part: str) -> str:
    return f'.status.conditions[?(@.type=="{kind}")].{part}'


COLUMNS: tuple[tuple[str, str, str, int], ...] = (
    ("Ready", "string", _condition("Ready", "status"), 0),
    ("Replicas", "integer", ".status.readyReplicas", 0),
    ("Model", "string", ".spec.model.uri", 0),
    ("Engine", "string", ".spec.engine.name", 0),
    ("Cap", "integer", ".status.batching.cap", 0),
    ("TTFT", "string", ".status.slo.timeToFirstToken.measured", 0),
    ("ITL", "string", ".status.slo.interTokenLatency.measured", 0),
    ("SLO", "string", _condition("SLOMet", "status"), 0),
    ("Age", "date", ".metadata.creationTimestamp", 0),
    ("URL", "string", ".status.url", 1),
    ("Limited-By", "string", ".status.batching.limitedBy", 1),
    ("Reason", "string", _condition("Ready", "reason"), 1),
)
"""(name, type, path, priority); priority 1 shows with `-o wide`."""


def crd() -> dict[str, Any]:
    """The whole manifest."""
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{PLURAL}.{GROUP}", "annotations": dict(KEEP)},
        "spec": {
            "group": GROUP,
            "scope": "Namespaced",
            "names": {
                "kind": KIND,
                "listKind": f"{KIND}List",
                "plural": PLURAL,
                "singular": KIND.lower(),
                "shortNames": ["infs"],
                "categories": ["all"],
            },
            "versions": [_version()],
        },
    }


def _version() -> dict[str, Any]:
    return {
        "name": VERSION,
        "served": True,
        "storage": True,
        "subresources": {
            "status": {},
            "scale": {
                "specReplicasPath": ".spec.replicas",
                "statusReplicasPath": ".status.replicas",
                "labelSelectorPath": ".status.selector",
            },
        },
        "additionalPrinterColumns": [_column(*column) for column in COLUMNS],
        "schema": {"openAPIV3Schema": _root()},
    }


def _column(name: str, kind: str, path: str, priority: int) -> dict[str, Any]:
    column: dict[str, Any] = {"name": name, "type": kind, "jsonPath": path}
    return {**column, "priority": priority} if priority else column


def _root() -> Schema:
    root = {
        "description": "A model that is served within the latency that was asked for.",
        "type": "object",
        "required": ["spec"],
        "properties": {
            "apiVersion": {"type": "string"},
            "kind": {"type": "string"},
            "metadata": {"type": "object"},
            "spec": {"description": "The wanted state.", **object_schema(Spec)},
            "status": STATUS,
        },
    }
    return add_rules(root)


class _Plain(yaml.SafeDumper):
    """Writes every value out: anchors and aliases would make the file hard to read."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def render() -> str:
    """The manifest as YAML, byte for byte what crds/inferenceservices.yaml holds."""
    return HEADER + yaml.dump(crd(), Dumper=_Plain, sort_keys=False, width=100)


if __name__ == "__main__":
    sys.stdout.write(render())
