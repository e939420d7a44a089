"""build/cluster/cluster.json: which cluster is in use, for the demo and the tests."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path


@dataclass(frozen=True, slots=True)
class State:
    """`kind` is existing, kind or local; `bin_dir` holds kubectl and helm.

    `images` maps operator and worker to what pods pull.
    """

    kind: str
    kubeconfig: str
    bin_dir: str
    registry: str | None = None
    images: dict[str, str] = field(default_factory=dict)

    @classmethod
    def read(cls, file: Path) -> State | None:
        try:
            return cls(**json.loads(file.read_text()))
        except (FileNotFoundError, ValueError, TypeError):
            return None  # none yet, cut short, or of another version: `up` writes it anew

    def write(self, file: Path) -> None:
        file.parent.mkdir(parents=True, exist_ok=True)
        staging = file.with_suffix(".new")
        staging.write_text(json.dumps(asdict(self), indent=1) + "\n")
        staging.replace(file)
