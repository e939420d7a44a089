"""What the server says of itself holds: schemathesis, as it is, on the OpenAPI document."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from integration.test_openai_client import TEMPLATE
from integration.worker_process import Worker, running_worker, stream_events
from msgspec import Struct
from sluice_frontend.api import response_types

# Lengths, vocabulary and template are the model's: no schema can say which values fit them.
EXCLUDED = "positive_data_acceptance"
CONFIG = """\
[phases.coverage.generation]
mode = "negative"
[phases.fuzzing.generation]
max-examples = 10
[checks.negative_data_rejection]
expected-statuses = ["400", "401", "404", "405", "413", "422", "429", "5xx"]
"""
FLAGS = (
    *("--max-num-seqs", "128", "--num-gpu-blocks-override", "512", "--max-model-len", "32"),
    *("--max-num-queued-reqs", "4096"),
)


@pytest.fixture(scope="module")
def worker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worker]:
    directory = tmp_path_factory.mktemp("published")
    (directory / "model").mkdir()
    (directory / "model" / "chat_template.jinja").write_text(TEMPLATE)
    with running_worker(directory, *FLAGS) as worker:
        yield worker


def test_schemathesis_finds_no_server_error_and_nothing_undocumented(
    worker: Worker, tmp_path: Path
) -> None:
    (tmp_path / "schemathesis.toml").write_text(CONFIG)
    program = Path(sys.executable).parent / "schemathesis"
    run = [
        *(str(program), "run", worker.url + "/openapi.json", "--seed", "1", "--no-shrink"),
        *("--phases", "examples,coverage,fuzzing", "--exclude-checks", EXCLUDED),
    ]
    found = subprocess.run(run, cwd=tmp_path, capture_output=True, text=True, timeout=280)
    assert found.returncode == 0, found.stdout[-6000:] + found.stderr[-2000:]
    assert "Traceback" not in worker.log.read_text()
    worker.until_metric("sluice_open_requests", 0)


OPTIONS = {"include_usage": True, "continuous_usage_stats": True}
TOLD = {"stream": True, "max_tokens": 4, "ignore_eos": True, "return_token_ids": True}
CHAT = {"messages": [{"role": "user", "content": "def"}]}


@pytest.mark.parametrize(
    ("path", "body", "kind"),
    [
        (
            "/v1/completions",
            {"prompt": "def", "logprobs": 2, "echo": True},
            response_types.CompletionChunk,
        ),
        ("/v1/chat/completions", {**CHAT, "logprobs": True}, response_types.ChatChunk),
        ("/v1/chat/completions", {**CHAT, "stream_options": OPTIONS}, response_types.ChatChunk),
        ("/generate", {"prompt": "def"}, response_types.GenerateChunk),
    ],
)
def test_events_are_of_the_published_types_and_lose_no_field_in_them(
    worker: Worker, path: str, body: dict[str, Any], kind: type[Struct]
) -> None:
    events = stream_events(httpx.post(worker.url + path, json=body | TOLD).text)
    chunks = [event for event in events if event != "[DONE]"]
    assert len(chunks) >= 4
    for chunk in chunks:
        read = msgspec.json.decode(chunk, type=kind)
        assert msgspec.to_builtins(read) == json.loads(chunk)


@pytest.mark.parametrize(
    ("path", "body", "kind"),
    [
        (
            "/v1/completions",
            {"prompt": "def", "prompt_logprobs": 1},
            response_types.CompletionReply,
        ),
        ("/v1/chat/completions", {**CHAT, "prompt_logprobs": 1}, response_types.ChatReply),
        ("/generate", {"prompt": "def"}, response_types.GenerateReply),
        ("/tokenize", {"prompt": "def", "return_token_strs": True}, response_types.TokenizeReply),
        ("/v1/completions", {"prompt": 3}, response_types.ErrorReply),
        ("/nowhere", {}, response_types.ErrorReply),
    ],
)
def test_answers_are_of_the_published_types_and_lose_no_field_in_them(
    worker: Worker, path: str, body: dict[str, Any], kind: type[Struct]
) -> None:
    answer = httpx.post(worker.url + path, json=TOLD | body | {"stream": False})
    read = msgspec.json.decode(answer.content, type=kind)
    assert msgspec.to_builtins(read) == answer.json()
