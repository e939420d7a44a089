"""The CustomResourceDefinitions from `spec`: `python -m sluice_operator.status.crd DIR...` writes
them into folders."""

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from msgspec import Struct

from ..spec.batch import BATCH_KIND, BATCH_PLURAL, BatchSpec
from ..spec.kinds import Schema
from ..spec.rules import BATCH_RULES, RULES, add_rules
from ..spec.schema import object_schema
from ..spec.service import GROUP, KIND, PLURAL, VERSION, Spec
from .batch_schema import BATCH_STATUS
from .schema import STATUS

HEADER = "# Made by `python -m sluice_operator.status.crd` from spec; do not edit.\n"
KEEP = {"helm.sh/resource-policy": "keep"}
"""Helm must not delete the definition: every object would go with it."""


def _condition(kind: str, part: str) -> str:
    return f'.status.conditions[?(@.type=="{kind}")].{part}'


@dataclass(frozen=True, slots=True)
class Definition:
    """A resource. `columns`: (name, type, path, priority); priority 1 shows with `-o wide`."""

    kind: str
    plural: str
    short: str
    about: str
    spec: type[Struct]
    status: Schema
    rules: Mapping[str, Mapping[str, str]]
    columns: tuple[tuple[str, str, str, int], ...]
    subresources: Mapping[str, Any] = field(default_factory=lambda: {"status": {}})


SERVICES = Definition(
    KIND,
    PLURAL,
    "infs",
    "A model that is served within the latency that was asked for.",
    Spec,
    STATUS,
    RULES,
    columns=(
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
    ),
    subresources={
        "status": {},
        "scale": {
            "specReplicasPath": ".spec.replicas",
            "statusReplicasPath": ".status.replicas",
            "labelSelectorPath": ".status.selector",
        },
    },
)
BATCHES = Definition(
    BATCH_KIND,
    BATCH_PLURAL,
    "infbatch",
    "Many requests, answered once, without an eye on their latency.",
    BatchSpec,
    BATCH_STATUS,
    BATCH_RULES,
    columns=(
        ("State", "string", ".status.state", 0),
        ("Completed", "integer", ".status.counts.completed", 0),
        ("Failed", "integer", ".status.counts.failed", 0),
        ("Total", "integer", ".status.counts.total", 0),
        ("Rate", "string", ".status.rate", 0),
        ("Left", "integer", ".status.timeLeft", 0),
        ("Age", "date", ".metadata.creationTimestamp", 0),
        ("Service", "string", ".spec.serviceRef.name", 1),
        ("Model", "string", ".spec.model.uri", 1),
        ("Shards-Done", "integer", ".status.shards.done", 1),
        ("Reason", "string", _condition("Succeeded", "reason"), 1),
    ),
)


def crd(of: Definition = SERVICES) -> dict[str, Any]:
    """The whole manifest."""
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{of.plural}.{GROUP}", "annotations": dict(KEEP)},
        "spec": {
            "group": GROUP,
            "scope": "Namespaced",
            "names": {
                "kind": of.kind,
                "listKind": f"{of.kind}List",
                "plural": of.plural,
                "singular": of.kind.lower(),
                "shortNames": [of.short],
                "categories": ["all"],
            },
            "versions": [_version(of)],
        },
    }


def _version(of: Definition) -> dict[str, Any]:
    return {
        "name": VERSION,
        "served": True,
        "storage": True,
        "subresources": dict(of.subresources),
        "additionalPrinterColumns": [_column(*column) for column in of.columns],
        "schema": {"openAPIV3Schema": _root(of)},
    }


def _column(name: str, kind: str, path: str, priority: int) -> dict[str, Any]:
    column: dict[str, Any] = {"name": name, "type": kind, "jsonPath": path}
    return {**column, "priority": priority} if priority else column


def _root(of: Definition) -> Schema:
    root = {
        "description": of.about,
        "type": "object",
        "required": ["spec"],
        "properties": {
            "apiVersion": {"type": "string"},
            "kind": {"type": "string"},
            "metadata": {"type": "object"},
            "spec": {"description": "The wanted state.", **object_schema(of.spec)},
            "status": of.status,
        },
    }
    return add_rules(root, of.rules)


class _Plain(yaml.SafeDumper):
    """Writes every value out: anchors and aliases would make the file hard to read."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def render(of: Definition = SERVICES) -> str:
    """The manifest as YAML, byte for byte what crds/PLURAL.yaml holds."""
    return HEADER + yaml.dump(crd(of), Dumper=_Plain, sort_keys=False, width=100)


if __name__ == "__main__":
    for definition in (SERVICES, BATCHES):
        text = render(definition)
        for folder in map(Path, sys.argv[1:]):
            (folder / f"{definition.plural}.yaml").write_text(text)
