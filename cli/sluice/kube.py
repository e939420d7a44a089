"""kubectl and helm as subprocesses: the demo does nothing that its reader could not type."""

import argparse
import json
import os
import re
import socket
import subprocess
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from sluice_operator.address import in_url

COMMAND_TIMEOUT_SECONDS = 180.0
NAMESPACE = "default"
_KLOG = re.compile(r"[IWEF]\d{4} \d\d:\d\d:")
"""What kubectl logs of each of its tries, before it says what went wrong."""
T = TypeVar("T")


class KubeError(Exception):
    """A command failed, or what was waited for did not come; the message says which."""


def wait_for(what: str, seconds: float, look: Callable[[], T | None]) -> T:
    """Look every second until `look` returns something; raises `KubeError` after `seconds`."""
    end = time.monotonic() + seconds
    while (seen := look()) is None:
        if time.monotonic() > end:
            raise KubeError(f"waited {seconds:.0f} s in vain for {what}")
        time.sleep(1.0)
    return seen


def condition(service: Mapping[str, Any] | None, kind: str) -> Mapping[str, Any]:
    """The named condition of the object's status, or an empty one."""
    conditions = ((service or {}).get("status") or {}).get("conditions") or []
    return next((c for c in conditions if c.get("type") == kind), {})


@dataclass(frozen=True, slots=True)
class Kube:
    """One cluster, as its kubeconfig and the folder of kubectl and helm name it.

    None: as a person's own shell would find them.
    """

    kubeconfig: Path | None = None
    bin_dir: Path | None = None

    @property
    def env(self) -> dict[str, str]:
        """The environment in which commands run."""
        env = dict(os.environ)
        if self.bin_dir is not None:
            env["PATH"] = f"{self.bin_dir}{os.pathsep}{env.get('PATH', '')}"
        if self.kubeconfig is not None:
            env["KUBECONFIG"] = str(self.kubeconfig)
        return env

    def run(self, *argv: str, stdin: str | None = None) -> str:
        """Run a command to its end and return its standard output; raises `KubeError`."""
        try:
            done = subprocess.run(
                argv, env=self.env, input=stdin, capture_output=True, text=True, check=False,
                timeout=COMMAND_TIMEOUT_SECONDS,
            )  # fmt: skip
        except (OSError, subprocess.TimeoutExpired) as e:
            raise KubeError(f"{' '.join(argv)}: {e}") from e
        if done.returncode:
            said = (done.stderr or done.stdout).splitlines()
            told = [line for line in said if not _KLOG.match(line)] or said
            raise KubeError(f"{' '.join(argv)}: {' '.join(told).strip()}")
        return done.stdout

    def kubectl(self, *argv: str, stdin: str | None = None) -> str:
        """`kubectl ARGV`."""
        return self.run("kubectl", *argv, stdin=stdin)

    def get(self, *argv: str) -> Any:
        """`kubectl get ARGV -o json`, parsed."""
        text = self.kubectl("get", *argv, "-o", "json")
        try:
            return json.loads(text)
        except ValueError as e:
            raise KubeError(f"kubectl get {' '.join(argv)} gave no JSON: {text[:80]!r}") from e

    def patch(self, kind: str, name: str, body: Mapping[str, object]) -> None:
        """A merge patch."""
        self.kubectl("patch", kind, name, "--type=merge", "-p", json.dumps(body))

    def follow(self, *argv: str) -> Generator[str, None, None]:
        """The lines of a command's standard output as they come; closing it ends the command."""
        with subprocess.Popen(argv, env=self.env, stdout=subprocess.PIPE, text=True) as process:
            try:
                yield from process.stdout or ()
            finally:
                process.terminate()

    def inference_service(self, name: str) -> dict[str, Any]:
        """The object as it is now; one raw GET, cheap enough for every two seconds."""
        path = f"/apis/sluice.dev/v1alpha1/namespaces/{NAMESPACE}/inferenceservices/{name}"
        return dict(json.loads(self.kubectl("get", "--raw", path)))

    def events(
        self, name: str, namespace: str = NAMESPACE, uid: str | None = None
    ) -> list[dict[str, Any]]:
        """Events of the named InferenceService, oldest first; with `uid` only of that one."""
        chosen = f"involvedObject.name={name},involvedObject.kind=InferenceService"
        chosen += f",involvedObject.uid={uid}" if uid else ""
        items = self.get("events", "-n", namespace, "--field-selector", chosen)["items"]
        return sorted(items, key=lambda event: event.get("lastTimestamp") or "")

    def pods(self, name: str) -> list[dict[str, Any]]:
        """The pods of the named InferenceService."""
        selector = f"app.kubernetes.io/instance%3D{name}"
        path = f"/api/v1/namespaces/{NAMESPACE}/pods?labelSelector={selector}"
        return list(json.loads(self.kubectl("get", "--raw", path))["items"])

    def cluster_address(self, name: str) -> str:
        """`IP:PORT` of a Service inside the cluster."""
        spec = self.get("service", name, "-n", NAMESPACE)["spec"]
        return f"{in_url(spec['clusterIP'])}:{spec['ports'][0]['port']}"

    def routed_url(self, name: str) -> str | None:
        """The URL of the Service at its own address, if that is routed from here."""
        address = self.cluster_address(name)
        host, _, port = address.rpartition(":")
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=2.0).close()
        except OSError:
            return None
        return f"http://{address}"

    @contextmanager
    def service_url(self, name: str) -> Iterator[str]:
        """A URL of the Service from here: its own address if it is routed, else a port-forward."""
        if url := self.routed_url(name):
            yield url
            return
        argv = ("kubectl", "port-forward", "-n", NAMESPACE, f"service/{name}", ":80")
        with closing(self.follow(*argv)) as lines:
            # "Forwarding from 127.0.0.1:41234 -> 8000"
            forwarding = next(lines, "").split()
            if len(forwarding) < 3:
                raise KubeError(f"{' '.join(argv)} forwards nothing, and {name} is not routed here")
            yield f"http://{forwarding[2]}"

    def last_words(self, pod: str) -> str:
        """The last line that a pod printed."""
        lines = self.kubectl("logs", "--tail=1", "-n", NAMESPACE, pod).strip()
        return lines or "it printed nothing"

    def start_load(self, pod: str, image: str, name: str, *argv: str) -> None:
        """Run `sluice load` against the Service in a pod, and wait until it runs."""
        url = f"http://{self.cluster_address(name)}"
        manifest = load_pod(pod, image, ["--url", url, "--model", name, *argv])
        self.kubectl("apply", "-f", "-", stdin=json.dumps(manifest))

        def started() -> bool | None:
            phase = self.get("pod", pod, "-n", NAMESPACE)["status"].get("phase")
            return True if phase in ("Running", "Succeeded", "Failed") else None

        wait_for(f"pod {pod} to start", 90, started)


def add_object_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags that name one InferenceService, as kubectl's."""
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


def load_pod(name: str, image: str, argv: list[str]) -> dict[str, object]:
    """A pod that runs `sluice load ARGV`, under Pod Security `restricted`."""
    secure = {
        "allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }  # fmt: skip
    container = {
        "name": "load", "image": image, "imagePullPolicy": "IfNotPresent",
        "securityContext": secure,
        "command": ["python3", "-m", "sluice", "load", *argv],
    }  # fmt: skip
    spec = {
        "restartPolicy": "Never", "automountServiceAccountToken": False, "containers": [container],
        "securityContext": {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}},
    }  # fmt: skip
    meta = {"name": name, "namespace": NAMESPACE}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": meta, "spec": spec}
