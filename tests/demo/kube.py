"""kubectl and helm as subprocesses: the demo does nothing that its reader could not type."""

import json
import os
import socket
import subprocess
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from sluice.kube import COMMAND_TIMEOUT_SECONDS, NAMESPACE, KubeError
from sluice_core.words import in_url

T = TypeVar("T")


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
    """One cluster, as its kubeconfig and the folder of kubectl and helm name it."""

    kubeconfig: Path
    bin_dir: Path

    @property
    def env(self) -> dict[str, str]:
        """The environment in which commands run."""
        path = f"{self.bin_dir}{os.pathsep}{os.environ.get('PATH', '')}"
        return {**os.environ, "PATH": path, "KUBECONFIG": str(self.kubeconfig)}

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
            raise KubeError(f"{' '.join(argv)}: {(done.stderr or done.stdout).strip()}")
        return done.stdout

    def kubectl(self, *argv: str, stdin: str | None = None) -> str:
        """`kubectl ARGV`."""
        return self.run("kubectl", *argv, stdin=stdin)

    def get(self, *argv: str) -> Any:
        """`kubectl get ARGV -o json`, parsed."""
        return json.loads(self.kubectl("get", *argv, "-o", "json"))

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

    def events(self, name: str) -> list[dict[str, Any]]:
        """Events of the named InferenceService, oldest first."""
        chosen = f"involvedObject.name={name},involvedObject.kind=InferenceService"
        items = self.get("events", "-n", NAMESPACE, "--field-selector", chosen)["items"]
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
