"""kubectl and helm as subprocesses: the demo does nothing that its reader could not type."""

import argparse
import json
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from sluice_operator.cluster.address import in_url
from sluice_operator.status.schema import STATUS

COMMAND_TIMEOUT_SECONDS = 180.0
REQUEST_TIMEOUT_SECONDS = 20
"""Of each try of a read; where the server does not answer, kubectl asks up to eight times."""
LISTEN_SECONDS = 0.5
"""What a command says this long before its end is a prompt, or of its work; what comes later is
its last word, which is told with its failure."""
SAY_EVERY_SECONDS = 10.0
NAMESPACE = "default"
OTHER_VERSION = "its status is of another version"
_KLOG = re.compile(r"[IWEF]\d{4} \d\d:\d\d:")
"""What kubectl logs of each of its tries, before it says what went wrong."""
_BEGINS_LIKE_KLOG = re.compile(r"[IWEF](\d.*)?")
_KINDS: Mapping[str, tuple[str, type]] = {
    "object": ("object", dict),
    "array": ("list", list),
    "string": ("text", str),
    "integer": ("whole number", int),
    "boolean": ("truth value", bool),
}
"""By the schema's name: what it is called in a sentence, and its type in Python."""
_TEXTS = ("name", "namespace", "uid", "deletionTimestamp")
_METADATA = {**dict.fromkeys(_TEXTS, {"type": "string"}), "generation": {"type": "integer"}}
_MODEL = {"type": "object", "properties": {"uri": {"type": "string"}}}
_OBJECT = {
    "type": "object",
    "properties": {
        "metadata": {"type": "object", "properties": _METADATA},
        "spec": {"type": "object", "properties": {"model": _MODEL}},
    },
}
"""What any InferenceService is like; its status is looked at by itself."""
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
        except subprocess.TimeoutExpired as e:
            raise _too_long(argv) from e
        except OSError as e:
            raise KubeError(f"{' '.join(argv)}: {e}") from e
        return _output(argv, done.returncode, done.stdout, done.stderr)

    def kubectl(self, *argv: str, stdin: str | None = None) -> str:
        """`kubectl ARGV`."""
        return self.run("kubectl", *argv, stdin=stdin)

    def read(self, *argv: str) -> str:
        """`kubectl get ARGV`, which may ask the person at the terminal to sign in."""
        command = ("kubectl", "get", f"--request-timeout={REQUEST_TIMEOUT_SECONDS}s", *argv)
        try:
            with subprocess.Popen(
                command, env=self.env, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
            ) as process:
                try:
                    out, err, shown = _listen(process, " ".join(command))
                finally:
                    process.kill()  # nothing where it has ended
        except subprocess.TimeoutExpired as e:
            raise _too_long(command) from e
        except OSError as e:
            raise KubeError(f"{' '.join(command)}: {e}") from e
        return _output(command, process.returncode, out, err[shown:] or err)

    def get(self, *argv: str) -> Any:
        """`kubectl get ARGV -o json`, parsed."""
        text = self.read(*argv, "-o", "json")
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
        return dict(json.loads(self.read("--raw", path)))

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
        return list(json.loads(self.read("--raw", path))["items"])

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


def _too_long(argv: Sequence[str]) -> KubeError:
    return KubeError(f"{' '.join(argv)}: it did not end within {COMMAND_TIMEOUT_SECONDS:g} s")


def _output(argv: Sequence[str], status: int, out: str, err: str) -> str:
    """What a command that has ended wrote; raises `KubeError` with its words where it failed."""
    if status:
        said = (err or out).splitlines()
        told = [line for line in said if not _KLOG.match(line)] or said
        raise KubeError(f"{' '.join(argv)}: {' '.join(told).strip()}")
    return out


def _listen(process: subprocess.Popen[str], command: str) -> tuple[str, str, int]:
    """Standard output and error to the end, and how much of the latter was shown meanwhile.

    That is shown where a person can read it, as a prompt to sign in waits for them. Raises
    TimeoutExpired.
    """
    start_s, say_s = time.monotonic(), SAY_EVERY_SECONDS
    shown, has_spoken = 0, False
    while True:
        try:
            return *process.communicate(timeout=LISTEN_SECONDS), shown
        except subprocess.TimeoutExpired as e:
            waited_s = time.monotonic() - start_s
            if waited_s > COMMAND_TIMEOUT_SECONDS:
                raise
            if sys.stderr.isatty():
                text, length = _worth_showing((e.stderr or b"").decode(errors="replace")[shown:])
                shown, has_spoken = shown + length, has_spoken or bool(text)
                print(text, end="", file=sys.stderr, flush=True)
            if not has_spoken and waited_s >= say_s:
                print(f"{command}: no answer for {say_s:.0f} s", file=sys.stderr, flush=True)
                say_s += SAY_EVERY_SECONDS


def _worth_showing(said: str) -> tuple[str, int]:
    """What a command said on standard error, without its log; and how much of it is done with: a
    line that may become one of the log is not."""
    *whole, begun = said.split("\n")
    kept = "".join(f"{line}\n" for line in whole if not _KLOG.match(line))
    if _BEGINS_LIKE_KLOG.fullmatch(begun):
        return kept, len(said) - len(begun)
    return kept + begun, len(said)


def another_shape(schema: Mapping[str, Any], value: object, name: str = "") -> str:
    """What of `value` is not as `schema` has it, "" if nothing is; what it does not know is let
    be."""
    if schema.get("x-kubernetes-int-or-string"):
        is_whole = isinstance(value, int) or (isinstance(value, str) and value.isdecimal())
        return "" if is_whole else f"{name} is no whole number"
    called, kind = _KINDS[schema["type"]]
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        return f"{name or 'it'} is no {called}"
    parts: list[tuple[Mapping[str, Any], object, str]] = []
    if isinstance(value, list):
        parts = [(schema["items"], item, f"{name}[{at}]") for at, item in enumerate(value)]
    elif isinstance(value, dict):
        known, others = schema.get("properties", {}), schema.get("additionalProperties", {})
        dot = f"{name}." if name else ""
        parts = [(known.get(key, others), item, f"{dot}{key}") for key, item in value.items()]
    found = (another_shape(part, item, path) for part, item, path in parts if part)
    return next(filter(None, found), "")


def add_object_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags that name one InferenceService, as kubectl's."""
    parser.add_argument("name", metavar="NAME", help="of the InferenceService")
    parser.add_argument("-n", "--namespace", help="default: that of kubectl's context")
    parser.add_argument("--kubeconfig", type=Path, help="default: kubectl's own")


def find_object(args: argparse.Namespace) -> tuple[Kube, dict[str, Any]]:
    """The cluster and the InferenceService that the flags name; raises `KubeError`, also where
    its status is not as the operator of this version writes it."""
    if args.kubeconfig and not args.kubeconfig.is_file():
        raise KubeError(f"--kubeconfig {args.kubeconfig} is not a file")
    kube = Kube(args.kubeconfig)
    where = ("-n", args.namespace) if args.namespace else ()
    body = kube.get("inferenceservices.sluice.dev", args.name, *where)
    if wrong := another_shape(_OBJECT, body):
        raise KubeError(f"what kubectl gave of {args.name} is no InferenceService: {wrong}")
    if wrong := another_shape(STATUS, body.get("status") or {}):
        raise KubeError(f"{OTHER_VERSION}: {wrong}")
    return kube, dict(body)


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
