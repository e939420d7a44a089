"""build/cluster/cluster.json: which cluster is in use, for the demo and the tests."""

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Self

from sluice_cluster.shell import write_whole


@dataclass(frozen=True, slots=True)
class State:
    """`kind` is existing, kind or local; `bin_dir` holds kubectl and helm.

    `images` maps operator and worker to the references that pods pull.
    """

    kind: str
    kubeconfig: str
    bin_dir: str
    registry: str | None = None
    images: dict[str, str] = field(default_factory=dict)

    @classmethod
    def read(cls, file: Path) -> Self | None:
        try:
            return cls(**json.loads(file.read_text()))
        except (FileNotFoundError, ValueError, TypeError):
            return None  # none yet, truncated, or from another version: `up` writes it anew

    def write(self, file: Path) -> None:
        write_whole(file, json.dumps(asdict(self), indent=1) + "\n")
