"""Which cluster to use. Pure: what was found comes in, the choice and its sentence go out."""

from dataclasses import dataclass
from typing import Literal

Kind = Literal["existing", "kind", "local", "none"]


@dataclass(frozen=True, slots=True)
class Found:
    """Facts about this machine and its environment that decide the choice."""

    kubeconfig: str | None
    docker_answers: bool
    wants_kind: bool
    is_root: bool
    is_linux: bool
    has_apt: bool


@dataclass(frozen=True, slots=True)
class Choice:
    """The kind of cluster, and why in one sentence."""

    kind: Kind
    reason: str


def choose(found: Found) -> Choice:
    """The user's own cluster, else kind, else a local one, else what is missing."""
    if found.kubeconfig:
        return Choice(
            "existing", f"using the cluster that SLUICE_KUBECONFIG names ({found.kubeconfig})"
        )
    if found.docker_answers:
        return Choice("kind", "a Docker engine answers: using a kind cluster")
    if found.wants_kind:
        return Choice("none", "SLUICE_CLUSTER is kind, and no Docker engine answers")
    if found.is_linux and found.is_root and found.has_apt:
        return Choice("local", "no Docker engine: running Kubernetes on this machine, as root")
    lacks = ", ".join(_lacks(found))
    return Choice(
        "none",
        "no cluster is possible here: SLUICE_KUBECONFIG is not set, no Docker engine answers, "
        f"and a local cluster needs {lacks}",
    )


def _lacks(found: Found) -> list[str]:
    wanted = (
        (found.is_linux, "Linux"),
        (found.is_root, "root"),
        (found.has_apt, "Debian's or Ubuntu's apt-get"),
    )
    return [name for there, name in wanted if not there]
