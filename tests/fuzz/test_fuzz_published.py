"""What the servers say of themselves: schemathesis on our worker, and on the gate."""

import json
import subprocess
import sys
from pathlib import Path

from fuzz.budget import SECONDS
from fuzz.front import TRACEBACK, front
from integration.worker_process import running_worker

TEXTS = {"oneOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]}
MESSAGES = {"type": "array", "items": {"type": "object", "additionalProperties": True}}
COMMON = {
    "n": {"type": "integer", "minimum": 1, "maximum": 8},
    "stream": {"type": "boolean"},
    "max_tokens": {"type": "integer"},
    "priority": {"type": "integer"},
    "slo_ttft_ms": {"type": "number"},
}
BODIES = {
    "/v1/completions": COMMON | {"prompt": TEXTS},
    "/v1/chat/completions": COMMON | {"messages": MESSAGES},
    "/v1/embeddings": {"input": TEXTS, "dimensions": {"type": "integer"}},
}
"""Routes of a foreign engine, and fields that the gate reads."""


def described() -> dict[str, object]:
    """An OpenAPI document of them: the gate publishes none, as its routes are the engine's."""
    paths = {
        path: {
            "post": {
                "requestBody": {
                    "content": {
                        "application/json": {"schema": {"type": "object", "properties": properties}}
                    }
                },
                "responses": {"200": {"description": "answered"}},
            }
        }
        for path, properties in BODIES.items()
    }
    return {"openapi": "3.1.0", "info": {"title": "an engine", "version": "1"}, "paths": paths}


def schemathesis(folder: Path, location: str, *flags: str) -> None:
    """Run it for the seconds of this fuzz."""
    program = Path(sys.executable).parent / "schemathesis"
    run = [
        *(str(program), "run", location, "--phases", "fuzzing", "--max-examples", "20"),
        *("--max-time", str(max(1, round(SECONDS))), "--checks", "not_a_server_error", *flags),
        *("--suppress-health-check", "too_slow"),  # of a busy machine
    ]
    found = subprocess.run(run, cwd=folder, capture_output=True, text=True, timeout=SECONDS + 120)
    assert found.returncode == 0, found.stdout[-6000:] + found.stderr[-2000:]


def test_the_gate_answers_no_request_with_a_server_error(tmp_path: Path) -> None:
    document = tmp_path / "openapi.json"
    document.write_text(json.dumps(described()))
    with front(tmp_path) as made:
        schemathesis(tmp_path, str(document), "--url", made.living().worker.url)
        made.judge("schemathesis")


def test_the_worker_answers_no_request_with_a_server_error(tmp_path: Path) -> None:
    flags = ("--max-num-seqs", "128", "--num-gpu-blocks-override", "512", "--max-model-len", "32")
    with running_worker(tmp_path, *flags, "--max-num-queued-reqs", "4096") as worker:
        schemathesis(tmp_path, worker.url + "/openapi.json")
        assert TRACEBACK not in worker.log.read_text()
