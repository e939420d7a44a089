"""*rim*: one InferenceService of a cluster, read by kubectl."""

import argparse
import json
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sluice_core.words import clean_all

COMMAND_TIMEOUT_SECONDS = 180.0
REQUEST_TIMEOUT_SECONDS = 20
"""Seconds for each try of a read; without an answer, kubectl tries up to eight times."""
NAMESPACE = "default"
OTHER_VERSION = "its status is of another version"
UNREADABLE = AttributeError, ArithmeticError, KeyError, TypeError, ValueError
"""Errors that reading a malformed status raises."""


class KubeError(Exception):
    """A command failed or took too long; the message says which."""


@dataclass(frozen=True, slots=True)
class Kube:
    """One cluster, as its kubeconfig names it; None: kubectl's own choice."""

    kubeconfig: Path | None = None

    def get(self, *argv: str) -> Any:
        """`kubectl get ARGV -o json`, parsed; raises `KubeError`. Its texts are cleaned: anybody
        may write an event, and a terminal would obey it.

        kubectl's standard error is shown as it comes: it may ask a person to sign in.
        """
        chosen = [f"--kubeconfig={self.kubeconfig}"] if self.kubeconfig else []
        limit = f"--request-timeout={REQUEST_TIMEOUT_SECONDS}s"
        asked = f"kubectl get {' '.join(argv)}"
        try:
            done = subprocess.run(
                ["kubectl", "get", *chosen, limit, *argv, "-o", "json"],
                stdout=subprocess.PIPE, timeout=COMMAND_TIMEOUT_SECONDS, check=False,
            )  # fmt: skip
        except subprocess.TimeoutExpired as e:
            raise KubeError(f"{asked} did not end within {COMMAND_TIMEOUT_SECONDS:g} s") from e
        except OSError as e:
            raise KubeError(f"{asked}: {e}") from e
        if done.returncode:
            raise KubeError(f"{asked} failed")
        try:
            return clean_all(json.loads(done.stdout))
        except (ValueError, RecursionError) as e:
            said = done.stdout[:80].decode(errors="replace")
            raise KubeError(f"{asked} gave no JSON: {said!r}") from e

    def events(self, name: str, namespace: str, uid: str | None) -> list[dict[str, Any]]:
        """Events of the named InferenceService, oldest first; with `uid` only of that one."""
        chosen = f"involvedObject.name={name},involvedObject.kind=InferenceService"
        chosen += f",involvedObject.uid={uid}" if uid else ""
        items = self.get("events", "-n", namespace, "--field-selector", chosen)["items"]
        return sorted(items, key=lambda event: event.get("lastTimestamp") or "")


def add_object_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags that name one InferenceService, as kubectl's."""
    parser.add_argument("name", metavar="NAME", help="of the InferenceService")
    parser.add_argument("-n", "--namespace", help="default: that of kubectl's context")
    parser.add_argument("--kubeconfig", type=Path, help="default: kubectl's own")


def find_object(args: argparse.Namespace) -> tuple[Kube, dict[str, Any]]:
    """The cluster and the InferenceService that the flags name; raises `KubeError`."""
    if args.kubeconfig and not args.kubeconfig.is_file():
        raise KubeError(f"--kubeconfig {args.kubeconfig} is not a file")
    kube = Kube(args.kubeconfig)
    where = ("-n", args.namespace) if args.namespace else ()
    return kube, dict(kube.get("inferenceservices.sluice.dev", args.name, *where))
