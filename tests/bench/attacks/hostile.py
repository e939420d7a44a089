"""Kind C: numbers of engines and sockets, and words of models and kubelets."""

import asyncio
import json
import math
import os
import socket
import subprocess
import sys
import unicodedata
from contextlib import suppress
from pathlib import Path

from bench.attacks.table import Came, Stage, attack, came, stage
from integration.apiserver import running_apiserver
from integration.operator_runs import administrator
from msgspec import structs
from sluice_core.port import EngineLoad
from sluice_core.wire import StepReport, encode_frame
from strangers.client import ask, request
from strangers.engine import Answer, stream
from unit.operator.objects import valid_object
from unit.worker.api.tiny import write_checkpoint

SETTLE_S = 2.5
"""Longer than a tick of the evidence: numbers that were taken in are summed by then."""
ALIVE = "the gate lives, answers, and its cap stays"
CAP = 8
FLAGS = ("--max-num-seqs", str(CAP))
NUMBERS = ("4611686018427387904", "-5", "NaN", "1e308", "-1e308", "9" * 400, '"x"', "true", "[1]")
"""As JSON, and as what Python's parser takes for it."""


def _json(body: bytes) -> Answer:
    return Answer(headers=[("content-type", "application/json")], pieces=[body])


def told_answers() -> list[tuple[str, str, Answer]]:
    """(path, what the engine says, its answer) with each hostile number in each place."""
    rows = []
    for number in NUMBERS:
        usage = f'"usage":{{"prompt_tokens":{number},"completion_tokens":{number}}}'.encode()
        rows.append(
            ("/v1/completions", f"usage {number[:20]}", _json(b'{"choices":[],' + usage + b"}"))
        )
        last = b'data: {"choices":[],' + usage + b"}\n\n"
        rows.append(("/v1/completions", f"usage {number[:20]} in a stream", stream([last])))
        counts = f'"prompt_eval_count":{number},"eval_count":{number}'.encode()
        rows.append(
            ("/api/chat", f"eval_count {number[:20]}", _json(b'{"done":true,' + counts + b"}\n"))
        )
    return rows


async def _well(at: Stage) -> tuple[bool, str]:
    """Whether the gate lives, answers and has its cap; and how it looks."""
    at.engine.answers()
    reply = await ask(
        at.gate.address, request("POST", "/v1/completions", {"prompt": "a"}), limit_s=5
    )
    if at.gate.exit_code() is not None:
        return False, f"then {reply.status or 'no answer'}"
    cap = at.gate.worker.metric("sluice_cap")
    return reply.status == 200 and cap == CAP, f"then {reply.status}, cap {cap:g}"


@attack("C", "usage-numbers", "usage and eval_count of 2^62, -5, NaN, 1e308, 400 digits ...", ALIVE)
async def usage_numbers(directory: Path) -> Came:
    with stage(directory, *FLAGS) as at:
        last = "none"
        for path, said, answer in told_answers():
            at.engine.answers(answer)
            stream_it = "stream" in said or path == "/api/chat"
            body = {"prompt": "a", "messages": [], "stream": stream_it}
            await ask(at.gate.address, request("POST", path, body), limit_s=5)
            if at.gate.exit_code() is not None:
                last = said
                break
        await asyncio.sleep(SETTLE_S)
        ok, how = await _well(at)
        return came(at.gate, ok, f"{how}" + (f"; ended at {last}" if last != "none" else ""))


NAMES = (
    "vllm:num_requests_waiting",
    "vllm:kv_cache_usage_perc",
    "vllm:num_preemptions_total",
    "vllm:generation_tokens_total",
)
VALUES = ("NaN", "+Inf", "-Inf", "-1", "1e300", "9" * 400)


@attack("C", "metrics-numbers", "an engine's metrics of NaN, +Inf, -Inf, -1, 1e300", ALIVE)
async def metrics_numbers(directory: Path) -> Came:
    with stage(directory, *FLAGS, "--engine", "vllm") as at:
        fatal = ""
        for value in VALUES:
            text = "".join(f"{name} {value}\n" for name in NAMES).encode()
            at.engine.answers(
                Answer(path="/metrics", headers=[("content-type", "text/plain")], pieces=[text])
            )
            await asyncio.sleep(1.3)  # the gate looks each second
            if at.gate.exit_code() is not None:
                fatal = f"; ended at {value}"
                break
        ok, how = await _well(at)
        return came(at.gate, ok, how + fatal)


