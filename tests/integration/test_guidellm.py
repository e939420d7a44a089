"""guidellm, as it is, against a real worker; its own report says what it saw."""

import json
import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path

import httpx
import pytest
from integration.test_openai_client import TEMPLATE
from integration.worker_process import Worker, running_worker

REQUIREMENTS = Path(__file__).with_name("guidellm.txt")
BUILD = Path(__file__).parents[2] / "build"
OURS = sysconfig.get_path("purelib")
FLAGS = ("--max-num-seqs", "4", "--num-gpu-blocks-override", "64", "--max-model-len", "512")
NUM_REQUESTS, PROMPT_TOKENS, OUTPUT_TOKENS = 6, 32, 16
RUN_S = 240.0
ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "GUIDELLM__MAX_WORKER_PROCESSES": "1"}
"""One process that sends is enough: each imports torch, which takes longer than the benchmark."""


def installed(home: Path) -> Path:
    """The interpreter of guidellm's own environment, made if it is not there or out of date."""
    python = home / "bin" / "python"
    uv = [str(Path(sys.executable).parent / "uv"), "--quiet"]
    content = sha256(REQUIREMENTS.read_bytes() + OURS.encode() + sys.version.encode()).hexdigest()
    made = home / "content"
    if not made.exists() or made.read_text() != content:
        shutil.rmtree(home, ignore_errors=True)
        subprocess.run([*uv, "venv", "--python", sys.executable, str(home)], check=True)
        packages = ["--no-deps", "--python", str(python), "-r", str(REQUIREMENTS)]
        subprocess.run([*uv, "pip", "install", *packages], check=True)
        site = home / Path(OURS).relative_to(sys.prefix)
        (site / "behind.pth").write_text(OURS + "\n")  # torch alone is 5 GB, and there already
        made.write_text(content)
    return python


@pytest.fixture(scope="module")
def worker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worker]:
    directory = tmp_path_factory.mktemp("guidellm")
    (directory / "model").mkdir()
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": TEMPLATE}
    (directory / "model" / "tokenizer_config.json").write_text(json.dumps(config))
    with running_worker(directory, *FLAGS) as worker:
        yield worker


def command(python: Path, worker: Worker, report: Path) -> list[str]:
    tokens = f"prompt_tokens={PROMPT_TOKENS},output_tokens={OUTPUT_TOKENS}"
    backend = f"kind=openai_http,target={worker.url},request_format=/v1/chat/completions"
    return [
        *(str(python), "-m", "guidellm", "run", "--disable-console", "--backend", backend),
        *("--profile", "kind=concurrent,streams=2"),
        *("--constraint", f"kind=max_requests,count={NUM_REQUESTS}"),
        *("--tokenizer", f"kind=huggingface_auto,model={worker.log.parent / 'model'}"),
        *("--data", f"kind=synthetic_text,{tokens}"),
        *("--output", f"kind=json,path={report}"),
    ]


@pytest.mark.timeout(900)  # it may have to be installed
def test_guidellm_completes_every_request_and_counts_the_tokens_that_were_made(
    worker: Worker, tmp_path: Path
) -> None:
    report = tmp_path / "report.json"
    run = subprocess.run(
        command(installed(BUILD / "guidellm"), worker, report),
        env={k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | ENVIRONMENT,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=RUN_S,
    )
    assert run.returncode == 0, run.stderr[-4000:]
    (benchmark,) = json.loads(report.read_text())["benchmarks"]
    totals = benchmark["metrics"]["request_totals"]
    expected = {"successful": NUM_REQUESTS, "errored": 0, "incomplete": 0, "total": NUM_REQUESTS}
    assert totals == expected, benchmark["requests"]["errored"][:1]
    answers = benchmark["requests"]["successful"]
    assert len(answers) == NUM_REQUESTS
    for answer in answers:
        messages = json.loads(answer["request_args"])["body"]["messages"]
        asked = httpx.post(worker.url + "/tokenize", json={"messages": messages}).json()
        assert answer["prompt_tokens"] == asked["count"] > PROMPT_TOKENS
        assert answer["output_tokens"] == OUTPUT_TOKENS
        # One event for each token, one with the usage, and [DONE].
        assert answer["info"]["timings"]["request_iterations"] == OUTPUT_TOKENS + 2
        assert 0 < answer["time_to_first_token_ms"] < answer["request_latency"] * 1000
    made = worker.metric("vllm:generation_tokens_total")
    assert made == NUM_REQUESTS * OUTPUT_TOKENS