_SNAPSHOT = EngineLoad(1, 0, 0, 1, 0, 10, 0, 0, 0, 0)
_REPORT = StepReport([], 0, 0.0, 0.01, 1, 1, 0, 1, False, _SNAPSHOT)
REPORTS = (
    *(structs.replace(_REPORT, step_s=value) for value in (math.nan, math.inf, -1.0, 1e300)),
    *(structs.replace(_REPORT, started_s=value) for value in (math.nan, -math.inf)),
    *(structs.replace(_REPORT, num_decodes=value) for value in (1 << 62, -(1 << 62))),
    structs.replace(_REPORT, num_kv_tokens=1 << 62, num_prefill_tokens=1 << 62),
    structs.replace(
        _REPORT, num_running=1 << 62, snapshot=structs.replace(_SNAPSHOT, running=1 << 62)
    ),
    structs.replace(_REPORT, price_s=math.nan),
)


@attack(
    "C",
    "socket-frames",
    "frames on the engine's socket: step_s NaN, inf, -1, 1e300, running 2^62, half a frame",
    ALIVE,
)
async def socket_frames(directory: Path) -> Came:
    path = directory / "engine.sock"
    with stage(directory, *FLAGS, "--engine", "vllm", "--engine-socket", str(path)) as at:
        for frame in (
            *map(encode_frame, REPORTS),
            b"\xff\xff\xff\xff",
            b"\x02\0\0\0\xc1\xc1",
            b"\x09",
        ):
            with suppress(OSError), socket.socket(socket.AF_UNIX) as engine:
                engine.connect(str(path))
                engine.sendall(frame * 3)
                await asyncio.sleep(0.1)
        await asyncio.sleep(SETTLE_S)
        ok, how = await _well(at)
        return came(at.gate, ok, how)


WORDS = "\x1b]0;owned\x07 \x1b[2J \u202egnp.exe \u2028 \x9b31m"
"""Sets a terminal's title, rings, clears it, and turns the direction of text."""


def controls(text: str) -> list[str]:
    """The control and format characters in a text, and its separators of lines that are none."""
    kinds = {each: unicodedata.category(each) for each in set(text) - {"\n", "\t"}}
    return sorted(f"U+{ord(each):04X}" for each, kind in kinds.items() if kind in _UNSHOWN)


_UNSHOWN = ("Cc", "Cf", "Zl", "Zp", "Cs")


def _sluice(*arguments: str, path: str = "") -> str:
    environment = {**os.environ, "PATH": f"{path}:{os.environ['PATH']}"} if path else None
    program = str(Path(sys.executable).parent / "sluice")
    done = subprocess.run(
        [program, *arguments], capture_output=True, text=True, env=environment, timeout=60
    )
    return done.stdout + done.stderr


@attack(
    "C",
    "words-of-a-model",
    "ESC, BEL, U+202E, U+2028 in four fields of config.json: `sluice plan`",
    "no control character on the terminal",
)
async def words_of_a_model(directory: Path) -> Came:
    found: list[str] = []
    for name in ("model_type", "architectures", "torch_dtype", "hidden_act"):
        model = write_checkpoint(directory / name)
        config = json.loads((model / "config.json").read_text())
        config[name] = [WORDS] if name == "architectures" else WORDS
        (model / "config.json").write_text(json.dumps(config))
        found += controls(_sluice("plan", str(model), "--memory", "2Gi", "--device", "cpu"))
    return Came(f"printed: {', '.join(sorted(set(found))) or 'none'}", not found)


@attack(
    "C",
    "words-of-a-status",
    "a condition and an event with ESC, BEL, U+202E, U+2028: `sluice status`",
    "no control character on the terminal",
)
async def words_of_a_status(directory: Path) -> Came:
    objects = "/apis/sluice.dev/v1alpha1/namespaces/default/inferenceservices"
    told = {
        "type": "Ready", "status": "False", "reason": "Failing", "message": WORDS,
        "lastTransitionTime": "2026-01-01T00:00:00Z", "observedGeneration": 1,
    }  # fmt: skip
    with running_apiserver(directory / "api") as server, administrator(server) as client:
        made = client.post(objects, json=valid_object()).raise_for_status().json()
        client.patch(
            f"{objects}/demo/status",
            json={"status": {"conditions": [told], "observedGeneration": 1}},
            headers={"content-type": "application/merge-patch+json"},
        ).raise_for_status()
        about = {"kind": "InferenceService", "name": "demo", "namespace": "default"}
        about["uid"] = made["metadata"]["uid"]
        event_ = {
            "metadata": {"name": "demo.1", "namespace": "default"}, "involvedObject": about,
            "type": "Warning", "reason": "Failing", "message": WORDS,
            "lastTimestamp": "2026-01-01T00:00:00Z", "count": 1,
        }  # fmt: skip
        client.post("/api/v1/namespaces/default/events", json=event_).raise_for_status()
        kubectl = str(server.kubectl.parent)
        page = _sluice("status", "demo", "--kubeconfig", str(server.kubeconfig), path=kubectl)
    found = controls(page)
    shown = "gnp.exe" in page  # or the words were not there at all
    return Came(f"printed: {', '.join(found) or 'none'}", shown and not found)
